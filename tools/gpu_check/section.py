"""Program of one section, or of a process that a section starts.

Without a GPU it runs on a simulated node. A section uses the device of `LOCAL_RANK`, as a rank of
Megatron does.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterator

from tools.gpu_check.report import Report

#: Memory of each simulated device, which is host memory.
_SIMULATED_NBYTES = 128 << 20


def main(arguments: list[str]) -> None:
    """Run a section; an exception of the section ends the process.

    Args:
        arguments: the section's module, its name in the report, the file for the report's lines,
            the seconds after which this process is killed, and the number of GPUs. A program that a
            section starts is named MODULE or MODULE:FUNCTION.
    """
    module, label, to, seconds, gpus = arguments
    name, _, function = module.partition(":")
    run = getattr(importlib.import_module(name), function or "run")
    with _device(float(seconds), int(gpus)), open(to, "a") as stream:
        run(Report(label, stream))


@contextlib.contextmanager
def _device(seconds: float, gpus: int) -> Iterator[None]:
    """Set the device of this thread; without a GPU a simulated one."""
    if not gpus:  # do not import torch, which takes seconds
        yield
        return
    import torch

    from tests.simulated_gpu import simulated_gpus
    from tools.gpu_check import machine

    machine.deadline = time.monotonic() + seconds
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        yield
    else:
        with simulated_gpus(8, memory_nbytes=_SIMULATED_NBYTES) as node:
            machine.simulated_node = node
            torch.cuda.set_device(5)  # device 0 would hide a thread that does not set its device
            yield
