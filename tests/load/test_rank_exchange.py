"""Ranks that hold a checkpoint in their slots fill each other's tensors; on real gloo ranks.

For NCCL stands `tests.simulated_gpu.nccl`: every rank has a simulated node, its tensors lie on the
device of its number, and gloo carries the bytes. It follows these documented rules: a collective
runs on a stream of its group and returns early, tensors in host memory are refused, and a group's
connections keep GPU memory, which torch cannot use, until the group is destroyed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from hypothesis import given
from hypothesis import strategies as st

from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import read_plan
from megatron_flashckpt.load import rank_exchange
from megatron_flashckpt.load.all_to_all import ALIGNMENT, Stream
from megatron_flashckpt.load.chunk_reader import ChunkReader
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.megatron_lm.torch_dtypes import torch_dtype
from tests.simulated_gpu import simulated_gpus
from tests.simulated_gpu.nccl import nccl_over_gloo
from tests.support.strategies import in_layout_order
from tests.support.worlds import (
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
ROUND_NBYTES = rank_exchange.ROUND_NBYTES
#: Where the data section of a slot begins, as far as alignment is concerned.
DATA_OFFSET = 4096
#: Elements in `odd_case` on GPUs, as a multiple of those elsewhere. Odd, so that sizes stay odd.
GPU_SCALE = 4001
#: Bytes that are free on the fullest GPU: less than a tenth of what `odd_case` exchanges there.
LEAST_ROOM = 128 * 1024
#: Bytes that are free on a GPU that has no room for the buffers of the smallest round.
NO_ROOM = 40 * 1024


@dataclasses.dataclass(frozen=True)
class Case:
    """What every rank's slot holds, and what it wants."""

    tensors: Tensors
    stored: list[list[Piece]]
    wanted: list[list[Piece]]
    round_nbytes: int = rank_exchange.ROUND_NBYTES


def model_case(saved: Sizes, loaded: Sizes, round_nbytes: int = 4096) -> Case:
    wanted = [
        wanted_by(loaded, tp, pp, ep, dp)
        for dp in range(loaded.dp)
        for ep in range(loaded.ep)
        for pp in range(loaded.pp)
        for tp in range(loaded.tp)
    ]
    return Case(model_tensors(seed=6), stored_by(saved), wanted, round_nbytes)


def odd_case(round_nbytes: int, scale: int = 1) -> Case:
    """Spans of 1 and 2-byte elements, none of which is a multiple of eight bytes long."""
    tensors: Tensors = {}
    stored: list[list[Piece]] = [[] for _ in range(RANKS)]
    wanted: list[list[Piece]] = [[] for _ in range(RANKS)]
    sizes = [("BF16", 77), ("BF16", 13), ("U8", 51), ("U8", 9)]
    for number, (dtype, multiple) in enumerate(sizes):
        key, numel = f"w{number}", scale * multiple
        tensors["weight", key] = random_tensor((numel,), dtype, number)
        all_of_it = whole(key, "weight", dtype, (numel,), (0,), (numel,))
        third = numel // 3
        ends = [0, third + number % 2, 2 * third + 1, numel]
        for rank in range(RANKS):
            stored[rank].append(run(all_of_it, ends[rank], ends[rank + 1]))
            # Cut elsewhere than it is stored.
            wanted[rank] += [all_of_it, run(all_of_it, rank + 1, numel - 2 - rank)]
    return Case(tensors, [in_layout_order(pieces) for pieces in stored], wanted, round_nbytes)


def nothing_from_others(scale: int = 1) -> Case:
    case = odd_case(64, scale)
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
    "in one round": model_case(REPLICAS, TENSOR, rank_exchange.ROUND_NBYTES),
    "odd, 8 bytes per round": odd_case(1),
    "odd, 16 bytes per round": odd_case(32),
    "odd, in one round": odd_case(rank_exchange.ROUND_NBYTES),
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


def exchanged(
    case: Case, name: str, rank: int, *, device: str = "cpu", room: int | None = None
) -> tuple[int, list[torch.Tensor]]:
    """Carry out `case`; return the bytes that came from others, and what was filled. Collective.

    Args:
        room: bytes of the current GPU that are left when the tensors are made; None: all others.
    """
    rank_exchange.ROUND_NBYTES = case.round_nbytes
    file = files_of(case.tensors, case.stored)[rank]
    own = torch.frombuffer(bytearray(DATA_OFFSET) + file, dtype=torch.uint8)[DATA_OFFSET:]
    wanted = case.wanted[rank]
    filled = [
        torch.zeros(piece.numel, dtype=torch_dtype(piece.dtype), device=device) for piece in wanted
    ]
    plan = read_plan(wanted, sources_of(case.stored), name)
    targets = Targets(wanted, filled)
    with ChunkReader(Bytes(own), 1, targets.gpu) as reader, nearly_full(room):
        received = rank_exchange.exchange(reader, own, rank, plan, wanted, targets)
    return received, filled


@contextlib.contextmanager
def nearly_full(room: int | None) -> Iterator[None]:
    """Leave only `room` bytes of the current GPU, half of them in torch's cache."""
    if room is None:
        yield
        return
    gc.collect()  # the frames of an error that was raised before hold tensors in cycles
    left = torch.empty(room, dtype=torch.uint8, device="cuda")
    others, nbytes = [], torch.cuda.mem_get_info()[1]
    while nbytes >= 512:  # the smallest piece of device memory
        try:
            others.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            nbytes //= 2
    del left
    torch.cuda.empty_cache()
    cached = torch.empty(room // 2, dtype=torch.uint8, device="cuda")
    del cached
    yield
    del others


def on_gpus(rank: int) -> dict[str, Any]:
    """Exchange over NCCL in four ways; return what came of each. Collective.

    Rank 1 has the least room. It has no memory for what it received in the second exchange, and
    none for its buffers in the third.
    """
    rank_exchange.LEAST_ROUND_NBYTES = 1024
    case = odd_case(ROUND_NBYTES, GPU_SCALE)
    with simulated_gpus(RANKS) as node, nccl_over_gloo(node) as nccl:
        torch.cuda.set_device(rank)
        allocator = node.devices[rank].allocator
        room = LEAST_ROOM if rank == 1 else None
        _, filled = exchanged(case, "little room", rank, device="cuda", room=room)
        # Another stream reads them, which has waited for nothing.
        with torch.cuda.stream(torch.cuda.Stream()):
            digests = [digest(bytes(t.cpu().view(torch.uint8).numpy())) for t in filled]
        rounds = list(nccl.round_nbytes)

        def no_memory() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        errors = []
        with mock.patch.dict(node.refusals, {"kernel copy": no_memory} if rank == 1 else {}):
            errors.append(error_of(lambda: exchanged(case, "refused", rank, device="cuda")))
        rank_exchange.LEAST_ROUND_NBYTES = 1 << 20
        room = NO_ROOM if rank == 1 else None
        errors.append(error_of(lambda: exchanged(case, "no room", rank, device="cuda", room=room)))
        collectives = len(nccl.round_nbytes)
        exchanged(nothing_from_others(GPU_SCALE), "nothing", rank, device="cuda")
        idle_collectives = len(nccl.round_nbytes) - collectives
        nccl.peers.clear()
        exchanged(one_rank_wants_it_all(), "one wants", rank, device="cuda")
        peers = sorted(set().union(*nccl.peers.values()))
        del filled
        gc.collect()
        torch.cuda.empty_cache()
        return {
            "digests": digests,
            "rounds": rounds,
            "errors": errors,
            "idle_collectives": idle_collectives,
            "peers": peers,
            "groups": len(dist.distributed_c10d._world.pg_map),
            "kept_nbytes": allocator.nbytes - torch.cuda.mem_get_info()[0],
            "devices": sorted({call.device for call in node.calls[1:]}),
        }


def error_of(work: Callable[[], object]) -> str | None:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


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
    found["gpu"] = on_gpus(rank)
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
    """They would keep GPU memory for as long as the job runs; also where an exchange failed."""
    assert [each["gpu"]["groups"] for each in found] == [1] * RANKS
    assert [each["gpu"]["kept_nbytes"] for each in found] == [0] * RANKS


def test_ranks_that_need_nothing_from_others_are_not_connected(found: list[dict]) -> None:
    assert [each["gpu"]["idle_collectives"] for each in found] == [0] * RANKS


def test_ranks_that_need_nothing_of_each_other_are_not_connected(found: list[dict]) -> None:
    """Rank 1 wants what ranks 0 and 2 hold: they need no connection to each other."""
    assert [each["gpu"]["peers"] for each in found] == [[1], [0, 2], [1]]


def test_all_ranks_raise_if_one_gpu_has_no_memory(found: list[dict]) -> None:
    for each in found:
        refused, no_room = each["gpu"]["errors"]
        assert refused == "FlashCkptError: rank 1: OutOfMemoryError: CUDA out of memory"
        assert no_room == f"{refused}. Tried to allocate {1 << 20} bytes."


def test_rounds_fit_into_the_gpu_that_has_the_least_room(found: list[dict]) -> None:
    case = odd_case(ROUND_NBYTES, GPU_SCALE)
    for rank, wanted in enumerate(case.wanted):
        rounds = found[rank]["gpu"]["rounds"]
        assert len(rounds) > 10
        assert LEAST_ROOM // 8 < max(rounds) <= LEAST_ROOM // 4
        digests = [digest(content(case.tensors, piece)) for piece in wanted]
        assert found[rank]["gpu"]["digests"] == digests


def test_a_rank_uses_its_own_gpu_alone(found: list[dict]) -> None:
    assert [each["gpu"]["devices"] for each in found] == [[rank] for rank in range(RANKS)]


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


def test_without_other_ranks_all_comes_from_the_own_slot() -> None:
    case = odd_case(64)
    held = in_layout_order([piece for pieces in case.stored for piece in pieces])
    (file,) = files_of(case.tensors, [held])
    own = torch.frombuffer(bytearray(file), dtype=torch.uint8)
    wanted = case.wanted[0]
    plan = read_plan(wanted, sources_of([held]), "it")
    with simulated_gpus(6) as node:
        torch.cuda.set_device(5)
        filled = [torch.zeros(it.nbytes, dtype=torch.uint8, device="cuda") for it in wanted]
        targets = Targets(wanted, filled)
        with ChunkReader(Bytes(own), 1, targets.gpu) as reader:
            assert rank_exchange.exchange(reader, own, 0, plan, wanted, targets) == 0
        assert node.calls[-1].name == "synchronize", "all bytes are in place when it returns"
        found = [bytes(tensor.cpu().numpy()) for tensor in filled]
    assert found == [content(case.tensors, piece) for piece in wanted]
