"""A checkpoint that the ranks that saved it hold in their slots, as the source of a load.

Each of these ranks opens its own slot, and all ranks gather the descriptions of all slots. A rank
also reads the slots of the other ranks of its node, which the agent lends. Bytes that a rank needs
from slots of other nodes are exchanged over the process group (`rank_exchange`). A rank that the
saving job did not have holds no slot, and only receives.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from typing import NamedTuple

import msgspec
import torch

from megatron_flashckpt.collectives import (
    exchange_blobs,
    run_and_gather,
    run_on_rank_0,
    this_rank,
    world_size,
)
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import MissingStateError
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.layout.template import Placement, Source, Template, TemplateItem
from megatron_flashckpt.load.checkpoint_source import Origin, ReadReport
from megatron_flashckpt.load.chunk_reader import ChunkReader, reader_threads
from megatron_flashckpt.load.memory_checkpoints import MemoryCheckpoint
from megatron_flashckpt.load.plan import LoadPlan
from megatron_flashckpt.load.rank_exchange import buffers_nbytes, exchange
from megatron_flashckpt.load.saved_job import SavedJob
from megatron_flashckpt.load.slot_chunks import LentSlot, NodeSlots, OfferedSlot
from megatron_flashckpt.load.straight_copies import StraightCopies
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.save.gc_pause import gc_paused

#: Default upper bound of threads per rank. One thread digests 9 GB/s; a GPU copies 54 GB/s.
_MOST_THREADS = 8


@dataclasses.dataclass(frozen=True)
class MemorySource:
    """See `checkpoint_source.CheckpointSource`."""

    slot: OfferedSlot | None
    """The slot of this rank; None if the saving job did not have this rank."""
    checkpoint: MemoryCheckpoint
    neighbours: frozenset[int]
    """The other ranks that seem to run on this node."""
    threads: int
    origin: Origin
    job: SavedJob
    common_state: bytes
    saved_by: int
    """Number of ranks that saved the checkpoint, which may be more than this job has."""
    reads_alone: bool
    """True if every rank has the same coordinates as when the checkpoint was saved."""

    def open(self, plan: LoadPlan) -> ChunkReader:
        gpu = plan.targets.gpu
        own = {} if self.slot is None else {this_rank(): self.slot}
        slots = NodeSlots({**own, **self._lent(plan)})
        straight = None if gpu is None else StraightCopies(slots, plan.targets, gpu)
        return ChunkReader(slots, self.threads, gpu, straight)

    def _lent(self, plan: LoadPlan) -> dict[int, LentSlot]:
        """Return the slots of this node, by rank, that the plan reads in addition to its own."""
        wanted = self.neighbours & plan.reads.reads.keys()
        lent = {rank: self.checkpoint.lend(rank) for rank in sorted(wanted)}
        return {rank: LentSlot(*slot, rank) for rank, slot in lent.items() if slot is not None}

    def fill(self, plan: LoadPlan, reader: ChunkReader) -> ReadReport:
        started = time.perf_counter()
        assert isinstance(reader.source, NodeSlots)
        readable = reader.source.by_rank.keys()
        own = torch.empty(0, dtype=torch.uint8) if self.slot is None else self.slot.data
        received_nbytes = exchange(
            reader, own, this_rank(), plan.reads, plan.pieces, plan.targets, readable
        )
        held = (plan.reads.reads.get(rank, ()) for rank in readable)
        return ReadReport(
            received_nbytes=received_nbytes,
            held_nbytes=sum(read.nbytes for reads in held for read in reads),
            seconds=time.perf_counter() - started,
            memory_nbytes=buffers_nbytes() + reader.nbytes,
        )

    def check_whole(self) -> None:
        """Check that no rank of the saving job is missing. See `checkpoint_source`.

        Agents offer only slots that hold a complete staged save.

        Raises:
            MissingStateError: this job has fewer ranks than the saving job; on all ranks.
        """
        ranks, saved_by = world_size(), self.saved_by
        if saved_by > ranks:
            raise MissingStateError(
                f"{self.job.place}: was saved by {saved_by} ranks, and this job has {ranks}, so it "
                "lacks the parts of the others; start the job with as many ranks, or set "
                "'restore_from_memory: false' to resume from storage"
            )


@gc_paused()
def open_memory(checkpoint: MemoryCheckpoint, config: Config) -> MemorySource:
    """Open the checkpoint that the slots of all ranks hold. Collective.

    Raises:
        FlashCkptError: a slot differs from its agent's offer; on every rank.
    """
    offer = checkpoint.offer
    (slot, items), reports = run_and_gather(lambda: _described(checkpoint))
    descriptions = [report.slot for report in reports if report.slot is not None]
    templates = _templates(descriptions, None if slot is None else (slot.meta.template, items))
    job = SavedJob(
        f"the memory of iteration {offer.iteration}",
        [
            Source(number, templates[description.fingerprint], description.placement)
            for number, description in enumerate(descriptions)
        ],
        [description.saved_at for description in descriptions],
    )
    host = reports[this_rank()].host
    neighbours = {n for n, report in enumerate(reports) if report.slot and report.host == host}
    common_state, saved_by = run_on_rank_0(lambda: _common(slot))
    return MemorySource(
        slot,
        checkpoint,
        frozenset(neighbours - {this_rank()}),
        reader_threads(config, _MOST_THREADS),
        Origin(offer.iteration, offer.save_id, "memory", checkpoint.ancestors),
        job,
        common_state,
        saved_by,
        job.is_same([report.now_at for report in reports], parallel.model_sizes()),
    )


def _common(slot: OfferedSlot | None) -> tuple[bytes, int]:
    assert slot is not None, "rank 0 is a rank of every job"
    return slot.meta.common, slot.meta.world_size


class _Description(NamedTuple):
    """Contents of one rank's slot, for the other ranks."""

    fingerprint: str
    """Fingerprint of the template."""
    items_nbytes: int
    """Bytes of the template's encoded items."""
    placement: Placement
    saved_at: Coordinates
    """Coordinates of the rank at the time of the save."""


class _Report(NamedTuple):
    """One rank of this job, for the other ranks."""

    slot: _Description | None
    """None if the saving job did not have this rank."""
    now_at: Coordinates
    host: str
    """Name of the rank's host. Containers may share a name; their agents know only their ranks."""


def _described(
    checkpoint: MemoryCheckpoint,
) -> tuple[tuple[OfferedSlot | None, bytes], _Report]:
    """Return this rank's slot with its template's encoded items, and the report to gather."""
    now_at, host = parallel.coordinates(), platform.node()
    if checkpoint.slab is None:
        return (None, b""), _Report(None, now_at, host)
    slot = OfferedSlot(checkpoint.slab, checkpoint.offer, this_rank(), checkpoint.is_pinned)
    meta = slot.meta
    items = msgspec.msgpack.encode(meta.template.items)
    description = _Description(
        meta.template_fingerprint,
        len(items),
        meta.placement,
        meta.coordinates,
    )
    return (slot, items), _Report(description, now_at, host)


_ITEMS = msgspec.msgpack.Decoder(tuple[TemplateItem, ...])


def _templates(
    descriptions: list[_Description], own: tuple[Template, bytes] | None
) -> dict[str, Template]:
    """Return the templates of all ranks by fingerprint. Collective.

    The first rank with a template sends it. All templates travel together, so their number does not
    change the number of collectives. If all ranks have the same template, none is sent.

    Args:
        descriptions: of the slots of all ranks that have one, which are the first ranks.
        own: this rank's template, and its encoded items; None if this rank has no slot.
    """
    senders: dict[str, int] = {}
    for number, description in enumerate(descriptions):
        senders.setdefault(description.fingerprint, number)
    templates: dict[str, Template] = {}
    items: dict[int, bytes] = {}
    if own is not None:
        templates[descriptions[this_rank()].fingerprint] = own[0]
        items = {n: own[1] for n, rank in enumerate(senders.values()) if rank == this_rank()}
    if len(senders) == 1 and len(descriptions) == world_size():
        return templates
    lengths = [descriptions[sender].items_nbytes for sender in senders.values()]
    blobs = memoryview(exchange_blobs(lengths, items))
    for fingerprint, length in zip(senders, lengths, strict=True):
        if fingerprint not in templates:
            received = _ITEMS.decode(blobs[:length])
            templates[fingerprint] = Template(received, 0, b"")
        blobs = blobs[length:]
    return templates
