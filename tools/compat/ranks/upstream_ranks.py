"""Ranks of a run of Megatron's unit tests, forked from a process that has imported Megatron.

`scripts/compat --upstream-tests` runs, in the tree's root and with the tree's environment,
`upstream_ranks.py RANKS ENTRY=DIRECTORY:PORT ... -- FILE ...`. ENTRY is the entry point: `stock` or
`flashckpt`. The entry points run one after the other. Each runs the tests that have passed with the
one before; an entry point with results is skipped. Results and logs go to DIRECTORY. The ranks meet
at the driver's store at PORT.
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

#: Time limit of a run, for a rank that has died or hangs outside a collective.
LIMIT_S = 3600


def run_rank(
    rank: int, count: int, entry_point: str, where: Path, port: str, files: list[str]
) -> int:
    """Run the tests as one rank, in a process of its own; return pytest's status."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(count),
        WORLD_SIZE=str(count),
        UPSTREAM_ENTRY_POINT=entry_point,
        UPSTREAM_RESULTS=str(where),
        UPSTREAM_PORT=port,
    )
    with open(where / f"rank_{rank}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.cuda.set_device(rank)  # some of Megatron's tests do not set their device
    return pytest.main(
        [
            *("-p", "upstream_plugin", "-p", "no:cacheprovider", "-c", "/dev/null"),
            *("--rootdir", os.getcwd(), "--basetemp", str(where / f"tmp/{rank}")),
            *("-q", "--tb=short", "--continue-on-collection-errors", *files),
        ]
    )


def end_helpers(rank: int) -> None:
    """Kill the processes that Megatron's tests have started in a rank's session."""
    for child in psutil.Process(rank).children(recursive=True):
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(child.pid) == os.getsid(rank):  # an agent has a session of its own
                child.kill()


def run(count: int, entry_point: str, where: Path, port: str, files: list[str]) -> None:
    """Run the tests on `count` ranks to their end."""
    (where / "tmp").mkdir(parents=True)
    ranks = []
    for rank in range(count):
        if (pid := os.fork()) == 0:
            status = 3
            try:
                status = run_rank(rank, count, entry_point, where, port, files)
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
    others = {result["test"] for result in results if result.get("outcome") != "passed"}
    return sorted({result["test"] for result in results} - others)


if __name__ == "__main__":
    split = sys.argv.index("--")
    importlib.import_module("megatron.training.training")
    for argument in sys.argv[2:split]:
        entry_point, _, rest = argument.partition("=")
        directory, _, port = rest.rpartition(":")
        only = Path(directory) / "passed.json"
        if not only.is_file():
            shutil.rmtree(directory, ignore_errors=True)
            run(int(sys.argv[1]), entry_point, Path(directory), port, sys.argv[split + 1 :])
            only.write_text(json.dumps(passed(Path(directory))))
        os.environ["UPSTREAM_ONLY"] = str(only)
