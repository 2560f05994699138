"""Exchange between real gloo ranks that hold a checkpoint in their slots.

`tests.simulated_gpu.nccl` stands in for NCCL: every rank has a simulated node, its tensors lie on
the device of its number, and gloo carries the bytes. The stand-in follows three documented rules. A
collective runs on a stream of its group and returns early. Tensors in host memory are refused. A
group's connections keep GPU memory, which torch cannot use, until the group is destroyed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
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
from tests.support.forked.nursery import call_in_ranks
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
#: Ranks that run on one node; any other rank has a node of its own.
NODES = [(), (0, 1), (0, 1, 2)]
ROUND_NBYTES = rank_exchange.ROUND_NBYTES
#: Offset of a slot's data section; only its alignment matters here.
DATA_OFFSET = 4096
#: Factor of the element counts in `odd_case` on GPUs. It is odd, so that sizes stay odd.
GPU_SCALE = 4001
#: Free bytes of the fullest GPU: less than a tenth of the bytes that `odd_case` exchanges there.
LEAST_ROOM = 128 * 1024
#: Free bytes of a GPU that are too few for the buffers of the smallest round.
NO_ROOM = 40 * 1024


@dataclasses.dataclass(frozen=True)
class Case:
    """A test case: the pieces that every rank's slot holds, and the pieces that the rank wants."""

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
    """Return spans of 1-byte and 2-byte elements whose lengths are no multiples of eight bytes."""
    tensors: Tensors = {}
    stored: list[list[Piece]] = [[] for _ in range(RANKS)]
    wanted: list[list[Piece]] = [[] for _ in range(RANKS)]
    sizes = [("BF16", 77), ("BF16", 13), ("U8", 51), ("U8", 9)]
    for number, (dtype, multiple) in enumerate(sizes):
        key, numel = f"w{number}", scale * multiple
        tensors["weight", key] = random_tensor((numel,), dtype, number)
        whole_piece = whole(key, "weight", dtype, (numel,), (0,), (numel,))
        third = numel // 3
        ends = [0, third + number % 2, 2 * third + 1, numel]
        for rank in range(RANKS):
            stored[rank].append(run(whole_piece, ends[rank], ends[rank + 1]))
            # Wanted ranges end elsewhere than the stored ranges.
            wanted[rank] += [whole_piece, run(whole_piece, rank + 1, numel - 2 - rank)]
    return Case(tensors, [in_layout_order(pieces) for pieces in stored], wanted, round_nbytes)


def nothing_from_others(scale: int = 1) -> Case:
    case = odd_case(64, scale)
    return dataclasses.replace(case, wanted=case.stored)


def one_rank_wants_it_all() -> Case:
    """Return a case: rank 1 holds nothing and wants everything, the others want nothing."""
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
    """A source of chunks without damage, from the slots of some ranks."""

    def __init__(self, slots: dict[int, torch.Tensor]) -> None:
        self._slots = {rank: data.numpy().data for rank, data in slots.items()}
        self.read: set[tuple[int, int]] = set()

    def data_nbytes(self, rank: int) -> int:
        return self._slots[rank].nbytes

    def read_chunk(self, rank: int, number: int, parts: Sequence[memoryview]) -> None:
        self.read.add((rank, number))
        position = number * CHUNK_NBYTES
        for part in parts:
            part[:] = self._slots[rank][position : position + part.nbytes]
            position += part.nbytes


def exchanged(
    case: Case,
    name: str,
    rank: int,
    *,
    device: str = "cpu",
    room: int | None = None,
    node: Collection[int] = (),
) -> tuple[int, list[torch.Tensor], set[tuple[int, int]]]:
    """Carry out `case`. Collective.

    Returns the bytes from other ranks, the filled tensors, and the rank and number of the chunks
    that were read.

    Args:
        node: the ranks whose slots each of them reads.
        room: free bytes of the current GPU after the tensors are made; None: no limit.
    """
    rank_exchange.ROUND_NBYTES = case.round_nbytes
    readable = {rank, *node} if rank in node else {rank}
    files = files_of(case.tensors, case.stored)
    slots = {
        number: torch.frombuffer(bytearray(DATA_OFFSET) + files[number], dtype=torch.uint8)
        for number in readable
    }
    own = slots[rank][DATA_OFFSET:]
    source = Bytes({number: slot[DATA_OFFSET:] for number, slot in slots.items()})
    wanted = case.wanted[rank]
    filled = [
        torch.zeros(piece.numel, dtype=torch_dtype(piece.dtype), device=device) for piece in wanted
    ]
    plan = read_plan(wanted, sources_of(case.stored), name)
    targets = Targets(wanted, filled)
    with ChunkReader(source, 1, targets.gpu) as reader, nearly_full(room):
        received = rank_exchange.exchange(reader, own, rank, plan, wanted, targets, readable)
    return received, filled, source.read


@contextlib.contextmanager
def nearly_full(room: int | None) -> Iterator[None]:
    """Leave only `room` bytes of the current GPU, half of them in torch's cache."""
    if room is None:
        yield
        return
    gc.collect()  # the frames of an earlier error hold tensors in reference cycles
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
    """Exchange over NCCL in five ways; return the results. Collective.

    Rank 1 has the least room. In the second exchange it has no memory for the received bytes, and
    in the third none for its buffers.
    """
    rank_exchange.LEAST_ROUND_NBYTES = 1024
    case = odd_case(ROUND_NBYTES, GPU_SCALE)
    with simulated_gpus(RANKS) as node, nccl_over_gloo(node) as nccl:
        torch.cuda.set_device(rank)
        allocator = node.devices[rank].allocator
        room = LEAST_ROOM if rank == 1 else None
        _, filled, _ = exchanged(case, "little room", rank, device="cuda", room=room)
        # The stream that reads the tensors has not waited for any other stream.
        with torch.cuda.stream(torch.cuda.Stream()):
            digests = [digest(bytes(t.cpu().view(torch.uint8).numpy())) for t in filled]
        rounds = list(nccl.round_nbytes)

        def no_memory() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        errors = []
        with mock.patch.dict(node.refusals, {"kernel copy": no_memory} if rank == 1 else {}):
            errors.append(
                error_of(lambda: exchanged(case, "refused", rank, device="cuda", room=room))
            )
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
    """Carry out all cases on one rank; write digests of the filled tensors, and the byte counts."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=60),
    )
    results = {}
    for (name, case), node in itertools.product(CASES.items(), NODES):
        received, filled, read = exchanged(case, name, rank, node=node)
        results[f"{name}, {node}"] = [
            received,
            [digest(bytes(t.view(torch.uint8).numpy())) for t in filled],
            sorted(read),
        ]
    results["gpu"] = on_gpus(rank)
    Path(directory, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    directory = tmp_path_factory.mktemp("exchange")
    call_in_ranks(rank_main, (str(directory),), RANKS)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_receives_every_wanted_byte(
    results: list[dict], name: str, node: tuple[int, ...]
) -> None:
    """The bytes from ranks of other nodes are counted."""
    case = CASES[name]
    of_node = [{rank, *node} if rank in node else {rank} for rank in range(RANKS)]
    received = [result[f"{name}, {node}"][0] for result in results]
    for rank, wanted in enumerate(case.wanted):
        _, digests, _ = results[rank][f"{name}, {node}"]
        assert digests == [digest(content(case.tensors, piece)) for piece in wanted]
        plan = read_plan(wanted, sources_of(case.stored), name)
        from_others = sum(
            read.nbytes
            for source, reads in plan.reads.items()
            for read in reads
            if source not in of_node[rank]
        )
        assert received[rank] == from_others
    assert (name == "nothing from others" or len(node) == RANKS) == (not any(received))


def test_a_rank_verifies_bytes_that_only_others_want(results: list[dict]) -> None:
    """A chunk is verified when it is read. Every slot has one, and rank 1 wants them all."""
    read = [result["one rank wants it all, ()"][2] for result in results]
    assert read == [[[0, 0]], [], [[2, 0]]]


def test_only_ranks_with_bytes_for_each_other_are_connected_while_they_exchange(
    results: list[dict],
) -> None:
    """Open connections would keep GPU memory until the job ends, also after a failed exchange.

    Rank 1 wants the bytes of ranks 0 and 2, so ranks 0 and 2 need no connection.
    """
    on_gpus = [result["gpu"] for result in results]
    assert [result["peers"] for result in on_gpus] == [[1], [0, 2], [1]]
    for rank, result in enumerate(on_gpus):
        assert (result["groups"], result["kept_nbytes"], result["idle_collectives"]) == (1, 0, 0)
        assert result["devices"] == [rank], "a rank uses only its own GPU"


def test_all_ranks_raise_if_one_gpu_has_no_memory(results: list[dict]) -> None:
    """They raise soon, because a failed rank joins the remaining rounds."""
    for result in results:
        refused, no_room = result["gpu"]["errors"]
        assert refused == "FlashCkptError: rank 1: OutOfMemoryError: CUDA out of memory"
        assert no_room == f"{refused}. Tried to allocate {1 << 20} bytes."


def test_rounds_fit_into_the_fullest_gpu(results: list[dict]) -> None:
    case = odd_case(ROUND_NBYTES, GPU_SCALE)
    for rank, wanted in enumerate(case.wanted):
        rounds = results[rank]["gpu"]["rounds"]
        assert len(rounds) > 10
        assert LEAST_ROOM // 8 < max(rounds) <= LEAST_ROOM // 4
        digests = [digest(content(case.tensors, piece)) for piece in wanted]
        assert results[rank]["gpu"]["digests"] == digests


@given(st.lists(st.integers(1, 40), max_size=6), st.integers(1, 5))
def test_a_stream_with_spans_of_any_length_is_cut_between_elements(lengths, eighths):
    """A span starts with an element, so cuts at multiples of the widest element size are valid."""
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


def test_a_single_rank_reads_everything_from_its_own_slot() -> None:
    case = odd_case(64)
    held = in_layout_order([piece for pieces in case.stored for piece in pieces])
    (file,) = files_of(case.tensors, [held])
    own = torch.frombuffer(bytearray(file), dtype=torch.uint8)
    wanted = case.wanted[0]
    plan = read_plan(wanted, sources_of([held]), "it")
    with simulated_gpus(6) as node:
        torch.cuda.set_device(5)
        filled = [torch.zeros(target.nbytes, dtype=torch.uint8, device="cuda") for target in wanted]
        targets = Targets(wanted, filled)
        with ChunkReader(Bytes({0: own}), 1, targets.gpu) as reader:
            assert rank_exchange.exchange(reader, own, 0, plan, wanted, targets) == 0
        assert node.calls[-1].name == "synchronize", "all bytes are in place when it returns"
        arrived = [bytes(tensor.cpu().numpy()) for tensor in filled]
    assert arrived == [content(case.tensors, piece) for piece in wanted]
