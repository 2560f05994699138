"""Waits of training's small copies behind the copies of a save, by the number of connections."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tools.gpu_check import machine
from tools.gpu_check.child import Child, wait
from tools.gpu_check.report import Report

LETTER = "H"
TITLE = "small copies behind a save, by variant"
SECONDS = 25
GPUS = 1
SIMULATED = True
MEGATRON = False
ALONE = True

#: Values of the variable; None: the variable is not set. Megatron often requires 1.
_CONNECTIONS = ("1", None)
_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
#: Time limit of one value.
_CHILD_S = 12.0


def run(report: Report) -> None:
    """Run a process for each value of CUDA_DEVICE_MAX_CONNECTIONS, one after the other."""
    inherited = os.environ.pop(_VARIABLE, None)
    try:
        with tempfile.TemporaryDirectory(prefix="h-") as directory:
            for connections in _CONNECTIONS:
                if machine.seconds_left() < _CHILD_S / 2:
                    report.skip(f"MAX_CONNECTIONS {connections or 'unset'}", "no time left")
                    continue
                environment = {} if connections is None else {_VARIABLE: connections}
                _run(report, Child("small_copies", Path(directory), **environment))
    finally:
        if inherited is not None:
            os.environ[_VARIABLE] = inherited


def _run(report: Report, child: Child) -> None:
    wait([child], min(_CHILD_S, machine.seconds_left()))
    child.pass_on(report, figures=True)
    if child.status != 0:
        report.must("the process that makes small copies ends well", False, child.output)
