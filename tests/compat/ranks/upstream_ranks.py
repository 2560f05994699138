"""Ranks for a run of Megatron's unit tests: forked from a process that has imported what they need.

Run by `scripts/compat --upstream-tests` with the tree's root as directory and its environment:
`upstream_ranks.py RANKS DOOR=DIRECTORY:PORT ... -- FILE ...`. One door after the other, each with
the tests that passed through the one before; one that has its results already is left out. Results
and logs go to the directory; the ranks meet at the driver's store at PORT.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import sys
import time
import traceback
from pathlib import Path

import psutil
import pytest
import torch

#: A run in which a rank has died, or hangs where no collective's timeout ends it, is given up.
LIMIT_S = 3600


def run_rank(rank: int, count: int, door: str, where: Path, port: str, files: list[str]) -> int:
    """Run the tests as one rank; in a process of its own."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(count),
        WORLD_SIZE=str(count),
        UPSTREAM_DOOR=door,
        UPSTREAM_RESULTS=str(where),
        UPSTREAM_PORT=port,
    )
    with open(where / f"rank_{rank}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.cuda.set_device(rank)  # not all of these tests do that themselves
    return pytest.main(
        [
            *("-p", "upstream_plugin", "-p", "no:cacheprovider", "-c", "/dev/null"),
            *("--rootdir", os.getcwd(), "--basetemp", str(where / f"tmp/{rank}")),
            *("-q", "--tb=short", "--continue-on-collection-errors", *files),
        ]
    )


def end_helpers(rank: int) -> None:
    """End what Megatron's tests have started in a rank's session: pools of processes, managers."""
    for child in psutil.Process(rank).children(recursive=True):
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(child.pid) == os.getsid(rank):  # an agent has a session of its own
                child.kill()


def run(count: int, door: str, where: Path, port: str, files: list[str]) -> None:
    """Run the tests on `count` ranks to their end."""
    (where / "tmp").mkdir(parents=True)
    ranks = []
    for rank in range(count):
        if (pid := os.fork()) == 0:
            status = 3
            try:
                status = run_rank(rank, count, door, where, port, files)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                end_helpers(os.getpid())
                os._exit(status)
        ranks.append(pid)
    deadline = time.monotonic() + LIMIT_S
    while ranks and time.monotonic() < deadline:
        for pid in list(ranks):
            if os.waitpid(pid, os.WNOHANG)[0]:
                ranks.remove(pid)
        time.sleep(0.1)
    for pid in ranks:
        end_helpers(pid)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def passed(where: Path) -> list[str]:
    """Return the tests that no rank has failed or skipped."""
    results = [
        json.loads(line)
        for file in where.glob("rank_*.jsonl")
        for line in file.read_text().splitlines()
    ]
    others = {each["test"] for each in results if each.get("outcome") != "passed"}
    return sorted({each["test"] for each in results} - others)


if __name__ == "__main__":
    split = sys.argv.index("--")
    importlib.import_module("megatron.training.training")
    for each in sys.argv[2:split]:
        door, _, rest = each.partition("=")
        directory, _, port = rest.rpartition(":")
        only = Path(directory) / "passed.json"
        if not only.is_file():
            shutil.rmtree(directory, ignore_errors=True)
            run(int(sys.argv[1]), door, Path(directory), port, sys.argv[split + 1 :])
            only.write_text(json.dumps(passed(Path(directory))))
        os.environ["UPSTREAM_ONLY"] = str(only)
