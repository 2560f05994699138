"""Ranks of one job of a Megatron-LM tree: forked from a process that has imported what they need.

Run by `scripts/compat` with the tree's root as directory and its environment:
`compat_ranks.py RANKS LOG MODULE,... COMMAND`, COMMAND as for `python`. When a rank fails, all are
ended. Importing Megatron in every rank is what takes most of a short job's time.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback

from tests.forked.job import free_port, run_script

#: How long ranks have after SIGTERM.
TERM_S = 10.0


def fork(rank: int, job: dict[str, str], command: list[str], log: str) -> int:
    """Start one rank; return its process id."""
    if (pid := os.fork()) == 0:
        try:
            mine = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            run_script(command, {**os.environ, **job, **mine}, os.getcwd(), log)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(3)
    return pid


def wait(ranks: set[int]) -> int:
    """Wait for all ranks; return the exit status of the first that failed, 0 if none did."""
    failed, deadline = 0, float("inf")
    while ranks:
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            ranks.remove(pid)
            if status and not failed:
                failed, deadline = os.waitstatus_to_exitcode(status), time.monotonic() + TERM_S
                for other in ranks:
                    os.kill(other, signal.SIGTERM)
        if time.monotonic() > deadline:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return failed


def main() -> None:
    count, log, modules, *command = sys.argv[1:]
    # The tree's own packages, not those that are installed.
    sys.path.insert(0, os.getcwd())
    for name in modules.split(","):
        importlib.import_module(name)
    job = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    sys.exit(abs(wait({fork(rank, job, command, log) for rank in range(int(count))})))


if __name__ == "__main__":
    main()
