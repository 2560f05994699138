"""Server that imports torch and Megatron once, and forks every process of a check from itself.

The imports take 8 to 20 seconds on a machine with a GPU, and a fork of a process that has them
takes milliseconds. A process that has started CUDA must not fork, so the server never calls CUDA.
If an import has done so, the server starts new interpreters instead of forks.

A client connects to the server's socket and sends one line of JSON. The server forks a keeper,
which forks the process, and answers with its id, and with its exit status when it has ended. When
the client disconnects or dies, the keeper kills the process, so no process outlives the one that
has asked for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
#: Variable with the path of the server's socket.
_SOCKET = "GPU_CHECK_FORKSERVER"
#: Settings that torch reads while it is imported.
ENVIRONMENT = {
    # The default test for a GPU starts CUDA; this one asks the driver's management library.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # The compilation of Megatron's small fused functions would take longer than all sections.
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
}
#: Variables that the server was started with.
_GIVEN = frozenset(os.environ)
_CUDA_ERROR_NOT_INITIALIZED = 3


class Process:
    """Process that the server has started. Its group has the process's id."""

    def __init__(
        self,
        module: str,
        arguments: list[str],
        environment: dict[str, str],
        output: Path,
        *,
        fresh: bool = False,
    ) -> None:
        """Start a process that calls `module.main(arguments)`.

        Args:
            module: name of a module with a function `main`.
            arguments: strings; also its `sys.argv[1:]`.
            environment: all environment variables.
            output: file to which its stdout and stderr are appended.
            fresh: start a new interpreter instead of a fork.

        Raises:
            OSError: the server does not run.
        """
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[_SOCKET])
        request = {"module": module, "arguments": arguments, "environment": environment}
        request |= {"output": str(output), "fresh": fresh}
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        self._answers = self._socket.makefile()
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None
        """Exit status as of `subprocess`; None while the process was not seen to end."""

    def poll(self) -> int | None:
        return self.wait(0.0)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit status; None if the process still runs after `timeout_s`."""
        if self.returncode is None:
            timeout_s = None if timeout_s is None else max(0.0, timeout_s)
            if select.select([self._socket], [], [], timeout_s)[0]:
                # Without an answer the server has ended, and with it all processes.
                self.returncode = int(self._answers.readline() or -signal.SIGKILL)
                self.close()
        return self.returncode

    def kill(self) -> None:
        """Kill the process and its group; return when the process has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait(10.0)

    def close(self) -> None:
        """Disconnect from the server, which kills the process if it still runs."""
        self._answers.close()
        self._socket.close()


@contextlib.contextmanager
def forkserver(
    modules: list[str], environment: dict[str, str]
) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
    """Run a server that imports these modules; inside the context it starts every `Process`.

    Yields:
        What the server has found (`gpus`, `forks`), and a function that ends all processes.

    Raises:
        SystemExit: the server has ended.
    """
    with tempfile.TemporaryDirectory(prefix="gc-") as where:
        path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "tools.gpu_check.forkserver", f"{where}/socket", *modules]
        server = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, **ENVIRONMENT, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the driver, which ends the server
        )
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            if not (line := server.stdout.readline()):
                sys.exit("the process that imports torch and Megatron has ended")
            with mock.patch.dict(os.environ, {_SOCKET: f"{where}/socket"}):
                yield json.loads(line), server.stdin.close
        finally:
            server.stdin.close()  # the server kills what still runs, and ends
            server.stdout.close()
            server.wait()


def main(arguments: list[str]) -> Callable[[], None]:
    """Import modules, print what they found as JSON, and serve until stdin ends.

    Args:
        arguments: path of the socket, then the names of the modules to import.

    Returns:
        In a forked process, the function that it has to call; in the server never.
    """
    path, *names = arguments
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # a section that needs this module reports it as its own failure
            traceback.print_exc()
    torch = sys.modules.get("torch")
    found = {"gpus": torch.cuda.device_count() if torch else 0, "forks": not _has_started_cuda()}
    gc.collect()
    gc.freeze()  # otherwise every forked process collects the objects of all imports when it ends
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print(json.dumps(found), flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
        while True:
            if sys.stdin in select.select([sys.stdin, listener], [], [])[0]:
                os._exit(0)  # the keepers see it, too
            client, _ = listener.accept()
            with client:
                if os.fork() == 0:
                    listener.close()
                    return _keep(client)


def _has_started_cuda() -> bool:
    """Return whether this process or its parent has started CUDA, so a fork cannot use it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    status = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    return bool(status != _CUDA_ERROR_NOT_INITIALIZED)


def _keep(client: socket.socket) -> Callable[[], None]:
    """Fork the process of a client's request, await its end or the client's; return in it only."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with client.makefile() as lines:
        request = json.loads(lines.readline())
    if (pid := os.fork()) == 0:
        client.close()
        return _program(request)
    with contextlib.suppress(PermissionError):  # both processes do it, so it is done at once
        os.setpgid(pid, pid)
    with contextlib.suppress(OSError):  # the client has disconnected
        client.sendall(f"{pid}\n".encode())
    descriptor = os.pidfd_open(pid)
    if descriptor not in select.select([descriptor, client, sys.stdin], [], [])[0]:
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _program(request: dict[str, Any]) -> Callable[[], None]:
    """Become the process of a request; return the call of its program.

    The caller returns to the top of the interpreter first, so that the process ends as any other.
    """
    os.setpgid(0, 0)
    with open(os.devnull) as nothing, open(request["output"], "ab") as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    module, arguments, environment = (request[n] for n in ("module", "arguments", "environment"))
    if request["fresh"] or _has_started_cuda():
        start = f"import sys, {module} as m; m.main(sys.argv[1:])"
        os.execve(sys.executable, [sys.executable, "-c", start, *arguments], environment)
    # Variables that an import has set stay.
    for name in _GIVEN.intersection(os.environ):
        del os.environ[name]
    os.environ.update(environment)
    sys.argv = [module, *arguments]

    def call() -> None:
        importlib.import_module(module).main(arguments)

    return call


if __name__ == "__main__":
    main(sys.argv[1:])()
