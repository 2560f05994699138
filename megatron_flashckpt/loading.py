"""Find the checkpoint to go on from, agree on one source, check coverage, then fill the model.

All ranks call `load` together. Ranks agree on every decision before the first tensor is
overwritten: an error on one rank is raised on all.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from megatron_flashckpt.agent.offers import common_saves, lacking_ranks, newest_saves
from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.checkpointer import Checkpointer
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import MissingStateError
from megatron_flashckpt.faults import reach
from megatron_flashckpt.held_slot import HeldSlot
from megatron_flashckpt.layout.names import common_name
from megatron_flashckpt.layout.plan import Placement, Source, Template, TemplateItem
from megatron_flashckpt.layout.records import Coordinates
from megatron_flashckpt.layout.shard_file import CHUNK_NBYTES
from megatron_flashckpt.load_plan import LoadPlan, LoadRequest, plan_load
from megatron_flashckpt.load_side_state import SideState, load_side_state
from megatron_flashckpt.megatron_lm import hyper_parameters, parallel, plain, side_state
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.memory.collector import held_off
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.restore.checkpoint import StoredCheckpoint, read_manifest
from megatron_flashckpt.restore.collectives import broadcast_object, gather_objects, together
from megatron_flashckpt.restore.exchange import ROUND_NBYTES, exchange
from megatron_flashckpt.restore.reader import ChunkReader, chunk_reads
from megatron_flashckpt.restore.replicas import ReadReport, Sharing, read_with_replicas
from megatron_flashckpt.saved_job import SavedJob
from megatron_flashckpt.storage.base import Storage

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Which checkpoint it is."""

    iteration: int
    save_id: str
    source: str
    """`memory` or `storage`."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What came out of a checkpoint beside the tensors, which are filled already."""

    origin: Origin
    common: dict[str, Any]
    side: SideState
    report: ReadReport


@dataclasses.dataclass(frozen=True)
class InMemory:
    """A checkpoint that every rank holds in a slot: this rank's slab and slot of it."""

    slab: Slab
    offer: Offer
    committed: int
    """Iteration of the newest checkpoint that was committed, as far as agents know; -1: of none."""


def held_in_memory(checkpointer: Checkpointer) -> list[InMemory]:
    """Return the checkpoints that *all* ranks hold, newest first. Collective.

    With `redundancy`, ranks whose node was lost first get back what the others still hold of them.
    """
    link, config = checkpointer.link, checkpointer.config
    if config.redundancy != "none":
        checkpointer.start_run()
    slab, offers = together(link.take_slab)
    reach("load.taken")
    everyone = _gather_offers(offers)
    newest = newest_saves(everyone, config.slots)
    lacking = lacking_ranks(everyone, newest)
    if config.redundancy != "none" and newest and lacking:

        def recovered() -> tuple[Slab | None, tuple[Offer, ...]]:
            if checkpointer.rank in lacking:
                link.recover(newest)
                return link.take_slab()
            return slab, offers

        slab, offers = together(recovered)
        everyone = _gather_offers(offers)
    if slab is None:
        return []
    mine = {offer.save_id: offer for offer in offers}
    return [
        InMemory(slab, mine[theirs[0]["save_id"]], _committed(theirs))
        for theirs in common_saves(everyone)
    ]


def _committed(offers: list[dict[str, Any]]) -> int:
    """Return the newest iteration known to be committed, by the offers of one save of all ranks.

    The agent of rank 0 knows, because it moves the tracker. If it is gone, the others know of this
    very save; but not ranks that got it from other nodes.
    """
    durable = all(offer["durable"] or offer["recovered"] for offer in offers)
    return int(max(offers[0]["committed"], offers[0]["iteration"] if durable else -1))


def _gather_offers(offers: tuple[Offer, ...]) -> list[list[dict[str, Any]]]:
    return gather_objects([msgspec.structs.asdict(offer) for offer in offers])


@held_off()
def load_from_memory(
    request: LoadRequest, state: ModelState, rank: int, found_there: InMemory, threads: int
) -> Loaded:
    """Fill the model from the slots of all ranks, with `threads` threads. Collective.

    Raises:
        FlashCkptError: on every rank alike. Nothing was overwritten unless bytes turned out to have
            changed while they were read.
    """
    offer = found_there.offer
    held = together(lambda: HeldSlot(found_there.slab, offer, rank))
    meta = held.meta
    place = f"the memory of iteration {offer.iteration}"
    layouts = gather_objects(
        msgspec.msgpack.encode((meta.rank, meta.template.items, meta.placement, meta.coordinates))
    )
    found = SavedJob(place, [], [])
    for encoded in layouts:
        theirs = msgspec.msgpack.decode(encoded, type=_Summary)
        found.sources.append(Source(theirs.rank, Template(theirs.items, 0, b""), theirs.placement))
        found.coordinates.append(theirs.coordinates)

    def fill(plan: LoadPlan) -> ReadReport:
        started = time.perf_counter()
        with ChunkReader(held, threads) as reader:
            received = exchange(reader, held.data, rank, plan.reads, plan.pieces, plan.targets)
        seconds = time.perf_counter() - started
        return ReadReport(0, received, seconds, 2 * ROUND_NBYTES + reader.nbytes)

    return _load(
        request,
        state,
        rank,
        found,
        fill,
        lambda: meta.common,
        Origin(offer.iteration, offer.save_id, "memory"),
    )


@held_off()
def load_from_storage(
    request: LoadRequest,
    state: ModelState,
    rank: int,
    storage: Storage,
    iteration: int,
    config: Config,
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
    # In the same layout a rank reads its own shard: the disk can begin while all plan.
    threading.Thread(target=stored.prefetch, args=(rank,), daemon=True).start()
    found = SavedJob(
        stored.place, stored.sources(), [shard.coordinates for shard in stored.manifest.shards]
    )
    try:
        return _load(
            request,
            state,
            rank,
            found,
            lambda plan: together(lambda: _read(stored, plan, config)),
            stored.common,
            Origin(iteration, stored.manifest.save_id, "storage"),
        )
    except MissingStateError:
        # Either this model wants something else, or the checkpoint is not whole itself.
        together(lambda: stored.check_whole() if rank == 0 else None)
        raise


def _read(stored: StoredCheckpoint, plan: LoadPlan, config: Config) -> ReadReport:
    memory = config.read_memory_mib * 2**20
    threads = max(1, min(config.read_threads, memory // 2 // CHUNK_NBYTES))
    with ChunkReader(stored, threads) as reader:
        group = parallel.data_parallel_group()
        sharing = Sharing(group, config.share_reads, memory - reader.nbytes)
        chunks = chunk_reads(plan.reads, plan.pieces)
        return read_with_replicas(reader, chunks, plan.targets, sharing)


def _load(
    request: LoadRequest,
    state: ModelState,
    rank: int,
    found: SavedJob,
    fill: Callable[[LoadPlan], ReadReport],
    common: Callable[[], bytes],
    origin: Origin,
) -> Loaded:
    """Check and read everything, tensors last, wherever it is. Collective.

    Args:
        fill: carries out a plan, on all ranks together.
        common: returns the bytes of the common state; called on rank 0.
    """
    name = f"{found.place}/{common_name(origin.save_id)}"
    encoded = broadcast_object(together(lambda: common() if rank == 0 else b""))
    said = together(lambda: plain.decode_dict(encoded, name, side_state.COMMON_STATE))
    side = load_side_state(found, rank, fill)
    if request.fill and request.optimizer is not None and not side.optimizer:
        raise MissingStateError(
            f"{found.place}: has no optimizer state (it was saved with --no-save-optim, or without "
            "an optimizer); load it with --no-load-optim or --finetune; nothing was loaded"
        )
    plan = plan_load(request, state, found, rank)
    if request.fill and request.optimizer is not None:
        together(lambda: hyper_parameters.check(request.optimizer, side.optimizer))
    together(lambda: refuse_mixture(request, plan, found.place))
    request.overwritten.update(plan.names)
    reach("load.planned")
    plan.zero_padding()
    report = fill(plan)
    reach("load.filled")
    return Loaded(origin, said, side, report)


def refuse_mixture(request: LoadRequest, plan: LoadPlan, place: str) -> None:
    """Raise if something of a damaged checkpoint, loaded in part before, would stay."""
    stay = sorted(f"{kind}/{key}" for kind, key in request.overwritten - plan.names)
    if stay:
        raise MissingStateError(
            f"{place}: lacks {', '.join(stay)}, which a damaged checkpoint has overwritten "
            "already; start again with --ckpt-step for this iteration"
        )


class _Summary(msgspec.Struct, array_like=True):
    """What a rank tells the others of its slot."""

    rank: int
    items: tuple[TemplateItem, ...]
    placement: Placement
    coordinates: Coordinates
