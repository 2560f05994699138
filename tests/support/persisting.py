"""Durable shards with their commit records, made in the test's process; no save is committed."""

from __future__ import annotations

import time

from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.agent.publication import put_records
from megatron_flashckpt.agent.shard_writer import slot_shard
from megatron_flashckpt.file_format.commit_record import CommitRecord, Coordinates
from megatron_flashckpt.layout.template import PlanCache
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotHeader, SlotMeta, SlotState
from megatron_flashckpt.storage.posix import PosixStorage
from tests.support.trainer import pieces_of


def persisted(
    storage: PosixStorage, save_id: str, rank: int = 0, world_size: int = 1, count: int = 1
) -> PendingSave:
    """Persist iteration 5 of a node with `count` ranks from `rank` on, without the commit."""
    save = written(storage, save_id, rank, world_size, count)
    put_records(storage, list(save.unpublished.values()))
    save.unpublished.clear()
    return save


def written(
    storage: PosixStorage, save_id: str, rank: int = 0, world_size: int = 1, count: int = 1
) -> PendingSave:
    """Write the shards of iteration 5 of such a node; their records are not published."""
    save = PendingSave(storage, 5, save_id, time.monotonic())
    for number in range(rank, rank + count):
        save.metas[number], record = _written(storage, save_id, number, world_size)
        save.persisted.add(number)
        save.hold_record(record)
    return save


def _written(
    storage: PosixStorage, save_id: str, rank: int, world_size: int
) -> tuple[SlotMeta, CommitRecord]:
    layout = PlanCache().layout(pieces_of(rank, world_size, "decoder.weight", 50))
    meta = SlotMeta(
        root=storage.place,
        rank=rank,
        world_size=world_size,
        coordinates=Coordinates(dp=rank),
        template_fingerprint=layout.template_fingerprint,
        template=layout.template,
        placement=layout.placement,
        common=b"" if rank else save_id.encode(),
        description={},
    )
    slab = Slab.create(1, 0, layout.nbytes, str(rank))
    header = SlotHeader(SlotState.STAGED, 5, save_id, 0, layout.nbytes)
    slab.slots[0].set_header(header)
    record = slot_shard(storage, slab.slots[0], header, meta).record
    slab.close()
    assert record is not None
    return meta, record
