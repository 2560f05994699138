"""Find the checkpoint to go on from, agree on one source, check coverage, then fill the model.

All ranks call `load` together. Ranks agree on every decision before the first tensor is
overwritten: an error on one rank is raised on all.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, read_manifest
from megatron_flashckpt.collectives import exchange_blobs, from_first, gathered, together
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import MissingStateError, UnsupportedError
from megatron_flashckpt.failpoints import reach
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.file_format.file_names import common_name
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.layout.copies import CopySum, compared
from megatron_flashckpt.layout.piece import WEIGHT
from megatron_flashckpt.layout.template import Placement, Source, Template, TemplateItem
from megatron_flashckpt.load.chunk_reader import ChunkReader, chunk_reads, read_all
from megatron_flashckpt.load.memory_checkpoints import InMemory
from megatron_flashckpt.load.plan import LoadPlan, LoadRequest, Names, StoredStates, plan_load
from megatron_flashckpt.load.rank_exchange import buffers_nbytes, exchange
from megatron_flashckpt.load.replica_sharing import ReadReport, Sharing, read_with_replicas
from megatron_flashckpt.load.side_state import SideReads, SideState
from megatron_flashckpt.load.slot_source import HeldSlot
from megatron_flashckpt.load.source_job import SavedJob
from megatron_flashckpt.megatron_lm import hyper_parameters, parallel, side_state, side_state_codec
from megatron_flashckpt.megatron_lm.accounting import unquantizable
from megatron_flashckpt.megatron_lm.cutting import LocalPiece
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.save.gc_pause import held_off
from megatron_flashckpt.storage.base import Storage

logger = logging.getLogger(__name__)

#: More do not make a rank read faster from most storages, unless they are asked for.
_MOST_THREADS = 4


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
class _Supply:
    """Where the bytes of a checkpoint come from."""

    common: bytes
    """The encoded common state."""
    open: Callable[[LoadPlan], ChunkReader]
    """Makes buffers and threads, for which a rank may have no memory. Without the others."""
    fill: Callable[[LoadPlan, ChunkReader], ReadReport]
    """Carries out a plan, on all ranks together, when all of them have what `open` makes."""
    alone: Callable[[LoadPlan], object] | None
    """Carries out a plan of side states without the others; None: they take part."""


@held_off()
def load_from_memory(
    request: LoadRequest, state: ModelState, rank: int, found_there: InMemory, config: Config
) -> Loaded:
    """Fill the model from the slots of all ranks. Collective.

    Raises:
        FlashCkptError: on every rank alike. Nothing was overwritten unless bytes turned out to have
            changed while they were read.
    """
    offer = found_there.offer
    threads = _threads(config)

    def described() -> tuple[tuple[HeldSlot, bytes], _Summary]:
        held = HeldSlot(found_there.slab, offer, rank)
        meta = held.meta
        encoded = msgspec.msgpack.encode(meta.template.items)
        places = (meta.coordinates, parallel.coordinates())
        summary = _Summary(
            meta.template_fingerprint,
            len(encoded),
            meta.placement,
            *places,
            meta.differing,
            meta.sums,
        )
        return (held, encoded), summary

    (held, encoded), everyone = gathered(described)
    templates = _templates(everyone, rank, held.meta.template, encoded)
    found = SavedJob(
        f"the memory of iteration {offer.iteration}",
        [
            Source(number, templates[it.fingerprint], it.placement)
            for number, it in enumerate(everyone)
        ],
        [it.coordinates for it in everyone],
        compared(everyone)[0],
    )

    def fill(plan: LoadPlan, reader: ChunkReader) -> ReadReport:
        started = time.perf_counter()
        received = exchange(reader, held.data, rank, plan.reads, plan.pieces, plan.targets)
        held_nbytes = sum(read.nbytes for read in plan.reads.reads.get(rank, ()))
        return ReadReport(
            received_nbytes=received,
            held_nbytes=held_nbytes,
            seconds=time.perf_counter() - started,
            memory_nbytes=buffers_nbytes() + reader.nbytes,
        )

    def alone(plan: LoadPlan) -> None:
        read_all(held, plan.reads, plan.pieces, plan.targets, threads, plan.targets.gpu)

    common = from_first(lambda: held.meta.common)
    is_same = found.is_same([it.stands for it in everyone], parallel.model_cut())
    supply = _Supply(
        common,
        lambda plan: ChunkReader(held, threads, plan.targets.gpu),
        fill,
        alone if is_same else None,
    )
    origin = Origin(offer.iteration, offer.save_id, "memory")
    return _load(request, state, rank, found, supply, origin)


class _Summary(NamedTuple):
    """What a rank tells the others of its slot."""

    fingerprint: str
    items_nbytes: int
    """Bytes of the encoded items of its template."""
    placement: Placement
    coordinates: Coordinates
    """Where it stood when it saved."""
    stands: Coordinates
    differing: tuple[str, ...]
    sums: tuple[CopySum, ...] | None


def _templates(
    everyone: list[_Summary], rank: int, mine: Template, encoded: bytes
) -> dict[str, Template]:
    """Return the templates of all ranks by fingerprint. Collective.

    The first rank with a template sends it. All templates travel together, so how many there are
    does not change the number of collectives; ranks that all have the same template need none.

    Args:
        mine, encoded: this rank's template, and the items of it.
    """
    first: dict[str, int] = {}
    for number, summary in enumerate(everyone):
        first.setdefault(summary.fingerprint, number)
    templates = {everyone[rank].fingerprint: mine}
    if len(first) == 1:
        return templates
    lengths = [everyone[number].items_nbytes for number in first.values()]
    sent = {n: encoded for n, number in enumerate(first.values()) if number == rank}
    blobs = memoryview(exchange_blobs(lengths, sent))
    for fingerprint, length in zip(first, lengths, strict=True):
        if fingerprint not in templates:
            items = msgspec.msgpack.decode(blobs[:length], type=tuple[TemplateItem, ...])
            templates[fingerprint] = Template(items, 0, b"")
        blobs = blobs[length:]
    return templates


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

    def read() -> tuple[bytes, bytes]:
        encoded = read_manifest(storage, iteration)
        return encoded, StoredCheckpoint(storage, iteration, encoded).common()

    encoded, common = from_first(read)

    def decoded() -> tuple[StoredCheckpoint, SavedJob]:
        stored = StoredCheckpoint(storage, iteration, encoded)
        coordinates = [shard.coordinates for shard in stored.manifest.shards]
        differing = frozenset(stored.manifest.differing)
        return stored, SavedJob(stored.place, stored.sources(), coordinates, differing)

    stored, found = together(decoded)
    supply = _Supply(
        common,
        lambda plan: ChunkReader(stored, _threads(config), plan.targets.gpu),
        lambda plan, reader: together(lambda: _read(reader, plan, config)),
        lambda plan: read_all(stored, plan.reads, plan.pieces, plan.targets, 1, plan.targets.gpu),
    )
    origin = Origin(iteration, stored.manifest.save_id, "storage")
    try:
        return _load(request, state, rank, found, supply, origin)
    except MissingStateError:
        # Either this model wants something else, or the checkpoint is not whole itself.
        together(lambda: stored.check_whole() if rank == 0 else None)
        raise


def _read(reader: ChunkReader, plan: LoadPlan, config: Config) -> ReadReport:
    memory = config.read_memory_mib * 2**20
    sharing = Sharing(parallel.data_parallel_group(), config.share_reads, memory - reader.nbytes)
    chunks = chunk_reads(plan.reads, plan.pieces)
    return read_with_replicas(reader, chunks, plan.targets, sharing)


def _threads(config: Config) -> int:
    """Return how many chunks this rank reads at the same time."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // ranks)
    # One rank on two cores loads with two threads in 0.72 to 0.95 of the time of one, for a quarter
    # more CPU time, which nobody else wants meanwhile. Two threads of one core gain nothing.
    wanted = config.read_threads or min(cores, _MOST_THREADS)
    return max(1, min(wanted, config.read_memory_mib * 2**20 // 2 // CHUNK_NBYTES))


def _load(
    request: LoadRequest,
    state: ModelState,
    rank: int,
    found: SavedJob,
    supply: _Supply,
    origin: Origin,
) -> Loaded:
    """Check and read everything, tensors last, wherever it is. Collective."""
    common, side, states = _side(request, state, rank, found, supply, origin)
    if request.fill and request.optimizer is not None and not side.optimizer:
        raise MissingStateError(
            f"{found.place}: has no optimizer state (it was saved with --no-save-optim, or without "
            "an optimizer); load it with --no-load-optim or --finetune; nothing was loaded"
        )

    def wanted() -> list[LocalPiece]:
        if not request.fill:
            return []
        refuse_unmastered(request, found.place)
        dtype_of = StoredStates(found).dtype_of
        return state.wanted(request.chunks, request.optimizer, states, dtype_of)

    def check(names: Names) -> None:
        if request.fill and request.optimizer is not None:
            geometry = state.geometry(request.chunks)
            hyper_parameters.check(request.optimizer, side.optimizer, geometry)
        refuse_mixture(request, names, found.place)

    def unread() -> Names:
        if not request.fill:
            return set()
        return {(WEIGHT, key) for key in state.geometry(request.chunks).quantized_keys}

    plan = plan_load(request, wanted, found, rank, check, unread)
    request.overwritten.update(plan.names)
    reach("load.planned")

    def opened() -> ChunkReader:
        plan.zero_padding()
        return supply.open(plan)

    with together(opened) as reader:
        report = supply.fill(plan, reader)
    together(plan.finish)
    reach("load.filled")
    # The next save has all copies of these at once.
    state.differing_keys |= found.differing
    return Loaded(origin, common, side, report)


def _side(
    request: LoadRequest,
    state: ModelState,
    rank: int,
    found: SavedJob,
    supply: _Supply,
    origin: Origin,
) -> tuple[dict[str, Any], SideState, dict[str, dict[str, torch.dtype]]]:
    """Return the common state, this rank's side state, and the optimizer's states by family.

    Collective. What any rank finds counts for all: no state that is missing for a whole rank goes
    unnoticed.
    """
    fetched: SideReads | None = None
    if supply.alone is None:

        def opened() -> tuple[SideReads, ChunkReader]:
            reads = SideReads(found, rank)
            return reads, supply.open(reads.plan)

        fetched, reader = together(opened)
        with reader:
            supply.fill(fetched.plan, reader)

    def look() -> tuple[Any, Any]:
        name = f"{found.place}/{common_name(origin.save_id)}"
        common = side_state_codec.decode_dict(supply.common, name, side_state.COMMON_STATE)
        reads = fetched
        if reads is None:
            reads = SideReads(found, rank)
            assert supply.alone is not None
            supply.alone(reads.plan)
        own, dealt = reads.states()
        states = {}
        if request.fill:
            stored = StoredStates(found).by_key
            states = state.states_of(request.chunks, request.optimizer, stored)
        return (common, reads, own), (dealt, states)

    (common, reads, own), everyone = gathered(look)
    side = reads.merged(own, [dealt for dealt, _ in everyone])
    states: dict[str, dict[str, torch.dtype]] = defaultdict(dict)
    for _, theirs in everyone:
        for family, kinds in theirs.items():
            states[family].update(kinds)
    return common, side, states


def refuse_unmastered(request: LoadRequest, place: str) -> None:
    """Raise if this rank has FP8 or FP4 weights whose masters this load would not read."""
    lines = unquantizable(request.chunks, request.optimizer)
    if lines:
        raise UnsupportedError(
            f"{place}: {'; '.join(lines)}. A load makes such weights of their masters, so it needs "
            "the optimizer (no --finetune, no --no-load-optim); or load the checkpoint without "
            "--fp8-param-gather and --fp4-param-gather. Nothing was loaded"
        )


def refuse_mixture(request: LoadRequest, names: Names, place: str) -> None:
    """Raise if something of a damaged checkpoint, loaded in part before, would stay."""
    stay = sorted(f"{kind}/{key}" for kind, key in request.overwritten - names)
    if stay:
        raise MissingStateError(
            f"{place}: lacks {', '.join(stay)}, which a damaged checkpoint has overwritten "
            "already; start again with --ckpt-step for this iteration"
        )
