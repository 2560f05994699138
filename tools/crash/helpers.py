"""Helper processes that a rank forks at a step, as scripts and data loaders do.

Imports nothing of megatron_flashckpt: a rank imports it after its environment is set.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

#: Seconds after which a helper ends by itself.
_LONGEST_S = 300.0


def fork_at(step: str, home: Path) -> None:
    """Make this rank fork two helpers at POINT:COUNT.

    The first helper keeps running after the rank has ended; its pid is appended to `helpers` in
    `home`. The second helper ends with `sys.exit`, which runs the rank's `atexit` functions; the
    rank waits for this helper. Call this before a module of the package binds `failpoints.hit`.
    """
    from megatron_flashckpt import failpoints

    point, count = step.split(":")
    hit, left = failpoints.hit, int(count)

    def fork_and_hit(name: str) -> None:
        nonlocal left
        if name == point:
            left -= 1
            if left == 0:
                _fork_both(home)
        hit(name)

    failpoints.hit = fork_and_hit


def _fork_both(home: Path) -> None:
    if os.fork() == 0:
        _keep_running(home)
    leaving = os.fork()
    if leaving == 0:
        try:
            sys.exit(0)
        except SystemExit:
            atexit._run_exitfuncs()
        finally:
            os._exit(0)
    mark = home / f"leaving-{leaving}"
    mark.touch()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(leaving, 0)
    mark.unlink()


def _keep_running(home: Path) -> None:
    with open(home / "helpers", "a") as file:
        file.write(f"{os.getpid()}\n")
    deadline = time.monotonic() + _LONGEST_S
    while home.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    os._exit(0)


def helpers_in(home: Path) -> list[int]:
    """Return the pids of the helpers that keep running."""
    try:
        return [int(line) for line in (home / "helpers").read_text().split()]
    except FileNotFoundError:
        return []


def end_helpers(home: Path) -> None:
    leaving = [int(path.name.partition("-")[2]) for path in home.glob("leaving-*")]
    for pid in helpers_in(home) + leaving:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
