"""The slots of a node that one rank reads: its own, and those that the agent lends it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import msgspec

from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.errors import UNDECODABLE, CorruptCheckpointError
from megatron_flashckpt.load.slot_chunks import SlotChunks
from megatron_flashckpt.memory.slab import Slab


class _Owner(msgspec.Struct):
    """The part of a slot's description that names its rank; the rest is not decoded."""

    rank: int


_OWNER = msgspec.msgpack.Decoder(_Owner)


class LentSlot(SlotChunks):
    """A slot of another rank of this node, read only. Its slab is closed with this object.

    Raises:
        CorruptCheckpointError: the slot differs from the agent's offer.
    """

    def __init__(self, slab: Slab, offer: Offer, rank: int) -> None:
        weakref.finalize(self, slab.close).atexit = False  # the kernel closes it at exit
        super().__init__(slab, offer, rank)
        encoded = slab.slots[offer.slot].encoded_meta()
        try:
            owner = _OWNER.decode(encoded).rank
        except UNDECODABLE as error:
            raise CorruptCheckpointError(f"{self.place}: no description ({error})") from error
        if owner != rank:
            raise CorruptCheckpointError(
                f"{self.place}: belongs to rank {owner}; host memory is damaged"
            )


class NodeSlots:
    """See `load.chunk_reader.ChunkSource` and `load.slot_chunks.SlotChunks`."""

    def __init__(self, by_rank: Mapping[int, SlotChunks]) -> None:
        self.by_rank = by_rank

    def data_nbytes(self, rank: int) -> int:
        return self.by_rank[rank].data_nbytes(rank)

    def read_chunk(self, rank: int, number: int, parts: Sequence[memoryview]) -> None:
        self.by_rank[rank].read_chunk(rank, number, parts)

    def locked(self, rank: int, low: int, high: int) -> list[memoryview]:
        return self.by_rank[rank].locked(rank, low, high)

    def verify(self, rank: int, number: int) -> None:
        self.by_rank[rank].verify(rank, number)
