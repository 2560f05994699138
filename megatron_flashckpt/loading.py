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
from megatron_flashckpt.layout.coverage import Read, Source, read_plan, superfluous
from megatron_flashckpt.layout.manifest import Coordinates, common_name, iteration_dir
from megatron_flashckpt.layout.piece import BUFFER, MASTER, RANK_STATE, WEIGHT, Piece
from megatron_flashckpt.layout.plan import Placement, Template, TemplateItem
from megatron_flashckpt.layout.shard_file import CHUNK_NBYTES, chunk_digest
from megatron_flashckpt.megatron_lm import parallel, plain, side_state
from megatron_flashckpt.megatron_lm.dtypes import torch_dtype
from megatron_flashckpt.megatron_lm.model_state import LocalPiece, ModelState
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.restore.checkpoint import StoredCheckpoint, read_manifest
from megatron_flashckpt.restore.exchange import broadcast_object, exchange, gather_objects
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
    """That of the rank which stood at the same coordinates; None if there was none."""
    read_nbytes: int


@dataclasses.dataclass(frozen=True)
class _Sources:
    """One checkpoint, wherever it is, as far as planning needs to know."""

    place: str
    sources: list[Source]
    coordinates: list[Coordinates]

    def twin(self, mine: Coordinates) -> int | None:
        """Return the rank whose side state this one takes: the one that stood where it stands.

        If the number of replicas has changed there may be none; then the first one with the same
        part of the model, as Megatron takes it from the first replica. None: the model was cut
        otherwise.
        """
        for part in (
            lambda place: place,
            lambda place: (place.tp, place.pp, place.ep),
            lambda place: (place.tp, place.pp),
        ):
            for rank, place in enumerate(self.coordinates):
                if part(place) == part(mine):
                    return rank
        return None


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
    # Memory belongs to the same rank of the same job, or the layouts would not match.
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
    planned = _plan(request, state, found, found.twin(parallel.coordinates()))
    read_nbytes = together(lambda: stored.read(planned.plan, planned.targets, threads))
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
    plan: dict[int, list[Read]]
    targets: Targets
    rank_state: torch.Tensor | None


def _plan(request: LoadRequest, state: ModelState, found: _Sources, twin: int | None) -> _Planned:
    """Return the reads of this rank, coverage checked. Collective.

    Raises:
        MissingStateError: on every rank; lists all differences, nothing was overwritten.
    """
    optimizer_kinds = {
        item.kind: torch_dtype(item.dtype)
        for source in found.sources
        for item in source.template.items
        if item.kind not in (WEIGHT, MASTER, BUFFER, RANK_STATE)
    }

    def enumerate_wanted() -> list[LocalPiece]:
        if not request.fill:
            return []
        return state.wanted(request.chunks, request.optimizer, optimizer_kinds)

    wanted = together(enumerate_wanted)
    pieces = [local.piece for local in wanted]
    tensors = [local.tensor for local in wanted]
    kinds = {WEIGHT, BUFFER} if request.fill else set()
    if request.fill and request.optimizer is not None:
        kinds |= {MASTER, *optimizer_kinds}
    unwanted = set.intersection(*gather_objects(superfluous(pieces, found.sources, kinds)))
    if not request.strict:
        known = {(it.kind, it.key) for source in found.sources for it in source.template.items}
        kept = [n for n, piece in enumerate(pieces) if (piece.kind, piece.key) in known]
        pieces, tensors = [pieces[n] for n in kept], [tensors[n] for n in kept]
        unwanted = set()
    rank_state = _rank_state_target(found, twin)
    if rank_state is not None:
        pieces.append(rank_state[0])
        tensors.append(rank_state[1])
    plan = together(lambda: read_plan(pieces, found.sources, found.place, unwanted))
    return _Planned(plan, Targets(tensors), rank_state[1] if rank_state else None)


def _rank_state_target(found: _Sources, twin: int | None) -> tuple[Piece, torch.Tensor] | None:
    if twin is None:
        return None
    source = found.sources[twin]
    for item, there in zip(source.template.items, source.placement, strict=True):
        if item.kind == RANK_STATE:
            piece = Piece(
                item.key,
                item.kind,
                item.dtype,
                item.global_shape,
                there.offset,
                item.shape,
                there.start,
                there.start + item.numel,
            )
            return piece, torch.empty(item.numel, dtype=torch.uint8)
    return None


def _loaded(
    planned: _Planned,
    iteration: int,
    save_id: str,
    source: str,
    common: bytes,
    place: str,
    read_nbytes: int,
) -> Loaded:
    def decode() -> Loaded:
        framed = planned.rank_state
        return Loaded(
            iteration=iteration,
            save_id=save_id,
            source=source,
            common=plain.decode(common, f"{place}/{common_name(save_id)}"),
            rank_state=side_state.unframe(framed.numpy().tobytes(), place)
            if framed is not None
            else None,
            read_nbytes=read_nbytes,
        )

    return together(decode)


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
