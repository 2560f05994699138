"""Failures of one rank in an exchange between gloo ranks: all ranks raise and name that rank."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flashckpt.load.all_to_all import Stream, transfer
from tests.support.forked.nursery import call_in_ranks

RANKS = 2
NBYTES = 64
#: Four rounds of 16 bytes. After an error in the second round all ranks must join the last two.
ROOM, QUOTA = 32, 16
#: Far less than the process group's timeout, after which a collective without peers fails.
DEADLINE_S = 15.0

Take = Callable[[int, int, int, torch.Tensor], None]


def exchanged(rank: int, take: Take) -> None:
    """Send this rank's buffer to the other rank; `take` receives that rank's bytes. Collective."""
    other = 1 - rank
    streams = {other: Stream([(0, NBYTES)])}
    own = torch.arange(NBYTES, dtype=torch.uint8) + rank
    transfer(own, streams, streams, room=lambda: ROOM, take=take)


def into(received: torch.Tensor) -> Take:
    def take(peer: int, which: int, start: int, part: torch.Tensor) -> None:
        received[start : start + part.numel()] = part

    return take


def take_fails_on_rank_1(rank: int) -> None:
    received = torch.zeros(NBYTES, dtype=torch.uint8)
    place = into(received)

    def take(peer: int, which: int, start: int, part: torch.Tensor) -> None:
        if rank == 1 and start == QUOTA:
            raise torch.OutOfMemoryError("CUDA out of memory")
        place(peer, which, start, part)

    exchanged(rank, take)


def buffers_fail_on_rank_1(rank: int) -> None:
    real_empty = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        if rank == 1 and args[0] == ROOM:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real_empty(*args, **kwargs)

    torch.empty = empty
    try:
        exchanged(rank, into(real_empty(NBYTES, dtype=torch.uint8)))
    finally:
        torch.empty = real_empty


FAILURES = {"take": take_fails_on_rank_1, "buffers": buffers_fail_on_rank_1}


def rank_main(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=2 * DEADLINE_S),
    )
    outcomes: dict[str, Any] = {}
    for name, failing in FAILURES.items():
        started = time.monotonic()
        try:
            failing(rank)
        except Exception as error:
            outcomes[name] = [type(error).__name__, str(error), time.monotonic() - started]
    received = torch.zeros(NBYTES, dtype=torch.uint8)
    exchanged(rank, into(received))
    outcomes["afterwards"] = received.tolist()
    Path(directory, f"{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("transfer")
    call_in_ranks(rank_main, (str(directory),), RANKS)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", FAILURES)
def test_all_ranks_raise_soon_and_name_the_rank_that_failed(
    outcomes: list[dict[str, Any]], name: str
) -> None:
    message = "rank 1: OutOfMemoryError: CUDA out of memory"
    assert [outcome[name][:2] for outcome in outcomes] == [["FlashCkptError", message]] * RANKS
    assert all(outcome[name][2] < DEADLINE_S for outcome in outcomes)


def test_the_ranks_can_exchange_data_after_they_raised(outcomes: list[dict[str, Any]]) -> None:
    assert [outcome["afterwards"] for outcome in outcomes] == [
        list(range(1, NBYTES + 1)),
        list(range(NBYTES)),
    ]
