"""List of the sections, in the order in which they run.

Their constants are read from the source, because an import of a section would import torch and
Megatron.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any

PACKAGE = "tools.gpu_check.sections"
CHILDREN = "tools.gpu_check.children"
#: Order of the sections: the most telling ones come first, because time may not suffice for all.
ORDER = "CMLHTKGDNFRP"
#: Sections that run again on the second device, if there are two.
_ON_ANOTHER_DEVICE = ("D", "T")
_CONSTANTS = ("LETTER", "TITLE", "SECONDS", "GPUS", "SIMULATED", "MEGATRON", "ALONE")
#: Modules that most sections import, in addition to their own ones.
_IMPORTED = ("megatron.training.training", "tests.simulated_gpu", "scripts.pretrain_gpt_tiny")


@dataclasses.dataclass(frozen=True)
class Section:
    """Section to run as a process."""

    name: str
    """Module in the package of sections."""
    label: str
    """Name in the report: the section's letter, or its letter and a device."""
    title: str
    seconds: float
    """Time limit in seconds; a smaller rest of the budget limits it further."""
    gpus: int
    """Number of GPUs that the section needs."""
    simulated: bool
    """True if the section also runs on the simulated node."""
    megatron: bool
    """True if the section imports Megatron."""
    alone: bool
    """True if the section measures times, so no other section may run beside it."""
    environ: tuple[tuple[str, str], ...] = ()
    """Variables that the section gets in addition to the driver's environment."""

    def why_not(self, gpus: int) -> str:
        """Return why the section cannot run on a machine with `gpus` GPUs; empty if it can."""
        if self.megatron and importlib.util.find_spec("megatron") is None:
            return "megatron is not installed"
        if self.gpus <= gpus or (gpus == 0 and self.simulated):
            return ""
        return "needs a GPU" if self.gpus == 1 else f"needs {self.gpus} GPUs"


def sections(package: str) -> list[Section]:
    """Return all sections of a package, some of them a second time for the second device."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"there is no package {package}"
    paths = [
        path for place in spec.submodule_search_locations or () for path in Path(place).iterdir()
    ]
    listed = [_section(path) for path in paths if path.suffix == ".py" and path.stem != "__init__"]
    again = [
        _on_another_device(section) for section in listed if section.label in _ON_ANOTHER_DEVICE
    ]
    return sorted(listed + again, key=_place)


def imported(package: str, listed: list[Section]) -> list[str]:
    """Return the modules that the processes of these sections of a package import."""
    if all(section.gpus == 0 for section in listed):
        return []
    children = Path(__file__).with_name("children")
    programs = [
        *(f"{package}.{name}" for name in dict.fromkeys(section.name for section in listed)),
        *(f"{CHILDREN}.{path.stem}" for path in children.glob("[a-z]*.py")),
    ]
    return ["torch", *_IMPORTED, *programs]


def _section(path: Path) -> Section:
    values: dict[str, Any] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in _CONSTANTS:
                values[name] = ast.literal_eval(node.value)
    missing = [name for name in _CONSTANTS if name not in values]
    assert not missing, f"{path}: a section has to define {', '.join(missing)}"
    return Section(path.stem, *(values[name] for name in _CONSTANTS))


def _place(section: Section) -> tuple[bool, int, str]:
    letter = section.label[0]
    place = ORDER.index(letter) if letter in ORDER else len(ORDER)
    return section.gpus > 1, place, section.label


def _on_another_device(section: Section) -> Section:
    # A new thread starts on the first device, so a thread that does not set its device is found.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    environ = {"CUDA_VISIBLE_DEVICES": ",".join(reversed(visible[:2])), "LOCAL_RANK": "1"}
    return dataclasses.replace(
        section,
        label=f"{section.label}1",
        title=f"{section.title}, on the second of two devices",
        gpus=2,
        simulated=False,
        environ=tuple(environ.items()),
    )
