"""Choices of a load: whose side state, which copies, no damaged tensors that stay, and the run."""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import pytest

from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.config import Replicated
from megatron_flashckpt.errors import CorruptCheckpointError, MissingStateError
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.layout.copies import CopyPlace, as_copy
from megatron_flashckpt.load import resume, side_state
from megatron_flashckpt.load.load_policy import LoadPolicy
from megatron_flashckpt.load.load_request import LoadRequest, refuse_mixture
from megatron_flashckpt.load.saved_job import SavedJob
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.side_state import frame
from tests.support.worlds import source, sources_of, whole

#: TP1 PP2 DP2 EP2: the expert-parallel group consists of the replicas.
SAVED = [
    Coordinates(pp=0, dp=0, ep=0),
    Coordinates(pp=0, dp=1, ep=1),
    Coordinates(pp=1, dp=0, ep=0),
    Coordinates(pp=1, dp=1, ep=1),
]


@pytest.mark.parametrize(
    ("own", "matching"),
    [
        (Coordinates(pp=1, dp=1, ep=1), 3),
        (Coordinates(pp=1, dp=2, ep=0, edp=1), 2),
        (Coordinates(pp=0, dp=3, ep=1, edp=1), 1),
        (Coordinates(pp=1, dp=2, ep=2), 2),
        (Coordinates(tp=1, pp=0), None),
    ],
)
def test_the_side_state_comes_from_the_same_coordinates_or_the_first_replica(
    own: Coordinates, matching: int | None
) -> None:
    assert SavedJob("the checkpoint", [], SAVED).matching_rank(own, (1, 2, 2)) == matching


SIDE = whole("rank_state", "rank_state", "U8", (2, 5), (1, 0), (1, 5))


def test_the_byte_offset_of_a_side_state_is_found() -> None:
    sources = [source(0, []), source(1, [whole("w", "weight", "F32", (3,), (0,), (3,)), SIDE])]
    job = SavedJob("the checkpoint", sources, [])
    assert job.rank_state(0) is None
    assert job.rank_state(1) == (SIDE, 12)
    assert not job.has_all_side_state


@pytest.mark.parametrize(
    ("fields", "placement"),
    [
        *(({name: number}, (1, 0, 0)) for name, number in (("numel", -1), ("numel", 6))),
        *(({"byte_offset": number}, (1, 0, 0)) for number in (-1, 2**70)),
        ({"shape": (3, 5)}, (1, 0, 0)),
        *(({}, numbers) for numbers in ((2, 0, 0), (-1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, -1))),
    ],
    ids=str,
)
def test_a_side_state_outside_its_tensor_or_file_is_refused(
    fields: dict[str, Any], placement: tuple[int, ...]
) -> None:
    held = source(0, [SIDE])
    item = msgspec.structs.replace(held.template.items[0], **fields)
    forged = held._replace(
        template=msgspec.structs.replace(held.template, items=(item,)), placement=placement
    )
    message = r"^the checkpoint: rank_state/.* lies outside.* on rank 0; load an older iteration"
    with pytest.raises(CorruptCheckpointError, match=message):
        SavedJob("the checkpoint", [forged], []).rank_state(0)


def test_copies_are_found_by_key_and_number_of_their_rank() -> None:
    main = [whole("norm", kind, "F32", (8,), (0,), (8,)) for kind in ("weight", "master")]
    places = [CopyPlace((0, rank), (2, 3)) for rank in (1, 2)]
    ranks = [main, *([as_copy(piece, place) for piece in main] for place in places)]
    job = SavedJob("here", sources_of(ranks), [Coordinates() for _ in ranks])
    assert job.copies == {("norm", place.offset): place for place in places}
    assert SavedJob("here", sources_of(ranks[:1]), [Coordinates()]).copies == {}


def test_layers_that_moved_between_stages_get_their_extra_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sizes are unchanged, but the stage holds layers that another stage held."""
    empty: dict[str, Any] = {"rng": None, "optimizer": [], "rerun": None}
    framed = [frame({**empty, "objects": {f"layer {rank}": rank}}, rank, 2) for rank in range(2)]
    sources = [source(rank, [local.piece]) for rank, local in enumerate(framed)]
    job = SavedJob("the checkpoint", sources, [Coordinates(pp=rank) for rank in range(2)])
    monkeypatch.setattr(parallel, "model_sizes", lambda: (1, 2, 1))
    monkeypatch.setattr(side_state, "world_size", lambda: 2)
    gathered: list[dict[int, Any]] = []
    for rank, local in enumerate(framed):
        monkeypatch.setattr(side_state, "this_rank", lambda rank=rank: rank)
        monkeypatch.setattr(parallel, "coordinates", lambda rank=rank: Coordinates(pp=rank))
        reads = side_state._SideReads(job)
        reads._framed[rank].copy_(local.tensor)
        own, assigned = reads.states()
        assert not reads.lacks(own, [f"layer {rank}"])
        assert reads.lacks(own, ["layer 0", "layer 1"])
        gathered += [assigned, reads.objects]
    assert reads.merged({}, own, gathered).objects == {"layer 0": 0, "layer 1": 1}


def test_an_older_checkpoint_must_hold_every_tensor_a_damaged_load_overwrote() -> None:
    request = LoadRequest(ModelState(Replicated()), [], optimizer=None, policy=LoadPolicy())
    weight, moment = ("weight", "w"), ("exp_avg", "w")
    refuse_mixture(request, set(), "older")
    request.overwritten.update({weight, moment})
    refuse_mixture(request, {moment, weight}, "older")
    with pytest.raises(MissingStateError, match="older: lacks exp_avg/w, which a damaged"):
        refuse_mixture(request, {weight}, "older")


@pytest.mark.parametrize("trains", [True, False])
def test_a_job_that_only_evaluates_opens_no_run(trains: bool) -> None:
    """A job that trains there would be overtaken, and a read-only directory would be an error."""
    call, saves = mock.Mock(), mock.Mock()
    call.job, call.policy = JobState(chunks=[], trains=trains), LoadPolicy()
    resume._open_run(call, saves, Save(10, "000001-aaaa.00001.1"), (), None)
    assert saves.runs.open.called is trains
