"""The short way to a plan leads where the long one does: what a rank finds in the shard of the rank
in whose place it stands needs no search, and what contradicts itself is refused as before.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flashckpt.errors import CorruptCheckpointError, MissingStateError
from megatron_flashckpt.layout.exact_match import NOTHING_HELD, Held, held_once, stored_tensors
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import Read, ReadPlan, read_plan
from megatron_flashckpt.layout.reshard import Run
from megatron_flashckpt.layout.template import Source
from tests.layout.test_read_plan import HUGE, PLACE, box, cuts, matrix, runs_of, tensors_drawn
from tests.support.strategies import in_layout_order
from tests.support.worlds import run, sizes, source, sources_of, stored_by, wanted_by, whole


def held(sources: Sequence[Source], rank: int) -> Held:
    return held_once(sources[rank], stored_tensors(sources))


def outcome(
    wanted: list[Piece], sources: Sequence[Source], short: Held = NOTHING_HELD
) -> ReadPlan | tuple[type, str]:
    """Return the plan, or how it was refused."""
    try:
        return read_plan(wanted, sources, PLACE, held=short)
    except (CorruptCheckpointError, MissingStateError) as error:
        return type(error), str(error)


def refused_by_any(wanted: Sequence[list[Piece]], sources: list[Source], *, short: bool) -> bool:
    """Return whether a load of all ranks fails: of each `wanted`, in the layout of `sources`."""
    return any(
        not isinstance(
            outcome(mine, sources, held(sources, rank) if short else NOTHING_HELD), ReadPlan
        )
        for rank, mine in enumerate(wanted)
    )


@settings(max_examples=100, deadline=None)
@given(st.data(), tensors_drawn(), st.integers(1, 4))
def test_the_same_is_read_as_if_all_were_searched(data, drawn, ranks):
    _, wholes = drawn
    stored = data.draw(cuts(wholes, ranks))
    sources = sources_of(stored)
    other = data.draw(cuts(wholes, data.draw(st.integers(1, 3))))
    for rank in range(ranks):
        for wanted in [*stored, *other]:
            assert outcome(wanted, sources, held(sources, rank)) == outcome(wanted, sources)


@settings(max_examples=30, deadline=None)
@given(st.data(), sizes, sizes)
def test_models_under_any_sizes_are_read_as_if_all_were_searched(data, saved, loaded):
    sources = sources_of(stored_by(saved))
    twin = data.draw(st.integers(0, len(sources) - 1))
    for job in (saved, loaded):
        rank = [data.draw(st.integers(0, n - 1)) for n in (job.tp, job.pp, job.ep, job.dp)]
        wanted = wanted_by(job, *rank)
        assert outcome(wanted, sources, held(sources, twin)) == outcome(wanted, sources)


def test_in_the_layout_that_was_saved_nothing_is_searched():
    stored = [[box("w"), run(box("v"), 0, 4)], [box("u"), run(box("v"), 4, 8)]]
    sources = sources_of(stored)
    for rank, wanted in enumerate(stored):
        plan = read_plan(wanted, [], PLACE, held=held(sources, rank))  # nowhere to search
        assert plan == read_plan(wanted, sources, PLACE)
        assert plan.reads == {
            rank: [
                Read(0, 32, 0, Run((0,), (8,), 0, 8)),
                Read(32, 16, 1, Run((0,), (8,), 4 * rank, 4 * rank + 4)),
            ]
        }


# ---------------------------------------------------------------------- contradictions


@settings(max_examples=100, deadline=None)
@given(st.data(), tensors_drawn(), st.integers(2, 4))
def test_a_run_left_out_or_stored_twice_is_refused_by_whoever_wants_it(data, drawn, ranks):
    _, wholes = drawn
    stored = data.draw(cuts(wholes, ranks))
    rank, position = data.draw(runs_of(stored))
    sound = list(stored)
    if data.draw(st.booleans()):
        stored[rank] = stored[rank][:position] + stored[rank][position + 1 :]
    else:
        stored.append([stored[rank][position]])
    sources = sources_of(stored)
    for wanted in sound:
        for twin in range(len(sources)):
            assert outcome(wanted, sources, held(sources, twin)) == outcome(wanted, sources)
    assert refused_by_any(sound, sources, short=True)


@settings(max_examples=100, deadline=None)
@given(st.data(), tensors_drawn(), st.integers(2, 4))
def test_a_run_in_the_place_of_another_is_refused_by_some_rank(data, drawn, ranks):
    """As many elements as there should be, or fewer, some of them twice."""
    _, wholes = drawn
    sound = data.draw(cuts(wholes, ranks))
    rank, position = data.draw(runs_of(sound))
    again, number = data.draw(runs_of(sound))
    forged = list(sound)
    left = sound[rank][:position] + sound[rank][position + 1 :]
    forged[rank] = in_layout_order([*left, sound[again][number]])
    sources = sources_of(forged)
    assert refused_by_any(sound, sources, short=True) == ((rank, position) != (again, number))


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(HUGE) | st.integers(-8, 30))
def test_whatever_a_placement_says_a_load_fails_if_it_fails_where_all_are_searched(data, number):
    sound = data.draw(cuts([matrix((0, 0), (4, 6))], 2))
    sources = sources_of(sound)
    rank, item = data.draw(
        st.sampled_from(
            [(it.rank, item) for it in sources for item in it.template.items if item.numel]
        )
    )
    placement = list(sources[rank].placement)
    placement[item.placed_at + data.draw(st.integers(0, 2))] = number
    sources[rank] = sources[rank]._replace(placement=tuple(placement))
    refused = refused_by_any(sound, sources, short=False)
    assert refused_by_any(sound, sources, short=True) == refused


def test_a_contradiction_that_nobody_minds_gives_each_rank_its_own_and_no_other_any():
    """Layer 1 is frozen: its moments are nowhere. Two ranks have those of layer 0."""
    layer = whole("w", "exp_avg", "F32", (2, 4), (0, 0), (1, 4))
    sources = sources_of([[layer], [layer], []])
    for rank in range(2):
        assert read_plan([layer], sources, PLACE, held=held(sources, rank)).reads.keys() == {rank}
    with pytest.raises(MissingStateError, match="not stored exactly once"):
        read_plan([layer], sources, PLACE, held=held(sources, 2))


def test_a_rank_that_has_stored_the_same_piece_twice_is_not_believed():
    layer = whole("w", "exp_avg", "F32", (2, 4), (0, 0), (1, 4))
    sources = sources_of([[layer, layer]])
    with pytest.raises(MissingStateError, match="not stored exactly once"):
        read_plan([layer], sources, PLACE, held=held(sources, 0))


def test_ranks_that_share_a_template_count_each():
    """Stages of a pipeline do; here both say that they are the first."""
    layer = whole("w", "weight", "F32", (2, 4), (0, 0), (1, 4))
    first = source(0, [layer])
    second = first._replace(rank=1, placement=(1, 0, 0))
    assert stored_tensors([first, second]) == {("weight", "w", "F32", (2, 4)): 8}
    assert held([first, second], 0) == Held(0, {layer: 0})
    alone = whole("w", "weight", "F32", (1, 4), (0, 0), (1, 4))
    sources = [source(0, [alone]), source(0, [alone])._replace(rank=1)]
    shared = [it._replace(template=sources[0].template) for it in sources]
    with pytest.raises(MissingStateError, match="not stored exactly once"):
        read_plan([alone], shared, PLACE, held=held(shared, 0))


@pytest.mark.parametrize("other", [box("w", dtype="BF16"), box("w", 9), matrix((0, 0), (4, 6))])
def test_of_a_tensor_on_which_ranks_do_not_agree_nothing_is_believed(other):
    sources = sources_of([[box("w")], [other]])
    with pytest.raises(MissingStateError, match="in the checkpoint"):
        read_plan([box("w")], sources, PLACE, held=held(sources, 0))


def test_of_a_tensor_of_two_shapes_nothing_is_believed_though_there_is_not_too_much():
    mine = run(box("w"), 0, 4)
    sources = sources_of([[mine], [run(box("w", 9), 4, 8)]])
    assert held(sources, 0) == Held(0, {})
    with pytest.raises(MissingStateError, match="in the checkpoint"):
        read_plan([mine], sources, PLACE, held=held(sources, 0))


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize("field", ["global_shape", "shape", "numel", "byte_offset"])
def test_a_template_that_cannot_be_is_refused_even_if_it_is_what_is_wanted(number, field):
    sound = source(0, [matrix((0, 0), (4, 6))])
    value = number if field in ("numel", "byte_offset") else (number, 6)
    item = msgspec.structs.replace(sound.template.items[0], **{field: value})
    forged = sound._replace(template=msgspec.structs.replace(sound.template, items=(item,)))
    for field_wanted in ({}, {"global_shape": item.global_shape}):
        wanted = msgspec.structs.replace(matrix((0, 0), (4, 6)), **field_wanted)
        result = outcome([wanted], [forged], held([forged], 0))
        assert result == outcome([wanted], [forged])
        assert not isinstance(result, ReadPlan)


@pytest.mark.parametrize("placement", [(), (0,), (0, 0, 0, 0)])
def test_a_placement_of_another_length_is_refused(placement):
    forged = source(0, [matrix((0, 0), (4, 6))])._replace(placement=placement)
    with pytest.raises(CorruptCheckpointError, match="do not fit their template"):
        read_plan([matrix((0, 0), (4, 6))], [forged], PLACE, held=held([forged], 0))
