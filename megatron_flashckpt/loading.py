"""Find the checkpoint to go on from, agree on one source, check coverage, then fill the model.

All ranks call `load` together. Ranks agree on every decision before the first tensor is
overwritten: an error on one rank is raised on all.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch

from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.checkpointer import Checkpointer
from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.layout.coverage import (
    ReadPlan,
    Source,
    read_plan,
    stored_items,
    superfluous,
)
from megatron_flashckpt.layout.manifest import Coordinates, common_name, iteration_dir
from megatron_flashckpt.layout.piece import BUFFER, MASTER, RANK_STATE, WEIGHT, Piece
from megatron_flashckpt.layout.plan import Placement, Template, TemplateItem, pieces_of
from megatron_flashckpt.layout.shard_file import CHUNK_NBYTES, chunk_digest
from megatron_flashckpt.megatron_lm import hyper_parameters, parallel, plain, side_state
from megatron_flashckpt.megatron_lm.dtypes import torch_dtype
from megatron_flashckpt.megatron_lm.model_state import LocalPiece, ModelState
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.restore.checkpoint import StoredCheckpoint, read_manifest
from megatron_flashckpt.restore.exchange import broadcast_object, exchange, gather_objects
from megatron_flashckpt.restore.reader import read_all
from megatron_flashckpt.restore.targets import Targets
from megatron_flashckpt.storage.base import Storage

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """What a load fills, and how strict it is. Equal on all ranks but for the model."""

    chunks: list[Any]
    optimizer: Any
    """None: weights only."""
    strict: bool
    fill: bool = True
    """False: only the side state is wanted."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What came out of a checkpoint beside the tensors, which are filled already."""

    iteration: int
    save_id: str
    source: str
    """`memory` or `storage`."""
    common: dict[str, Any]
    rank_state: dict[str, Any] | None
    """That of the rank which stood where this one stands; None if TP or PP have changed."""
    optimizer: list[dict[str, Any]]
    """Param groups, steps and scaler as `hyper_parameters.load_hyper_parameters` takes them."""
    objects: dict[str, Any]
    """Extra states of modules by global name."""
    read_nbytes: int


@dataclasses.dataclass(frozen=True)
class _Sources:
    """One checkpoint, wherever it is, as far as planning needs to know."""

    place: str
    sources: list[Source]
    coordinates: list[Coordinates]

    @property
    def model_cut(self) -> tuple[int, int, int]:
        """The tensor, pipeline and expert parallel sizes of the saving job."""
        places = self.coordinates
        return (
            max(place.tp for place in places) + 1,
            max(place.pp for place in places) + 1,
            max(place.ep for place in places) + 1,
        )

    def twin(self, mine: Coordinates, model_cut: tuple[int, int, int]) -> int | None:
        """Return the rank whose random state this one takes: the one that stood where it stands.

        If the number of replicas has changed there may be none; then the first one with the same
        part of the model, as Megatron takes it from the first replica. None: the tensor or pipeline
        parallel size has changed, and then random states mean nothing.
        """
        if model_cut[:2] != self.model_cut[:2]:
            return None
        for part in (
            lambda place: place,
            lambda place: (place.tp, place.pp, place.ep),
            lambda place: (place.tp, place.pp),
        ):
            for rank, place in enumerate(self.coordinates):
                if part(place) == part(mine):
                    return rank
        return None

    def representatives(self) -> list[int]:
        """Return one rank per pipeline stage and expert rank: together they know all groups."""
        first: dict[tuple[int, int], int] = {}
        for rank, place in enumerate(self.coordinates):
            first.setdefault((place.pp, place.ep), rank)
        return list(first.values())


@dataclasses.dataclass(frozen=True)
class InMemory:
    """A checkpoint that every rank holds in a slot: this rank's slab and slot of it."""

    slab: Slab
    offer: Offer
    committed: bool
    """Whether every rank's agent saw it committed."""


def newest_in_memory(checkpointer: Checkpointer) -> InMemory | None:
    """Return the newest checkpoint that *all* ranks hold. Collective."""
    slab, offers = together(checkpointer.link.take_slab)
    everyone = gather_objects([msgspec.structs.asdict(offer) for offer in offers])
    held = [{theirs["save_id"]: theirs for theirs in offered} for offered in everyone]
    common = set(held[0]).intersection(*held[1:])
    if not common or slab is None:
        return None
    # Newest iteration; among saves of the same iteration the id decides, alike on all ranks.
    chosen = max(common, key=lambda save_id: (held[0][save_id]["iteration"], save_id))
    mine = next(offer for offer in offers if offer.save_id == chosen)
    return InMemory(slab, mine, all(theirs[chosen]["durable"] for theirs in held))


def load_from_memory(
    request: LoadRequest, state: ModelState, rank: int, found_there: InMemory
) -> Loaded:
    """Fill the model from the slots of all ranks. Collective.

    Raises:
        FlashCkptError: on every rank alike; nothing was overwritten.
    """
    slab, offer = found_there.slab, found_there.offer
    slot = slab.slots[offer.slot]
    own = torch.frombuffer(memoryview(slab.memory), dtype=torch.uint8)[
        slot.data_offset : slot.data_offset + slot.header.data_nbytes
    ]

    def read_meta() -> Any:
        meta = slot.meta
        _verify_slot(own, offer)
        return meta

    meta = together(read_meta)
    place = f"the memory of iteration {offer.iteration}"
    layouts = gather_objects(
        msgspec.msgpack.encode((meta.rank, meta.template.items, meta.placement, meta.coordinates))
    )
    found = _Sources(place, [], [])
    for encoded in layouts:
        theirs = msgspec.msgpack.decode(encoded, type=_Summary)
        found.sources.append(Source(theirs.rank, Template(theirs.items, 0, b""), theirs.placement))
        found.coordinates.append(theirs.coordinates)
    planned = _plan(request, state, found, rank)
    read_nbytes = exchange(own, rank, planned.plan, planned.targets)
    common = broadcast_object(meta.common if rank == 0 else None)
    return _loaded(planned, offer.iteration, offer.save_id, "memory", common, place, read_nbytes)


def load_from_storage(
    request: LoadRequest,
    state: ModelState,
    rank: int,
    storage: Storage,
    iteration: int,
    threads: int,
) -> Loaded:
    """Fill the model from a committed checkpoint. Collective.

    The manifest is read once, by rank 0; each rank reads the bytes that it needs.

    Raises:
        FlashCkptError: on every rank alike. Nothing was overwritten unless bytes turned out to be
            corrupt while reading; on disk nothing was changed.
    """
    encoded = broadcast_object(
        together(lambda: read_manifest(storage, iteration) if rank == 0 else b"")
    )
    stored = together(lambda: StoredCheckpoint(storage, iteration, encoded))
    found = _Sources(
        stored.place, stored.sources(), [shard.coordinates for shard in stored.manifest.shards]
    )
    planned = _plan(request, state, found, rank)
    for index in planned.plan.padded:
        planned.targets.zero(index)
    read_nbytes = together(
        lambda: read_all(stored, planned.plan, planned.pieces, planned.targets, threads)
    )
    common = broadcast_object(together(lambda: stored.common() if rank == 0 else b""))
    return _loaded(
        planned, iteration, stored.manifest.save_id, "storage", common, stored.place, read_nbytes
    )


class _Summary(msgspec.Struct, array_like=True):
    """What a rank tells the others of its slot."""

    rank: int
    items: tuple[TemplateItem, ...]
    placement: Placement
    coordinates: Coordinates


@dataclasses.dataclass(frozen=True)
class _Planned:
    plan: ReadPlan
    pieces: list[Piece]
    targets: Targets
    twin: int | None
    model_cut_changed: bool
    rank_states: dict[int, torch.Tensor]
    """By source rank."""


def _plan(request: LoadRequest, state: ModelState, found: _Sources, rank: int) -> _Planned:
    """Return the reads of this rank, coverage checked. Collective.

    Raises:
        MissingStateError: on every rank; lists all differences, nothing was overwritten.
    """
    optimizer_kinds = {
        item.kind: torch_dtype(item.dtype)
        for item in stored_items(found.sources)
        if item.kind not in (WEIGHT, MASTER, BUFFER, RANK_STATE)
    }

    def enumerate_wanted() -> list[LocalPiece]:
        if not request.fill:
            return []
        return state.wanted(request.chunks, request.optimizer, optimizer_kinds)

    wanted = together(enumerate_wanted)
    kinds = {WEIGHT, BUFFER} if request.fill else set()
    if request.fill and request.optimizer is not None:
        kinds |= {MASTER, *optimizer_kinds}
    unwanted = set.intersection(
        *gather_objects(superfluous([local.piece for local in wanted], found.sources, kinds))
    )
    if not request.strict:
        known = {(item.kind, item.key) for item in stored_items(found.sources)}
        wanted = [local for local in wanted if (local.piece.kind, local.piece.key) in known]
        unwanted = set()
    cut = parallel.model_cut()
    twin = found.twin(parallel.coordinates(), cut)
    changed = cut != found.model_cut
    needed = set() if twin is None else {twin}
    if changed and rank == 0:
        needed |= set(found.representatives())
    rank_states = {source: piece for source in needed if (piece := _rank_state(found, source))}
    framed = {source: _bytes_for(piece) for source, piece in rank_states.items()}
    pieces = [local.piece for local in wanted] + list(rank_states.values())
    tensors = [local.tensor for local in wanted] + list(framed.values())
    resizable = {n for n, local in enumerate(wanted) if local.resizable}
    plan = together(lambda: read_plan(pieces, found.sources, found.place, unwanted, resizable))
    return _Planned(plan, pieces, Targets(pieces, tensors), twin, changed, framed)


def _rank_state(found: _Sources, rank: int) -> Piece | None:
    source = found.sources[rank]
    for piece in pieces_of(source.template, source.placement):
        if piece.kind == RANK_STATE:
            return piece
    return None


def _bytes_for(piece: Piece) -> torch.Tensor:
    return torch.empty(piece.nbytes, dtype=torch.uint8)


def _loaded(
    planned: _Planned,
    iteration: int,
    save_id: str,
    source: str,
    common: bytes,
    place: str,
    read_nbytes: int,
) -> Loaded:
    def decode() -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
        return plain.decode(common, f"{place}/{common_name(save_id)}"), {
            rank: side_state.unframe(framed.numpy().tobytes(), place)
            for rank, framed in planned.rank_states.items()
        }

    said, rank_states = together(decode)
    own = None if planned.twin is None else rank_states.get(planned.twin)
    if planned.model_cut_changed:
        optimizer, objects = broadcast_object(_merged(list(rank_states.values())))
    else:
        optimizer, objects = (own["optimizer"], own["objects"]) if own else ([], {})
    return Loaded(iteration, save_id, source, said, own, optimizer, objects, read_nbytes)


def _merged(rank_states: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    objects: dict[str, Any] = {}
    for state in rank_states:
        objects.update(state["objects"])
    return hyper_parameters.merge([state["optimizer"] for state in rank_states]), objects


def _verify_slot(own: torch.Tensor, offer: Offer) -> None:
    """Check the slot against the digests that were taken when it was persisted, if it was."""
    for chunk, expected in enumerate(offer.digests or ()):
        start = chunk * CHUNK_NBYTES
        found = chunk_digest(own[start : start + CHUNK_NBYTES].numpy().data)
        if found != expected:
            raise FlashCkptError(
                f"slot of {iteration_dir(offer.iteration)}, chunk {chunk}: digest {found}, "
                f"expected {expected}; host memory changed after it was written to storage"
            )


def together(work: Callable[[], _T]) -> _T:
    """Return `work()`, or raise on all ranks if it raised on any. Collective.

    Raises:
        FlashCkptError: the error of the lowest rank that has one, with its rank.
    """
    result: _T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as failure:  # whatever it is: the other ranks are about to wait for us
        error = failure
    errors = gather_objects(None if error is None else (type(error).__name__, str(error)))
    failed = [(rank, said) for rank, said in enumerate(errors) if said is not None]
    if error is not None:
        raise error
    if failed:
        rank, (kind, message) = failed[0]
        raise FlashCkptError(f"rank {rank}: {kind}: {message}")
    return result  # type: ignore[return-value]
