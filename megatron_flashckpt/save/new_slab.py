"""How large a slab must be, and the making of one."""

from __future__ import annotations

import errno

from megatron_flashckpt.agent.client import AgentClient
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.memory.numa import node_of_gpu
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlabGeometry, align
from megatron_flashckpt.save.agent_connection import held_memory

#: Room for descriptions of later saves that are a little longer.
_META_RESERVE = 64 * 1024
#: For the descriptions of saves before there was one: arguments and the like.
FIRST_META = 8 * _META_RESERVE


def slab_nbytes(slots: int, data_nbytes: int, plan_nbytes: int) -> int:
    """Return the memory that `NodeLink.prepare` takes for such checkpoints."""
    meta_nbytes = plan_nbytes + FIRST_META + _META_RESERVE
    return SlabGeometry(slots, align(meta_nbytes), align(data_nbytes)).nbytes


def new_slab(
    client: AgentClient,
    config: Config,
    rank: int,
    device: int | None,
    data_nbytes: int,
    meta_nbytes: int,
) -> Slab:
    """Return a slab for saves of such sizes, near the CUDA device; None: near the thread.

    Raises:
        StorageError: there is no memory for it; says how much the agent holds, and for whom.
    """
    try:
        return Slab.create(
            config.slots,
            meta_nbytes + _META_RESERVE,
            data_nbytes,
            str(rank),
            huge_pages=config.huge_pages,
            numa_node=None if device is None else node_of_gpu(device),
            held_share=config.held_share,
        )
    except StorageError as error:
        held = held_memory(client, 0.0) if error.errno == errno.ENOMEM else ""
        raise StorageError(error.errno, "; ".join(filter(None, (error.strerror, held)))) from error
