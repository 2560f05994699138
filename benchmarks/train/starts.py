"""Two ways to start a rank: as a new process, or forked from one that has imported Megatron.

On a GPU's machine the imports of torch and Megatron take 8 to 22 s, as long as a job's training.
The forked rank finds them done, and still has a process group and a CUDA context of its own.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.forked.job import run_script
from tools.gpu_check.forkserver import Process

#: Modules that a forked rank finds imported.
IMPORTED = ["torch", "megatron.training.training", "scripts.pretrain_gpt_tiny"]


#: Function that starts a command in a process group of its own, with all its output in a file. It
#: takes the command, which begins with the Python to run; all variables; the directory; and the
#: file. The result has the methods of `subprocess.Popen`.
Start = Callable[[Sequence[str], Mapping[str, str], Path, Path], Any]


def new_process(
    command: Sequence[str], env: Mapping[str, str], cwd: Path, output: Path
) -> subprocess.Popen[bytes]:
    with output.open("ab") as file:
        return subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def forked(command: Sequence[str], env: Mapping[str, str], cwd: Path, output: Path) -> Process:
    """Fork a rank from the running `forkserver`, which has imported `IMPORTED`."""
    arguments = [str(cwd), str(output), *command[1:]]
    return Process("benchmarks.train.starts", arguments, dict(env), output)


def main(arguments: list[str]) -> None:
    """Run `python COMMAND` in this forked process."""
    cwd, output, *command = arguments
    run_script(command, dict(os.environ), cwd, output)
