"""Read plans fill every wanted byte exactly once, and one error names all that cannot be filled.

The oracle is brute force: global tensors in numpy, cut and copied byte by byte.
"""

from __future__ import annotations

import dataclasses
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flashckpt.errors import MissingStateError
from megatron_flashckpt.layout.coverage import Read, Source, read_plan, superfluous
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import Piece, equal_shares
from tests.layout.strategies import dtypes, in_layout_order, kinds, layout_of

PLACE = "/ckpt/iter_0000007"


@dataclasses.dataclass
class World:
    """Global tensors and the boxes that tensor and pipeline parallelism cut out of them."""

    tensors: dict[tuple[str, str], np.ndarray]
    """Bytes of shape `(*global_shape, itemsize)` by (kind, key)."""
    boxes: list[Piece]
    """Whole boxes; data parallelism cuts them further."""

    def wanted_bytes(self, piece: Piece) -> bytes:
        region = tuple(
            slice(low, low + extent) for low, extent in zip(piece.offset, piece.shape, strict=True)
        )
        tensor = self.tensors[piece.kind, piece.key]
        flat = tensor[region].reshape(math.prod(piece.shape), tensor.shape[-1])
        return flat[piece.start : piece.end].tobytes()


@st.composite
def worlds(draw: st.DrawFn) -> World:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tensors, boxes = {}, []
    names = st.tuples(kinds, st.sampled_from("abcd"))
    for kind, key in draw(st.lists(names, unique=True, min_size=1, max_size=4)):
        dtype = draw(dtypes)
        shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
        tensors[kind, key] = random.integers(0, 256, (*shape, itemsize(dtype)), np.uint8)
        # Tensor parallelism: the first axis in two, at any row.
        row = draw(st.integers(0, shape[0])) if shape else 0
        for low, high in ((0, row), (row, shape[0])) if shape else ((0, 0),):
            extents = (high - low, *shape[1:]) if shape else ()
            offset = (low, *(0,) * (len(shape) - 1)) if shape else ()
            box = Piece(key, kind, dtype, shape, offset, extents, 0, math.prod(extents))
            if box.box not in {other.box for other in boxes}:
                boxes.append(box)
    return World(tensors, boxes)


def cut(draw: st.DrawFn, boxes: list[Piece], ranks: int) -> list[list[Piece]]:
    """Cut every box into one run per rank, anywhere; a rank may get nothing of it."""
    by_rank: list[list[Piece]] = [[] for _ in range(ranks)]
    for box in boxes:
        points = st.lists(st.integers(0, box.end), min_size=ranks - 1, max_size=ranks - 1)
        ends = [*sorted(draw(points)), box.end]
        order = draw(st.permutations(range(ranks)))
        for rank, start, end in zip(order, [0, *ends[:-1]], ends, strict=True):
            if start < end or draw(st.booleans()):
                by_rank[rank].append(msgspec.structs.replace(box, start=start, end=end))
    return [in_layout_order(pieces) for pieces in by_rank]


def source(rank: int, pieces: list[Piece]) -> Source:
    layout = layout_of(pieces)
    return Source(rank, layout.template, layout.placement)


def problems(
    wanted: list[Piece], stored: list[list[Piece]], unwanted: tuple[str, ...] = ()
) -> list[str]:
    sources = [source(rank, pieces) for rank, pieces in enumerate(stored)]
    with pytest.raises(MissingStateError) as caught:
        read_plan(wanted, sources, PLACE, unwanted)
    head, *lines, remedy = str(caught.value).splitlines()
    assert head == f"{PLACE} does not hold what this model needs ({len(lines)} differences):"
    assert "nothing was loaded" in remedy
    return [line.strip() for line in lines]


def box(key: str, numel: int = 8, kind: str = "weight", dtype: str = "F32") -> Piece:
    return Piece(key, kind, dtype, (numel,), (0,), (numel,), 0, numel)


def run(piece: Piece, start: int, end: int) -> Piece:
    return msgspec.structs.replace(piece, start=start, end=end)


@settings(max_examples=50)
@given(st.data(), worlds(), st.integers(1, 4), st.integers(1, 4))
def test_any_data_parallel_cut_reads_back_from_any_other(data, world, saved_by, loaded_by):
    stored = cut(data.draw, world.boxes, saved_by)
    files = {
        rank: b"".join(world.wanted_bytes(piece) for piece in pieces)
        for rank, pieces in enumerate(stored)
    }
    sources = [source(rank, pieces) for rank, pieces in enumerate(stored)]
    for wanted in cut(data.draw, world.boxes, loaded_by):
        targets = [bytearray(piece.nbytes) for piece in wanted]
        times_written = [np.zeros(piece.nbytes, int) for piece in wanted]
        for rank, reads in read_plan(wanted, sources, PLACE).items():
            for read in reads:
                there = slice(read.source_offset, read.source_offset + read.nbytes)
                here = slice(read.target_offset, read.target_offset + read.nbytes)
                assert len(files[rank][there]) == read.nbytes
                targets[read.wanted][here] = files[rank][there]
                times_written[read.wanted][here] += 1
        for piece, target, times in zip(wanted, targets, times_written, strict=True):
            assert bytes(target) == world.wanted_bytes(piece)
            assert (times == 1).all()


@settings(max_examples=50)
@given(worlds(), st.integers(1, 5), st.data())
def test_equal_shares_of_all_replicas_fill_one_whole_model(world, replicas, data):
    ordered = in_layout_order(world.boxes)
    sizes = [(piece.numel, itemsize(piece.dtype)) for piece in ordered]
    stored = [
        [
            run(piece, *bounds)
            for piece, bounds in zip(ordered, equal_shares(sizes, replicas, index), strict=True)
        ]
        for index in range(replicas)
    ]
    sources = [source(rank, pieces) for rank, pieces in enumerate(stored)]
    plan = read_plan(ordered, data.draw(st.permutations(sources)), PLACE)
    read = sum(read.nbytes for reads in plan.values() for read in reads)
    assert read == sum(piece.nbytes for piece in ordered)


@settings(max_examples=50)
@given(st.data(), worlds(), st.integers(2, 4))
def test_a_run_left_out_or_stored_twice_is_always_noticed(data, world, ranks):
    stored = cut(data.draw, world.boxes, ranks)
    runs = [(rank, n) for rank, held in enumerate(stored) for n, it in enumerate(held) if it.numel]
    if not runs:
        return
    rank, position = data.draw(st.sampled_from(runs))
    victim = stored[rank][position]
    if data.draw(st.booleans()):
        stored[rank] = stored[rank][:position] + stored[rank][position + 1 :]
    else:
        stored.append([victim])
    (line,) = problems([run(victim, 0, math.prod(victim.shape))], stored)
    assert line.startswith(f"{victim.kind}/{victim.key}: ")


def test_a_plan_names_source_and_target_bytes():
    weight = box("w")
    stored = [[box("other", 2), run(weight, 0, 5)], [run(weight, 5, 8)]]
    wanted = [box("other", 2), run(weight, 3, 7)]
    sources = [source(rank, pieces) for rank, pieces in enumerate(stored)]
    assert read_plan(wanted, sources, PLACE) == {
        0: [Read(0, 8, 0, 0), Read(8 + 12, 8, 1, 0)],
        1: [Read(0, 8, 1, 8)],
    }


def test_nothing_wanted_reads_nothing():
    assert read_plan([], [source(0, [box("w")])], PLACE) == {}


def test_an_empty_range_needs_no_bytes_but_its_tensor_must_be_there():
    assert read_plan([run(box("w"), 3, 3)], [source(0, [box("w")])], PLACE) == {}
    (line,) = problems([run(box("v"), 3, 3)], [[box("w")]])
    assert line == "weight/v: not in the checkpoint; the model has shape (8,)"


def test_a_gap_names_the_elements_that_were_wanted():
    weight = box("w")
    (line,) = problems([weight], [[run(weight, 0, 3)], [run(weight, 4, 8)]])
    assert line == "weight/w: elements 0 to 8 are not there exactly once"


@pytest.mark.parametrize(("start", "end"), [(0, 7), (1, 8)])
def test_a_run_that_stops_short_or_starts_late_is_a_gap(start, end):
    weight = box("w")
    (line,) = problems([weight], [[run(weight, start, end)]])
    assert line == "weight/w: elements 0 to 8 are not there exactly once"


def test_elements_stored_twice_are_refused():
    weight = box("w")
    (line,) = problems([weight], [[run(weight, 0, 5)], [run(weight, 4, 8)]])
    assert line == "weight/w: elements 0 to 8 are not there exactly once"


def test_a_gap_or_overlap_outside_the_wanted_range_does_not_matter():
    weight = box("w")
    stored = [[run(weight, 0, 2)], [run(weight, 1, 2)], [run(weight, 3, 8)]]
    sources = [source(rank, pieces) for rank, pieces in enumerate(stored)]
    assert read_plan([run(weight, 4, 8)], sources, PLACE) == {2: [Read(4, 16, 0, 0)]}


def test_another_shape_names_both_shapes_and_types():
    (line,) = problems([box("w", 8)], [[box("w", 9)]])
    assert line == "weight/w: (9,) F32 in the checkpoint, (8,) F32 in the model"


def test_another_element_type_names_both():
    (line,) = problems([box("w", dtype="BF16")], [[box("w", dtype="F32")]])
    assert line == "weight/w: (8,) F32 in the checkpoint, (8,) BF16 in the model"


def test_another_tensor_parallel_cut_is_told_apart_from_missing_elements():
    half = Piece("w", "weight", "F32", (8,), (0,), (4,), 0, 4)
    other_half = msgspec.structs.replace(half, offset=(4,))
    (line,) = problems([box("w")], [[half], [other_half]])
    assert line == "weight/w: cut otherwise by tensor, pipeline or expert parallelism"


def test_one_kind_does_not_stand_in_for_another():
    (line,) = problems([box("w", kind="exp_avg")], [[box("w", kind="exp_avg_sq")]])
    assert line == "exp_avg/w: not in the checkpoint; the model has shape (8,)"


def test_every_difference_is_named_in_one_error():
    wanted = [box("absent"), box("shape"), box("type"), box("gap"), box("fine")]
    gap = box("gap")
    stored = [
        [box("shape", 9), box("type", dtype="I32"), run(gap, 0, 4), box("fine"), box("extra")]
    ]
    lines = problems(wanted, stored, unwanted=("weight/extra",))
    assert lines == [
        "weight/extra: in the checkpoint, not in the model",
        "weight/absent: not in the checkpoint; the model has shape (8,)",
        "weight/shape: (9,) F32 in the checkpoint, (8,) F32 in the model",
        "weight/type: (8,) I32 in the checkpoint, (8,) F32 in the model",
        "weight/gap: elements 0 to 8 are not there exactly once",
    ]


def test_a_difference_that_many_layers_share_is_said_once():
    layers = [Piece("w", "weight", "F32", (4, 2), (n, 0), (1, 2), 0, 2) for n in range(4)]
    assert len(problems(layers, [[box("other")]])) == 1


def test_superfluous_names_are_differences_even_if_all_that_is_wanted_is_there():
    assert problems([box("w")], [[box("w")]], unwanted=("weight/z", "master/a")) == [
        "master/a: in the checkpoint, not in the model",
        "weight/z: in the checkpoint, not in the model",
    ]


def test_superfluous_lists_what_is_stored_but_not_wanted_of_these_kinds():
    stored = [
        source(0, [box("w"), box("v"), box("w", kind="exp_avg")]),
        source(1, [box("u"), box("v", kind="rank_state", dtype="U8")]),
    ]
    assert superfluous([box("w")], stored, {"weight"}) == {"weight/v", "weight/u"}
    assert superfluous([box("w")], stored, {"exp_avg"}) == {"exp_avg/w"}
    assert superfluous([box("w"), box("v"), box("u")], stored, {"weight"}) == set()


def test_an_absent_key_reads_as_text_and_is_also_a_key_error():
    with pytest.raises(KeyError) as caught:
        read_plan([box("w")], [], PLACE)
    assert str(caught.value).startswith(f"{PLACE} does not hold")
