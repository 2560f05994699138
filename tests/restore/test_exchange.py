"""Ranks that hold a checkpoint in their slots fill each other's tensors; on real gloo ranks."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from hypothesis import given
from hypothesis import strategies as st

from megatron_flashckpt.layout.coverage import read_plan
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.shard_file import CHUNK_NBYTES
from megatron_flashckpt.megatron_lm.dtypes import torch_dtype
from megatron_flashckpt.restore import exchange
from megatron_flashckpt.restore.reader import ChunkReader
from megatron_flashckpt.restore.targets import Targets
from megatron_flashckpt.restore.transfer import ALIGNMENT, Stream
from tests.layout.strategies import in_layout_order
from tests.layout.worlds import (
    Sizes,
    Tensors,
    content,
    files_of,
    model_tensors,
    random_tensor,
    run,
    sources_of,
    stored_by,
    wanted_by,
    whole,
)

RANKS = 3
#: Where the data section of a slot begins, as far as alignment is concerned.
DATA_OFFSET = 4096
#: Bytes that fit into a GPU per round: a fraction of what `odd_case` exchanges.
LEAST_ROOM = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """What every rank's slot holds, and what it wants."""

    tensors: Tensors
    stored: list[list[Piece]]
    wanted: list[list[Piece]]
    round_nbytes: int = exchange.ROUND_NBYTES


def model_case(saved: Sizes, loaded: Sizes, round_nbytes: int = 4096) -> Case:
    wanted = [
        wanted_by(loaded, tp, pp, ep, dp)
        for dp in range(loaded.dp)
        for ep in range(loaded.ep)
        for pp in range(loaded.pp)
        for tp in range(loaded.tp)
    ]
    return Case(model_tensors(seed=6), stored_by(saved), wanted, round_nbytes)


def odd_case(round_nbytes: int) -> Case:
    """Spans of 1 and 2-byte elements, none of which is a multiple of eight bytes long."""
    tensors: Tensors = {}
    stored: list[list[Piece]] = [[] for _ in range(RANKS)]
    wanted: list[list[Piece]] = [[] for _ in range(RANKS)]
    for number, (dtype, numel) in enumerate([("BF16", 77), ("BF16", 13), ("U8", 51), ("U8", 9)]):
        key = f"w{number}"
        tensors["weight", key] = random_tensor((numel,), dtype, number)
        all_of_it = whole(key, "weight", dtype, (numel,), (0,), (numel,))
        third = numel // 3
        ends = [0, third + number % 2, 2 * third + 1, numel]
        for rank in range(RANKS):
            stored[rank].append(run(all_of_it, ends[rank], ends[rank + 1]))
            # Cut elsewhere than it is stored.
            wanted[rank] += [all_of_it, run(all_of_it, rank + 1, numel - 2 - rank)]
    return Case(tensors, [in_layout_order(pieces) for pieces in stored], wanted, round_nbytes)


def nothing_from_others() -> Case:
    case = odd_case(64)
    return dataclasses.replace(case, wanted=case.stored)


def one_rank_wants_it_all() -> Case:
    """Rank 1 holds nothing and wants everything; the others want nothing."""
    case = odd_case(64)
    held = in_layout_order(case.stored[0] + case.stored[1])
    wanted: list[list[Piece]] = [[], case.wanted[1], []]
    return dataclasses.replace(case, stored=[held, [], case.stored[2]], wanted=wanted)


REPLICAS = Sizes(tp=1, pp=1, ep=1, dp=3, grouped=False, distributed=True)
TENSOR = Sizes(tp=3, pp=1, ep=1, dp=1, grouped=True, distributed=True)
CASES = {
    "same layout": model_case(REPLICAS, REPLICAS),
    "replicas to tensor parallel": model_case(REPLICAS, TENSOR),
    "tensor parallel to replicas": model_case(TENSOR, REPLICAS),
    "in one round": model_case(REPLICAS, TENSOR, exchange.ROUND_NBYTES),
    "odd, 8 bytes per round": odd_case(1),
    "odd, 16 bytes per round": odd_case(32),
    "odd, in one round": odd_case(exchange.ROUND_NBYTES),
    "nothing from others": nothing_from_others(),
    "one rank wants it all": one_rank_wants_it_all(),
}


class Bytes:
    """A slot of which no chunk is damaged."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data.numpy().data

    def data_nbytes(self, rank: int) -> int:
        return self._data.nbytes

    def read_chunk(self, rank: int, number: int, parts: Sequence[memoryview]) -> None:
        position = number * CHUNK_NBYTES
        for part in parts:
            part[:] = self._data[position : position + part.nbytes]
            position += part.nbytes


def exchanged(case: Case, name: str, rank: int) -> tuple[int, list[torch.Tensor]]:
    """Carry out `case`; return the bytes that came from others, and what was filled. Collective."""
    exchange.ROUND_NBYTES = case.round_nbytes
    file = files_of(case.tensors, case.stored)[rank]
    own = torch.frombuffer(bytearray(DATA_OFFSET) + file, dtype=torch.uint8)[DATA_OFFSET:]
    wanted = case.wanted[rank]
    filled = [torch.zeros(piece.numel, dtype=torch_dtype(piece.dtype)) for piece in wanted]
    plan = read_plan(wanted, sources_of(case.stored), name)
    targets = Targets(wanted, filled)
    with ChunkReader(Bytes(own), 1) as reader:
        received = exchange.exchange(reader, own, rank, plan, wanted, targets)
    return received, filled


def with_gpu_rules(rank: int) -> dict[str, Any]:
    """Exchange as ranks that send from GPUs do, though over gloo; return what they did.

    Rank 1 has the least room. In the last exchange it fails to place what it received.
    """
    calls: list[str] = []
    sizes: list[int] = []
    real_new_group, real_destroy = dist.new_group, dist.destroy_process_group
    real_all_to_all, real_put = dist.all_to_all_single, Targets.put_tensor

    def new_group() -> Any:
        calls.append("new group")
        return real_new_group()

    def destroy(group: Any) -> None:
        calls.append("destroy group")
        real_destroy(group)

    def all_to_all(received: torch.Tensor, *args: Any, group: Any) -> None:
        assert group is not None
        sizes.append(received.numel())
        real_all_to_all(received, *args, group=group)
        if fails:
            Targets.put_tensor = no_memory

    def no_memory(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    exchange.sends_from_gpu = lambda: True
    exchange.free_gpu_nbytes = lambda: 4 * (LEAST_ROOM if rank == 1 else exchange.ROUND_NBYTES)
    exchange.LEAST_ROUND_NBYTES = 8
    dist.new_group, dist.destroy_process_group = new_group, destroy
    dist.all_to_all_single = all_to_all
    case, fails = odd_case(exchange.ROUND_NBYTES), False
    try:
        _, filled = exchanged(case, "little room", rank)
        fails = rank == 1
        try:
            exchanged(case, "no memory", rank)
        except Exception as error:
            calls.append(f"{type(error).__name__}: {error}")
        Targets.put_tensor, fails = real_put, False
        exchanged(nothing_from_others(), "nothing", rank)
    finally:
        dist.new_group, dist.destroy_process_group = real_new_group, real_destroy
        dist.all_to_all_single = real_all_to_all
    groups = len(dist.distributed_c10d._world.pg_map)
    return {
        "calls": calls,
        "largest": max(sizes),
        "groups": groups,
        "digests": [digest(bytes(t.view(torch.uint8).numpy())) for t in filled],
    }


def rank_main(rank: int, directory: str) -> None:
    """Carry out all cases on one rank; write digests of what arrived, and the bytes counted."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=60),
    )
    found = {}
    for name, case in CASES.items():
        received, filled = exchanged(case, name, rank)
        found[name] = [received, [digest(bytes(t.view(torch.uint8).numpy())) for t in filled]]
    found["gpu"] = with_gpu_rules(rank)
    Path(directory, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    directory = tmp_path_factory.mktemp("exchange")
    torch.multiprocessing.spawn(rank_main, (str(directory),), RANKS)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_every_byte_that_it_wants(found: list[dict], name: str) -> None:
    case = CASES[name]
    for rank, wanted in enumerate(case.wanted):
        _, digests = found[rank][name]
        assert digests == [digest(content(case.tensors, piece)) for piece in wanted]


@pytest.mark.parametrize("name", CASES)
def test_what_came_from_others_is_counted(found: list[dict], name: str) -> None:
    case = CASES[name]
    for rank, wanted in enumerate(case.wanted):
        plan = read_plan(wanted, sources_of(case.stored), name)
        from_others = sum(
            read.nbytes for source, reads in plan.reads.items() for read in reads if source != rank
        )
        assert found[rank][name][0] == from_others
    assert (name == "nothing from others") == all(each[name][0] == 0 for each in found)


def test_connections_between_gpus_end_with_the_exchange(found: list[dict]) -> None:
    """They would keep GPU memory for as long as the job runs."""
    failed = "FlashCkptError: rank 1: OutOfMemoryError: CUDA out of memory"
    group = ["new group", "destroy group"]
    assert [each["gpu"]["calls"] for each in found] == [[*group, *group, failed]] * RANKS
    assert [each["gpu"]["groups"] for each in found] == [1] * RANKS


def test_rounds_fit_into_the_gpu_that_has_the_least_room(found: list[dict]) -> None:
    case = odd_case(exchange.ROUND_NBYTES)
    for rank, wanted in enumerate(case.wanted):
        assert found[rank]["gpu"]["largest"] <= LEAST_ROOM
        digests = [digest(content(case.tensors, piece)) for piece in wanted]
        assert found[rank]["gpu"]["digests"] == digests


@given(st.lists(st.integers(1, 40), max_size=6), st.integers(1, 5))
def test_a_stream_is_cut_between_elements_however_long_its_spans_are(lengths, eighths):
    """A span starts with an element, so within it a cut is good at multiples of the widest one."""
    spans = [(1000 * number, nbytes) for number, nbytes in enumerate(lengths)]
    stream = Stream(spans)
    step = eighths * ALIGNMENT
    arrived: list[list[int]] = [[] for _ in spans]
    for low in range(0, stream.nbytes, step):
        for which, start, a, b in stream.cut(low, low + step):
            assert start % ALIGNMENT == 0
            assert (a, 0 < b - a <= step) == (spans[which][0] + start, True)
            arrived[which] += range(start, start + b - a)
    assert arrived == [list(range(nbytes)) for nbytes in lengths]


def test_without_other_ranks_all_comes_from_the_own_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []
    monkeypatch.setattr(exchange, "synchronize", lambda: waited.append(True))
    case = odd_case(64)
    held = in_layout_order([piece for pieces in case.stored for piece in pieces])
    (file,) = files_of(case.tensors, [held])
    own = torch.frombuffer(bytearray(file), dtype=torch.uint8)
    filled = [torch.zeros(piece.nbytes, dtype=torch.uint8) for piece in case.wanted[0]]
    plan = read_plan(case.wanted[0], sources_of([held]), "it")
    targets = Targets(case.wanted[0], filled)
    with ChunkReader(Bytes(own), 1) as reader:
        assert exchange.exchange(reader, own, 0, plan, case.wanted[0], targets) == 0
    assert [bytes(tensor.numpy()) for tensor in filled] == [
        content(case.tensors, piece) for piece in case.wanted[0]
    ]
    assert waited == [True], "on a GPU, all bytes are in place when the exchange returns"
