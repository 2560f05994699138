"""Program of one section, or of a process that a section starts.

Without a GPU it runs the section on a simulated node, if the section supports that. A section uses
the device of `LOCAL_RANK`, as a rank of Megatron does.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tools.gpu_check.discovery import PACKAGE
from tools.gpu_check.report import Report

#: Memory of each simulated device, which is host memory.
_SIMULATED_NBYTES = 128 << 20


def main(arguments: list[str]) -> None:
    """Run the section that the arguments name; an exception of the section ends the process."""
    parser = argparse.ArgumentParser(prog="tools.gpu_check.section", description=__doc__)
    parser.add_argument("name", help="module of the package of sections")
    parser.add_argument("--label", help="name of the section in the report; default: its letter")
    parser.add_argument("--to", type=Path, help="file for the JSON lines; default: stdout")
    parser.add_argument("--package", default=PACKAGE, help="where the module is")
    parser.add_argument("--seconds", type=float, help="limit after which the driver kills this")
    given = parser.parse_args(arguments)
    section = importlib.import_module(f"{given.package}.{given.name}")
    with _device(section, given.seconds or section.SECONDS), _stream(given.to) as stream:
        section.run(Report(given.label or section.LETTER, stream))


@contextlib.contextmanager
def _device(section: Any, seconds: float) -> Iterator[None]:
    """Set the device of this thread; without a GPU a simulated one."""
    if not section.GPUS:  # do not import torch, which takes seconds
        yield
        return
    import torch

    from tests.simulated_gpu import simulated_gpus
    from tools.gpu_check import machine

    machine.deadline = time.monotonic() + seconds
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        yield
    elif section.SIMULATED:
        with simulated_gpus(8, memory_nbytes=_SIMULATED_NBYTES) as node:
            machine.simulated_node = node
            torch.cuda.set_device(5)  # device 0 would hide a thread that does not set its device
            yield
    else:
        sys.exit("this section needs a GPU")


@contextlib.contextmanager
def _stream(to: Path | None) -> Iterator[TextIO]:
    if to is None:
        yield sys.stdout
    else:
        with to.open("a") as stream:
            yield stream
