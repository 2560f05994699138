"""Read plans with the exact-match shortcut: the same plans and errors as with a full search.

A rank first takes the pieces that it finds in the shard of the rank at the same coordinates, and
searches the other shards only for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_flashckpt.errors import CorruptCheckpointError, MissingStateError
from megatron_flashckpt.layout.exact_match import (
    NOTHING_STORED,
    StoredPieces,
    pieces_stored_once,
    stored_tensors,
)
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import Read, ReadPlan, read_plan
from megatron_flashckpt.layout.reshard import Run
from megatron_flashckpt.layout.template import Source
from tests.layout.test_read_plan import HUGE, PLACE, box, cuts, matrix, tensors_drawn
from tests.support.strategies import in_layout_order
from tests.support.worlds import run, source, sources_of, whole


def held(sources: Sequence[Source], rank: int) -> StoredPieces:
    return pieces_stored_once(sources[rank], stored_tensors(sources))


def outcome(
    wanted: list[Piece], sources: Sequence[Source], short: StoredPieces = NOTHING_STORED
) -> ReadPlan | tuple[type, str]:
    """Return the plan, or the type and text of its error."""
    try:
        return read_plan(wanted, sources, PLACE, held=short)
    except (CorruptCheckpointError, MissingStateError) as error:
        return type(error), str(error)


def refused_by_any(wanted: Sequence[list[Piece]], sources: list[Source], *, short: bool) -> bool:
    """Return whether the load of any rank's `wanted` pieces from `sources` fails."""
    shortcuts = [held(sources, rank) if short else NOTHING_STORED for rank in range(len(wanted))]
    plans = (outcome(pieces, sources, own) for pieces, own in zip(wanted, shortcuts, strict=True))
    return not all(isinstance(plan, ReadPlan) for plan in plans)


def runs_of(stored: list[list[Piece]]) -> st.SearchStrategy[tuple[int, int]]:
    """Return a strategy for a non-empty run, as rank and position."""
    runs = [
        (rank, n) for rank, held in enumerate(stored) for n, part in enumerate(held) if part.numel
    ]
    assume(runs)
    return st.sampled_from(runs)


def test_a_load_in_the_saved_layout_searches_no_other_shard():
    stored = [[box("w"), run(box("v"), 0, 4)], [box("u"), run(box("v"), 4, 8)]]
    sources = sources_of(stored)
    for rank, wanted in enumerate(stored):
        plan = read_plan(wanted, [], PLACE, held=held(sources, rank))  # no shards to search
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
def test_a_missing_or_doubled_run_is_refused_by_each_rank_that_wants_it(data, drawn, ranks):
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
        for same_place in range(len(sources)):
            assert outcome(wanted, sources, held(sources, same_place)) == outcome(wanted, sources)
    assert refused_by_any(sound, sources, short=True)


@settings(max_examples=100, deadline=None)
@given(st.data(), tensors_drawn(), st.integers(2, 4))
def test_a_run_that_replaces_another_is_refused_by_some_rank(data, drawn, ranks):
    """The shards then hold some elements twice, and at most as many elements as before."""
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
def test_any_forged_placement_fails_exactly_if_it_fails_a_full_search(data, number):
    """Or all reads lie inside the runs that ranks store."""
    sound = data.draw(cuts([matrix((0, 0), (4, 6))], 2))
    sources = sources_of(sound)
    rank, position = data.draw(runs_of(sound))
    item = sources[rank].template.items[position]
    placement = list(sources[rank].placement)
    placement[item.placed_at + data.draw(st.integers(0, 2))] = number
    sources[rank] = sources[rank]._replace(placement=tuple(placement))
    refused = refused_by_any(sound, sources, short=False)
    assert refused_by_any(sound, sources, short=True) == refused
    for short in (NOTHING_STORED, held(sources, 0)):
        plan = outcome([matrix((0, 0), (4, 6))], sources, short)
        for reader, reads in plan.reads.items() if isinstance(plan, ReadPlan) else ():
            nbytes = sources[reader].template.nbytes
            for read in reads:
                assert 0 <= read.source_offset < read.source_offset + read.nbytes <= nbytes
                assert 0 <= read.stored.start < read.stored.end <= math.prod(read.stored.shape)


def test_a_doubled_piece_serves_only_the_ranks_that_store_it():
    """Layer 1 is frozen, so its moments are not stored. Two ranks store the moments of layer 0."""
    layer = whole("w", "exp_avg", "F32", (2, 4), (0, 0), (1, 4))
    sources = sources_of([[layer], [layer], []])
    for rank in range(2):
        assert read_plan([layer], sources, PLACE, held=held(sources, rank)).reads.keys() == {rank}
    for forged, rank in ((sources, 2), (sources_of([[layer, layer]]), 0)):
        with pytest.raises(MissingStateError, match="not stored exactly once"):
            read_plan([layer], forged, PLACE, held=held(forged, rank))


def test_each_rank_with_a_shared_template_counts():
    """Pipeline stages share templates; here both placements name the first stage."""
    layer = whole("w", "weight", "F32", (2, 4), (0, 0), (1, 4))
    first = source(0, [layer])
    second = first._replace(rank=1, placement=(1, 0, 0))
    assert stored_tensors([first, second]) == {("weight", "w", "F32", (2, 4)): 8}
    assert held([first, second], 0) == StoredPieces(0, {layer: 0})
    alone = whole("w", "weight", "F32", (1, 4), (0, 0), (1, 4))
    sources = [source(0, [alone]), source(0, [alone])._replace(rank=1)]
    shared = [stored._replace(template=sources[0].template) for stored in sources]
    with pytest.raises(MissingStateError, match="not stored exactly once"):
        read_plan([alone], shared, PLACE, held=held(shared, 0))


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize("field", ["global_shape", "shape", "numel", "byte_offset"])
def test_an_impossible_template_is_refused_even_if_it_is_wanted(number, field):
    sound = source(0, [matrix((0, 0), (4, 6))])
    value = number if field in ("numel", "byte_offset") else (number, 6)
    item = msgspec.structs.replace(sound.template.items[0], **{field: value})
    forged = sound._replace(template=msgspec.structs.replace(sound.template, items=(item,)))
    for field_wanted in ({}, {"global_shape": item.global_shape}):
        wanted = msgspec.structs.replace(matrix((0, 0), (4, 6)), **field_wanted)
        result = outcome([wanted], [forged], held([forged], 0))
        assert result == outcome([wanted], [forged])
        assert not isinstance(result, ReadPlan)
