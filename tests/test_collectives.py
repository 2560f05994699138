"""Data that ranks exchange arrives complete, and all ranks raise an error of one; on gloo ranks."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flashckpt import collectives
from megatron_flashckpt.collectives import (
    exchange_blobs,
    gather_objects,
    run_and_agree,
    run_and_gather,
    run_on_rank_0,
)
from megatron_flashckpt.errors import CorruptCheckpointError, MissingStateError
from tests.support.forked.nursery import call_in_ranks

RANKS = 3
#: Attribute whose name changed in torch 2.13.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
#: Lengths around the capacity of the first of two messages.
LENGTHS = [0, 1, 4000, 4085, 4088, 4096, 5000, 1_000_000]


def failing_on(failing: dict[int, Exception], rank: int) -> Callable[[], tuple[int, int]]:
    def work() -> tuple[int, int]:
        if rank in failing:
            raise failing[rank]
        return rank, 10 * rank

    return work


def raised(call: Callable[[], Any]) -> list[str] | None:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


ERRORS: dict[str, dict[int, Exception]] = {
    "none": {},
    "damage on the last": {2: CorruptCheckpointError("torn")},
    "damage on two": {1: CorruptCheckpointError("torn"), 2: CorruptCheckpointError("cut")},
    "another model and damage": {0: CorruptCheckpointError("torn"), 2: MissingStateError("other")},
    "unforeseen": {1: ValueError("unforeseen")},
}


#: Bytes that a collective may hold in the memory of the process group's device.
BOUND = 3 * 4096


def largest_collective(call: Callable[[], Any]) -> int:
    """Return the most bytes that one collective of `call()` held, sent and received together."""
    held = [0]
    all_gather, broadcast = getattr(dist, GATHER), dist.broadcast

    def noted_gather(received: torch.Tensor, sent: torch.Tensor, **kwargs: Any) -> None:
        held.append(received.nbytes)
        all_gather(received, sent, **kwargs)

    def noted_broadcast(sent: torch.Tensor, **kwargs: Any) -> None:
        held.append(sent.nbytes)
        broadcast(sent, **kwargs)

    with (
        mock.patch.object(dist, GATHER, noted_gather),
        mock.patch.object(dist, "broadcast", noted_broadcast),
    ):
        call()
    return max(held)


def blobs_of(number: int) -> dict[int, bytes]:
    """Return `number` different blobs, some of them empty."""
    return {n: bytes([n + 1]) * (n * 700 % 4900) for n in range(number)}


def exchanged(rank: int, number: int) -> tuple[bool, int]:
    """Return whether `number` blobs arrive, and the number of collectives that they take."""
    blobs = blobs_of(number)
    own = {n: blob for n, blob in blobs.items() if n % RANKS == rank}
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        received = exchange_blobs([len(blob) for blob in blobs.values()], own)
    return received == b"".join(blobs.values()), reduce.call_count


def rank_main(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=60),
    )
    results: dict[str, Any] = {}
    for length in LENGTHS:
        # Ranks send different lengths, so only some of them may need a second message.
        gathered_lengths = [
            len(gathered_object) for gathered_object in gather_objects(b"x" * (length + rank))
        ]
        of_first = run_on_rank_0(lambda length=length: b"x" * length)
        results[str(length)] = [gathered_lengths, len(of_first)]
    results["blobs"] = [exchanged(rank, number) for number in range(2, 9)]
    collectives.PART_NBYTES = BOUND
    results["blobs in parts"] = exchanged(rank, 8)
    contents = [bytes([source]) * (100_000 * source) for source in range(RANKS)]
    results["parts"] = [
        gather_objects(contents[rank]) == contents,
        run_on_rank_0(lambda: contents[2]) == contents[2],
        largest_collective(lambda: gather_objects(contents[rank])),
        largest_collective(lambda: run_on_rank_0(lambda: contents[2])),
    ]
    for name, failing in ERRORS.items():
        work = failing_on(failing, rank)
        results[name] = [
            raised(functools.partial(call, work)) for call in (run_and_agree, run_and_gather)
        ]
    results["made"] = run_and_gather(failing_on({}, rank))
    results["first"] = run_on_rank_0(lambda: f"of {rank}")
    results["first failed"] = raised(
        lambda: run_on_rank_0(failing_on({0: CorruptCheckpointError("torn")}, rank))
    )
    Path(directory, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("collectives")
    call_in_ranks(rank_main, (str(directory),), RANKS)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_objects_of_any_length_arrive_from_every_rank(results: list[dict]) -> None:
    for length in LENGTHS:
        lengths = [length + rank for rank in range(RANKS)]
        assert [result[str(length)] for result in results] == [[lengths, length]] * RANKS


def test_large_objects_and_blobs_are_sent_in_parts_of_bounded_size(results: list[dict]) -> None:
    parts = -(-sum(map(len, blobs_of(8).values())) // BOUND)
    assert parts > 1
    for result in results:
        assert result["parts"] == [True, True, BOUND, BOUND]
        assert result["blobs"] == [[True, 1]] * 7, "one collective exchanges any number of blobs"
        assert result["blobs in parts"] == [True, parts]


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("damage on the last", "CorruptCheckpointError", ["torn"]),
        ("damage on two", "CorruptCheckpointError", ["torn", "cut"]),
        ("another model and damage", "MissingStateError", ["other"]),
        ("unforeseen", "FlashCkptError", ["rank 1: ValueError: unforeseen"]),
    ],
)
def test_all_ranks_raise_an_error_of_one_rank_with_the_same_class(
    results: list[dict], name: str, kind: str, says: list[str]
) -> None:
    for result in results:
        for error in result[name]:
            assert error[0] == kind
            assert any(word in error[1] for word in says)


def test_every_rank_gets_the_results_of_all_ranks_or_of_the_first(results: list[dict]) -> None:
    for rank, result in enumerate(results):
        assert result["none"] == [None, None]
        assert result["made"] == [rank, [0, 10, 20]]
        assert result["first"] == "of 0"
        assert result["first failed"][0] == "CorruptCheckpointError"
    assert results[1]["first failed"][1] == "rank 0: CorruptCheckpointError: torn"


def test_a_single_process_gets_its_own_result() -> None:
    assert run_and_gather(lambda: (1, 2)) == (1, [2])
    assert run_on_rank_0(lambda: 3) == 3
    with pytest.raises(CorruptCheckpointError, match=r"^torn$"):
        run_and_gather(failing_on({0: CorruptCheckpointError("torn")}, 0))
