"""A launcher of ranks that replaces torchrun: it forks ranks instead of starting processes.

Tests of torchrun itself (signals, rendezvous) use torchrun. As under torchrun, a failed rank ends
all ranks, which start again if a restart is left; every attempt has its own store.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import runpy
import signal
import socket
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support.forked.nursery import nursery, settle_in

#: Seconds that ranks have after SIGTERM; torchrun gives them 30 s.
_TERM_S = 10.0


def free_port() -> int:
    """Return a port without listener that the kernel does not assign to connections by chance.

    The kernel soon assigns a port that it returned for port 0 to another process.
    """
    lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("localhost", random.SystemRandom().randrange(10_000, lowest_given)))
            return int(sock.getsockname()[1])


def run_forked(
    command: list[str],
    nodes: list[dict[str, str]],
    ranks: int,
    *,
    cwd: Path,
    log: Path,
    max_restarts: int,
    timeout_s: float,
    context: Any = None,
) -> int:
    """Run `python COMMAND` in each rank; return the exit status of the last attempt.

    Args:
        command: a script and its arguments, or `-m`, a module and its arguments.
        nodes: the environment of each node; all nodes are this machine.
        ranks: over all nodes.
        context: forks the ranks from a process that may have read settings; None: the nursery.
    """
    deadline = time.monotonic() + timeout_s
    for attempt in range(max_restarts + 1):
        status = _attempt(command, nodes, ranks, attempt, cwd, log, deadline, context)
        if status == 0:
            break
    return status


def _attempt(
    command: list[str],
    nodes: list[dict[str, str]],
    ranks: int,
    attempt: int,
    cwd: Path,
    log: Path,
    deadline: float,
    context: Any,
) -> int:
    per_node = ranks // len(nodes)
    job = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(per_node),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }
    options = {"afresh": context is None}
    context = context or nursery()
    family: list[BaseProcess] = []
    for rank in range(ranks):
        node, local_rank = divmod(rank, per_node)
        variables = {"GROUP_RANK": str(node), "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        process = context.Process(
            target=run_script,
            args=(command, {**nodes[node], **job, **variables}, str(cwd), str(log)),
            kwargs=options,
            daemon=False,  # a daemonic process has no children, and Megatron's writers are children
        )
        process.start()
        family.append(process)
    try:
        while any(process.exitcode is None for process in family):
            if any(process.exitcode for process in family):
                break
            if time.monotonic() > deadline:
                raise AssertionError(f"the job did not end in time, see {log}")
            time.sleep(0.02)
        return max(abs(process.exitcode or 0) for process in family)
    finally:
        _end(family)


def _end(family: list[BaseProcess]) -> None:
    for process in family:
        if process.exitcode is None:
            process.terminate()
    deadline = time.monotonic() + _TERM_S
    for process in family:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()
        process.close()


def run_script(
    command: list[str], environment: dict[str, str], cwd: str, log: str, *, afresh: bool = True
) -> None:
    """Run `python COMMAND` in this process, exit status and exit hooks included. Never returns.

    Args:
        afresh: see `settle_in`.
    """
    settle_in(environment, log, afresh=afresh)
    os.chdir(cwd)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    # Reset the signal handlers of the nursery to those of a new process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    status = 0
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        status = 1
    # The steps of the interpreter at the end of a script, in its order.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)
