"""A shard that is durable, with its commit record: all but the commit, in the test's process."""

from __future__ import annotations

import time

from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.agent.shard_writer import persist_slot
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.layout.template import PlanCache
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotHeader, SlotMeta, SlotState
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.trainer import pieces_of


def persisted(
    storage: PosixStorage, save_id: str, rank: int = 0, world_size: int = 1
) -> PendingSave:
    """Persist a rank of iteration 5, the only one of its node; what is left to do is to commit."""
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
    persist_slot(storage, slab.slots[0], header, meta)
    slab.close()
    return PendingSave(storage, 5, save_id, time.monotonic(), {rank: meta}, {rank})
