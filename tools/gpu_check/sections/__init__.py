"""Sections of the GPU check: what the driver knows of them, without an import of their modules.

A section is a module with a function `run(report)`, which does the work.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os


@dataclasses.dataclass(frozen=True)
class Section:
    name: str
    """Module in the package of sections."""
    label: str
    """Name in the report: the section's letter, or its letter and a device."""
    title: str
    seconds: float
    """Time limit in seconds; a smaller rest of the budget limits it further. Only the budget limits
    a section that runs as the only one."""
    gpus: int = 1
    """Number of GPUs that the section needs; a section of one GPU also runs on a simulated node."""
    megatron: bool = True
    alone: bool = False
    """True if the section measures times, so no other section may run beside it."""
    environ: tuple[tuple[str, str], ...] = ()
    """Variables that the section gets in addition to the driver's environment."""

    def why_not(self, gpus: int) -> str:
        """Return why the section cannot run on a machine with `gpus` GPUs; empty if it can."""
        if self.megatron and importlib.util.find_spec("megatron") is None:
            return "megatron is not installed"
        return "" if self.gpus <= max(gpus, 1) else f"needs {self.gpus} GPUs"


def _on_the_second_device(section: Section) -> Section:
    # A new thread starts on the first device, so a thread that does not set its device is found.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    environ = {"CUDA_VISIBLE_DEVICES": ",".join(reversed(visible[:2])), "LOCAL_RANK": "1"}
    return dataclasses.replace(
        section,
        label=f"{section.label}1",
        title=f"{section.title}, on the second of two devices",
        gpus=2,
        environ=tuple(environ.items()),
    )


_TORN = Section("torn_saves", "T", "torn saves", 75, megatron=False)
_DEVICES = Section("devices", "D", "devices of threads", 30)
#: In the order in which they run: the most telling ones first, because time may not suffice for
#: all.
SECTIONS = (
    Section("copies", "C", "copies to host memory", 30, megatron=False, alone=True),
    Section("megatron", "M", "Megatron: training lost per save, restarts", 150, alone=True),
    Section("loads", "L", "loads from memory and from storage", 40, alone=True),
    Section("head_of_line", "H", "training's calls behind a save", 30, alone=True),
    _TORN,
    Section("deaths", "K", "kills, and GPUs that fail or hang", 70),
    Section("capture", "G", "graph captures", 45),
    _DEVICES,
    Section("nccl", "N", "collectives over NCCL and gloo", 40, megatron=False),
    Section("settings", "F", "settings that a captured step reads", 30),
    Section("rng", "R", "random generators", 30),
    Section("pinning", "P", "page-locking", 40, megatron=False, alone=True),
    _on_the_second_device(_TORN),
    _on_the_second_device(_DEVICES),
)
