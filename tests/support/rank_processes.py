"""A job of Python processes without a launcher: one node, each rank with its own log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.forked.job import free_port
from tests.support.forked.nursery import job_environment


def run_ranks(
    command: list[object], where: Path, ranks: int, home: Path | None = None, **more: str
) -> tuple[str, int]:
    """Run `python COMMAND` on `ranks` ranks; return what rank 0 prints, and its exit status.

    Args:
        home: the first directory in which modules are looked for.
    """
    processes = []
    shared = {
        **job_environment(where, *filter(None, [home])),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        **more,
    }
    for rank in range(ranks):
        processes.append(
            subprocess.Popen(
                [sys.executable, *map(str, command)],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        output = processes[0].communicate(timeout=240)[0]
        if processes[0].returncode == 0:
            for process in processes:
                process.wait(timeout=240)
    finally:  # as torchrun does when a rank has failed
        for process in processes:
            process.kill()
            process.communicate()
    return output, processes[0].returncode
