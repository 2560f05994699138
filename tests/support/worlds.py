"""Simulated jobs: global tensors in numpy, and the pieces that each rank stores or needs.

`Model` follows Megatron: layers stacked along a first axis, experts along a second, matrices
sharded by tensor parallelism, the two halves of SwiGLU in one local tensor. A job is a few parallel
sizes; tests draw source and destination independently. `carry_out` executes a plan and counts how
often each element is written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from hypothesis import strategies as st

from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import Piece, Shape
from megatron_flashckpt.layout.read_plan import ReadPlan
from megatron_flashckpt.layout.reshard import Run, regions
from megatron_flashckpt.layout.template import Source
from tests.support.strategies import in_layout_order, layout_of

#: Bytes of shape `(*global_shape, itemsize)` by (kind, key).
Tensors = dict[tuple[str, str], np.ndarray]


def random_tensor(global_shape: Shape, dtype: str, seed: int) -> np.ndarray:
    source = np.random.default_rng([seed, *global_shape])
    return source.integers(0, 256, (*global_shape, itemsize(dtype)), np.uint8)


def content(tensors: Tensors, piece: Piece) -> bytes:
    """Return the bytes of `piece`, zeros where the piece exceeds the stored tensor."""
    stored = tensors[piece.kind, piece.key]
    whole = np.zeros((*piece.global_shape, stored.shape[-1]), np.uint8)
    common = tuple(slice(0, min(pair)) for pair in zip(whole.shape, stored.shape, strict=True))
    whole[common] = stored[common]
    region = zip(piece.offset, piece.shape, strict=True)
    box = whole[tuple(slice(low, low + extent) for low, extent in region)]
    return box.reshape(math.prod(piece.shape), stored.shape[-1])[piece.start : piece.end].tobytes()


def source(rank: int, pieces: list[Piece]) -> Source:
    layout = layout_of(pieces)
    return Source(rank, layout.template, layout.placement)


def sources_of(ranks: Sequence[list[Piece]]) -> list[Source]:
    return [source(rank, pieces) for rank, pieces in enumerate(ranks)]


def files_of(tensors: Tensors, ranks: Sequence[list[Piece]]) -> list[bytes]:
    """Return the data section of every rank's file."""
    return [b"".join(content(tensors, piece) for piece in pieces) for pieces in ranks]


def whole(
    key: str, kind: str, dtype: str, global_shape: Shape, offset: Shape, shape: Shape
) -> Piece:
    return Piece(key, kind, dtype, global_shape, offset, shape, 0, math.prod(shape))


def run(piece: Piece, start: int, end: int) -> Piece:
    return msgspec.structs.replace(piece, start=start, end=end)


def laid_end_to_end(boxes: Iterable[Piece], low: int, high: int) -> list[Piece]:
    """Return range `[low, high)` of all elements of `boxes`, as a distributed optimizer holds."""
    ranges = []
    for box in boxes:
        start, end = max(low, 0), min(high, box.numel)
        if start < end:
            ranges.append(run(box, start, end))
        low, high = low - box.numel, high - box.numel
    return ranges


# ---------------------------------------------------------------------- carrying out a plan


def carry_out(
    plan: ReadPlan, wanted: list[Piece], files: Sequence[bytes]
) -> tuple[list[bytes], list[np.ndarray]]:
    """Return the bytes of all `wanted`, zero if not written, and the number of writes to each."""
    filled = [np.zeros((piece.numel, itemsize(piece.dtype)), np.uint8) for piece in wanted]
    times = [np.zeros(piece.numel, int) for piece in wanted]
    for rank, reads in plan.reads.items():
        for read in reads:
            size = itemsize(wanted[read.wanted].dtype)
            assert read.nbytes == (read.stored.end - read.stored.start) * size
            data = files[rank][read.source_offset : read.source_offset + read.nbytes]
            there = np.frombuffer(data, np.uint8).reshape(-1, size)
            for region in regions(read.stored, Run.of(wanted[read.wanted])):
                here = _places(region.shape, region.target_start, region.target_strides)
                from_there = _places(region.shape, region.source_start, region.source_strides)
                filled[read.wanted][here] = there[from_there]
                np.add.at(times[read.wanted], here, 1)
    return [flat.tobytes() for flat in filled], times


def _places(shape: Shape, start: int, strides: Shape) -> np.ndarray:
    steps = np.indices(shape, sparse=True)
    return start + sum(axis * step for axis, step in zip(steps, strides, strict=True))


# ---------------------------------------------------------------------- a model under any sizes

LAYERS, EXPERTS, VOCABULARY, HIDDEN, HEADS, FEED = 4, 4, 12, 6, 12, 24
SHAPES: dict[str, Shape] = {
    "embedding": (VOCABULARY, HIDDEN),
    "layers.qkv": (LAYERS, HEADS, HIDDEN),
    "layers.proj": (LAYERS, HIDDEN, HEADS),
    "layers.fc1": (LAYERS, 2 * FEED, HIDDEN),
    "layers.norm": (LAYERS, HIDDEN),
    "layers.experts.fc1": (LAYERS, EXPERTS, 2 * FEED, HIDDEN),
    "layers.experts.fc2": (LAYERS, EXPERTS, HIDDEN, FEED),
    "final": (HIDDEN,),
    "scale": (),
    "nothing": (0, HIDDEN),
}
KINDS = {"weight": "BF16", "master": "F32", "exp_avg": "F64", "fp8": "U8"}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A job's parallel sizes."""

    tp: int
    pp: int
    ep: int
    dp: int
    grouped: bool
    """True if a rank's experts are one tensor."""
    distributed: bool
    """True if data-parallel replicas own ranges; else all hold everything, and the first writes."""


sizes = st.builds(
    Sizes,
    tp=st.sampled_from([1, 2, 3, 4]),
    pp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 4]),
    dp=st.integers(1, 5),
    grouped=st.booleans(),
    distributed=st.booleans(),
)


def model_tensors(seed: int) -> Tensors:
    return {
        (kind, key): random_tensor(shape, dtype, seed + number)
        for number, (kind, dtype) in enumerate(KINDS.items())
        for key, shape in SHAPES.items()
    }


def local_boxes(job: Sizes, tp: int, pp: int, ep: int, *, writes: bool) -> list[Piece]:
    """Return the boxes of a rank in memory order; only those that the rank saves if it `writes`.

    The first tensor or expert rank saves state that all of them replicate, and the first stage
    saves tied embeddings.
    """
    tensors: list[tuple[str, Shape, Shape]] = []
    first = not writes or ep == 0

    def cut(extent: int) -> tuple[int, int]:
        return extent // job.tp * tp, extent // job.tp

    def halves(key: str, lead: Shape, lead_shape: Shape) -> None:
        # SwiGLU: gate and up of this rank are one local tensor, but two boxes of the global one.
        low, n = cut(FEED)
        for half in (0, FEED):
            tensors.append((key, (*lead, half + low, 0), (*lead_shape, n, HIDDEN)))

    last_stage = pp == job.pp - 1
    if first and (pp == 0 or (last_stage and not writes)):
        low, n = cut(VOCABULARY)
        tensors.append(("embedding", (low, 0), (n, HIDDEN)))
    for layer in range(LAYERS // job.pp * pp, LAYERS // job.pp * (pp + 1)):
        if first:
            low, n = cut(HEADS)
            tensors.append(("layers.qkv", (layer, low, 0), (1, n, HIDDEN)))
            tensors.append(("layers.proj", (layer, 0, low), (1, HIDDEN, n)))
            halves("layers.fc1", (layer,), (1,))
        if not writes or (first and tp == 0):
            tensors.append(("layers.norm", (layer, 0), (1, HIDDEN)))
        count = EXPERTS // job.ep
        for expert in range(ep * count, (ep + 1) * count, count if job.grouped else 1):
            together = count if job.grouped else 1
            low, n = cut(FEED)
            halves("layers.experts.fc1", (layer, expert), (1, together))
            tensors.append(
                ("layers.experts.fc2", (layer, expert, 0, low), (1, together, HIDDEN, n))
            )
    if last_stage and (not writes or (first and tp == 0)):
        tensors += [("final", (0,), (HIDDEN,)), ("scale", (), ()), ("nothing", (0, 0), (0, HIDDEN))]
    return [
        whole(key, kind, dtype, SHAPES[key], offset, shape)
        for kind, dtype in KINDS.items()
        for key, offset, shape in tensors
    ]


def _share(job: Sizes, boxes: list[Piece], dp: int) -> list[Piece]:
    """Return the pieces that replica `dp` owns: all, or its range of each kind's flat buffer."""
    if not job.distributed:
        return boxes
    owned = []
    for kind in KINDS:
        buffer = [box for box in boxes if box.kind == kind]
        # Megatron pads buffers to equal shares; the last share may hold padding only.
        share = -(-sum(box.numel for box in buffer) // job.dp)
        owned += laid_end_to_end(buffer, share * dp, share * (dp + 1))
        if dp == 0:
            owned += [box for box in buffer if not box.numel]
    return owned


def stored_by(job: Sizes) -> list[list[Piece]]:
    """Return the pieces that every rank of `job` writes: every element exactly once."""
    return [
        in_layout_order(_share(job, local_boxes(job, tp, pp, ep, writes=True), dp))
        if job.distributed or dp == 0
        else []
        for dp in range(job.dp)
        for ep in range(job.ep)
        for pp in range(job.pp)
        for tp in range(job.tp)
    ]


def wanted_by(job: Sizes, tp: int, pp: int, ep: int, dp: int) -> list[Piece]:
    """Return the pieces that a rank needs: whole weights, and its optimizer's part of the state."""
    boxes = local_boxes(job, tp, pp, ep, writes=False)
    share = _share(job, boxes, dp)
    return [box for box in boxes if box.kind == "weight"] + [
        piece for piece in share if piece.kind != "weight"
    ]
