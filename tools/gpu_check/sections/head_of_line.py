"""Waits of training's calls behind the copies of a save, by number of connections."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tools.gpu_check import machine
from tools.gpu_check.process import Child, wait
from tools.gpu_check.report import Report

#: Values of the variable; None: the variable is not set. Megatron often requires 1.
_CONNECTIONS = ("1", None)
_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def run(report: Report) -> None:
    """Run a process for each value of CUDA_DEVICE_MAX_CONNECTIONS, one after the other."""
    os.environ.pop(_VARIABLE, None)
    with tempfile.TemporaryDirectory(prefix="h-") as directory:
        for connections in _CONNECTIONS:
            environment = {} if connections is None else {_VARIABLE: connections}
            child = Child("small_copies", Path(directory), environment)
            wait([child], machine.seconds_left() - 1.0)
            child.pass_on(report, figures=True)
            if child.status != 0:
                report.must("the process that calls ends well", False, child.output)
