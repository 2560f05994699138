"""Two ways to start a rank: as a new process, or forked from one that has imported Megatron.

On a GPU's machine the imports of torch and Megatron take 8 to 22 s, as long as a job's training.
The forked rank finds them done, and still has a process group and a CUDA context of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

REPO = Path(__file__).resolve().parents[2]


class Started(Protocol):
    """Started rank, with the methods of `subprocess.Popen`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def kill(self) -> None: ...


class Start(Protocol):
    """Starts `command`, in a process group of its own, with all its output in the file `output`.

    `env` holds all variables of the rank. `command` begins with the Python to run.
    """

    def __call__(
        self, command: Sequence[str], env: Mapping[str, str], cwd: Path, output: Path
    ) -> Started: ...


def new_process(
    command: Sequence[str], env: Mapping[str, str], cwd: Path, output: Path
) -> subprocess.Popen[bytes]:
    """Start a rank as a new process."""
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


class Zygote:
    """Process that has imported Megatron, has one thread, has not touched a GPU, and forks ranks.

    Args:
        env: all variables of the process; a rank's own are added to them.
        output: file for its output.

    Raises:
        ConnectionError: the process has failed, or ranks that it forks cannot use the GPU. CUDA
            refuses forked ranks if an import has initialized it.
    """

    def __init__(self, env: Mapping[str, str], output: Path) -> None:
        ours, theirs = socket.socketpair()
        # Without this variable, `torch.cuda.is_available()` at an import initializes the driver.
        env = {**env, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        with output.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.train.zygote", str(theirs.fileno())],
                env=env,
                cwd=REPO,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()
        self._lines = ours.makefile("rw", buffering=1)
        ours.close()
        probe = [sys.executable, "-m", "benchmarks.train.touch_gpu"]
        try:
            ended_with = str(self.start(probe, env, REPO, output).wait())
        except OSError as error:
            ended_with = str(error)
        if ended_with != "0":
            self.close()
            raise ConnectionError(f"a forked process ended with {ended_with}: {_end_of(output)}")

    def start(
        self, command: Sequence[str], env: Mapping[str, str], cwd: Path, output: Path
    ) -> Started:
        """Fork a rank; see `Start`."""
        output.touch()
        self._send([list(command[1:]), dict(env), str(cwd), str(output)])
        return _Forked(self)

    def close(self) -> None:
        """End the process and its ranks."""
        with contextlib.suppress(OSError):
            self._lines.close()
        self._process.kill()
        self._process.wait()

    def _send(self, request: Any) -> None:
        print(json.dumps(request), file=self._lines)

    def _receive(self) -> int:
        line = self._lines.readline()
        if not line:
            raise ConnectionError("the process that forks ranks has ended")
        return int(json.loads(line))


class _Forked:
    """Rank that a zygote has forked. The zygote answers with its id, then with its status."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self.returncode: int | None = None
        self.pid = zygote._receive()
        self._pidfd = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            select.select([self._pidfd], [], [])
            self._zygote._send(self.pid)
            self.returncode = self._zygote._receive()
            os.close(self._pidfd)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


@contextlib.contextmanager
def forking(env: Mapping[str, str], output: Path) -> Iterator[Start]:
    """Yield the `start` of a zygote, which ends with the context.

    Raises:
        ConnectionError: see `Zygote`.
    """
    zygote = Zygote(env, output)
    try:
        yield zygote.start
    finally:
        zygote.close()


def _end_of(output: Path) -> str:
    lines = output.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "no output"
