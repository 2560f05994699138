"""Ranks of jobs of a Megatron-LM tree, forked from one process that has imported the tree.

`scripts/compat` runs `release_ranks.py MODULE,...` in the tree's root, with the tree's environment.
The process imports the modules, reads one job (`Job`) per line of JSON, runs it, and answers with
one line. A fork saves the import of Megatron, which takes most of a short job's time. If a rank
fails, all ranks are ended, and started again while restarts are left, as by torchrun.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import sys
import time
import traceback

from tests.support.forked.job import free_port, run_script

#: Seconds between SIGTERM and SIGKILL.
TERM_S = 10.0


@dataclasses.dataclass(frozen=True)
class Job:
    """Job to run."""

    command: list[str]
    """Arguments for `python`."""
    env: dict[str, str]
    """Variables in addition to the environment of this process."""
    log: str
    ranks: int
    restarts: int
    limit_s: float


def fork(job: Job, rank: int, attempt: dict[str, str]) -> int:
    """Start one rank; return its process id."""
    if (pid := os.fork()) == 0:
        try:
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment = {**os.environ, **job.env, **attempt, **of_rank}
            run_script(job.command, environment, os.getcwd(), job.log, afresh=False)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(3)
    return pid


def wait(ranks: set[int], deadline: float) -> int:
    """Wait for all ranks; return the exit status of the first that failed, 0 if none did."""
    failed = 0
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
            failed = failed or -signal.SIGKILL
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return failed


def run(job: Job) -> int:
    """Run a job to its end; return the exit status of its last attempt."""
    deadline = time.monotonic() + job.limit_s
    for number in range(job.restarts + 1):
        attempt = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(job.ranks),
            "LOCAL_WORLD_SIZE": str(job.ranks),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RESTART_COUNT": str(number),
        }
        ranks = {fork(job, rank, attempt) for rank in range(job.ranks)}
        if (status := wait(ranks, deadline)) == 0:
            break
    return status


def main() -> None:
    # Output of imports goes to stderr; stdout carries answers only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in sys.argv[1].split(","):
        importlib.import_module(name)
    for line in sys.stdin:
        print(run(Job(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
