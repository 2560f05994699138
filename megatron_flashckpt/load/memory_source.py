"""A checkpoint that all ranks hold in their slots, as the source of a load.

Each rank opens its own slot, and all ranks gather the descriptions of all slots. A rank also reads
the slots of the other ranks of its node, which the agent lends. Bytes that a rank needs from slots
of other nodes are exchanged over the process group (`rank_exchange`).
"""

from __future__ import annotations

import dataclasses
import platform
import time
from typing import NamedTuple

import msgspec

from megatron_flashckpt.collectives import exchange_blobs, run_and_gather, run_on_rank_0, this_rank
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import MissingStateError
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.layout.copies import CopySum, compared
from megatron_flashckpt.layout.template import Placement, Source, Template, TemplateItem
from megatron_flashckpt.load.checkpoint_source import Origin, ReadReport
from megatron_flashckpt.load.chunk_reader import ChunkReader, read_all, reader_threads
from megatron_flashckpt.load.memory_checkpoints import MemoryCheckpoint
from megatron_flashckpt.load.node_slots import LentSlot, NodeSlots
from megatron_flashckpt.load.plan import LoadPlan
from megatron_flashckpt.load.rank_exchange import buffers_nbytes, exchange
from megatron_flashckpt.load.slot_source import OfferedSlot
from megatron_flashckpt.load.source_job import SavedJob
from megatron_flashckpt.load.straight_copies import StraightCopies
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.save.gc_pause import gc_paused

#: Default upper bound of threads per rank. One thread digests 9 GB/s; a GPU copies 54 GB/s.
_MOST_THREADS = 8


@dataclasses.dataclass(frozen=True)
class MemorySource:
    """See `checkpoint_source.CheckpointSource`."""

    slot: OfferedSlot
    """The slot of this rank."""
    checkpoint: MemoryCheckpoint
    neighbours: frozenset[int]
    """The other ranks that seem to run on this node."""
    threads: int
    origin: Origin
    job: SavedJob
    common_state: bytes
    reads_alone: bool
    """True if every rank has the same coordinates as when the checkpoint was saved."""

    def open(self, plan: LoadPlan) -> ChunkReader:
        gpu = plan.targets.gpu
        slots = NodeSlots({this_rank(): self.slot, **self._lent(plan)})
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
        received_nbytes = exchange(
            reader, self.slot.data, this_rank(), plan.reads, plan.pieces, plan.targets, readable
        )
        held = (plan.reads.reads.get(rank, ()) for rank in readable)
        return ReadReport(
            received_nbytes=received_nbytes,
            held_nbytes=sum(read.nbytes for reads in held for read in reads),
            seconds=time.perf_counter() - started,
            memory_nbytes=buffers_nbytes() + reader.nbytes,
        )

    def fill_alone(self, plan: LoadPlan) -> None:
        read_all(self.slot, plan.reads, plan.pieces, plan.targets, self.threads, plan.targets.gpu)

    def check_whole(self) -> None:
        """Check that no rank of the saving job is missing. See `checkpoint_source`.

        Agents offer only slots that hold a complete staged save.

        Raises:
            MissingStateError: this job has fewer ranks than the saving job; on all ranks.
        """
        ranks, saved_by = len(self.job.sources), self.slot.meta.world_size
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
    rank, offer = this_rank(), checkpoint.offer
    (slot, items), descriptions = run_and_gather(
        lambda: _described(OfferedSlot(checkpoint.slab, offer, rank, checkpoint.is_pinned))
    )
    templates = _templates(descriptions, rank, slot.meta.template, items)
    job = SavedJob(
        f"the memory of iteration {offer.iteration}",
        [
            Source(number, templates[description.fingerprint], description.placement)
            for number, description in enumerate(descriptions)
        ],
        [description.saved_at for description in descriptions],
        compared(descriptions)[0],
    )
    host = descriptions[rank].host
    neighbours = {n for n, description in enumerate(descriptions) if description.host == host}
    return MemorySource(
        slot,
        checkpoint,
        frozenset(neighbours - {rank}),
        reader_threads(config, _MOST_THREADS),
        Origin(offer.iteration, offer.save_id, "memory"),
        job,
        run_on_rank_0(lambda: slot.meta.common),
        job.is_same([description.now_at for description in descriptions], parallel.model_sizes()),
    )


class _Description(NamedTuple):
    """Contents of one rank's slot, for the other ranks."""

    fingerprint: str
    """Fingerprint of the template."""
    items_nbytes: int
    """Bytes of the template's encoded items."""
    placement: Placement
    saved_at: Coordinates
    """Coordinates of the rank at the time of the save."""
    now_at: Coordinates
    differing: tuple[str, ...]
    sums: tuple[CopySum, ...] | None
    host: str
    """Name of the rank's host. Containers may share a name; their agents know only their ranks."""


def _described(slot: OfferedSlot) -> tuple[tuple[OfferedSlot, bytes], _Description]:
    """Return the slot with its template's encoded items, and the description to gather."""
    meta = slot.meta
    items = msgspec.msgpack.encode(meta.template.items)
    return (slot, items), _Description(
        meta.template_fingerprint,
        len(items),
        meta.placement,
        meta.coordinates,
        parallel.coordinates(),
        meta.differing,
        meta.sums,
        platform.node(),
    )


_ITEMS = msgspec.msgpack.Decoder(tuple[TemplateItem, ...])


def _templates(
    descriptions: list[_Description], rank: int, template: Template, items: bytes
) -> dict[str, Template]:
    """Return the templates of all ranks by fingerprint. Collective.

    The first rank with a template sends it. All templates travel together, so their number does not
    change the number of collectives. If all ranks have the same template, none is sent.

    Args:
        template, items: this rank's template, and its encoded items.
    """
    senders: dict[str, int] = {}
    for number, description in enumerate(descriptions):
        senders.setdefault(description.fingerprint, number)
    templates = {descriptions[rank].fingerprint: template}
    if len(senders) == 1:
        return templates
    lengths = [descriptions[sender].items_nbytes for sender in senders.values()]
    own = {n: items for n, sender in enumerate(senders.values()) if sender == rank}
    blobs = memoryview(exchange_blobs(lengths, own))
    for fingerprint, length in zip(senders, lengths, strict=True):
        if fingerprint not in templates:
            received = _ITEMS.decode(blobs[:length])
            templates[fingerprint] = Template(received, 0, b"")
        blobs = blobs[length:]
    return templates
