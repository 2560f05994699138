"""A job of Python processes without a launcher: one node, each rank with its own log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.forked.job import free_port
from tests.support.forked.nursery import COMMON, CPU_MEGATRON, REPO


def run_ranks(
    command: list[object], where: Path, ranks: int, home: Path | None = None, **more: str
) -> tuple[str, int]:
    """Run `python COMMAND` on `ranks` ranks; return what rank 0 prints, and its exit status.

    Args:
        home: the first directory in which modules are looked for.
    """
    processes = []
    shared = {
        **{key: value for key, value in os.environ.items() if not key.startswith("FLASHCKPT")},
        **COMMON,
        "PYTHONPATH": os.pathsep.join(map(str, [*filter(None, [home]), CPU_MEGATRON, REPO])),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "FLASHCKPT_RUNTIME_DIR": str(where / "run"),
        "FLASHCKPT_AGENT__GRACE_S": "120",  # a slow machine takes long to start ranks again
        "FLASHCKPT_AGENT__KEEP_UNWRITTEN_S": "0",
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
