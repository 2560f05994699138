"""A checkpoint in a slot: its verified chunks, and for the own rank its description.

A rank reads its own slot and those of other ranks of its node, which the agent lends.

The slot is read through its file descriptor (a memfd), because a new process must first map every
page of its mapping. Page-locking maps the pages, so a GPU and the digests of its copies use the
mapping. If source and target differ modulo 32 bytes, a copy uses the mapping, too, because the
kernel copies such bytes slowly: with digests, in 0.19 instead of 0.13 CPU s per GiB.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.errors import UNDECODABLE, CorruptCheckpointError
from megatron_flashckpt.file_format.file_names import iteration_dir
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES, chunk_count, new_chunk_digest
from megatron_flashckpt.memory.pinned_slab import borders
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotMeta
from megatron_flashckpt.storage.scatter_read import BLOCK_NBYTES, Seen, read_parts

logger = logging.getLogger(__name__)


#: Shorter parts are read by the kernel, whose call takes less time than those of torch.
_COPIED_NBYTES = 16 * 1024
#: The kernel copies at full speed between addresses that are equal modulo this.
_STEP_NBYTES = 32


def _is_shifted(part: memoryview, offset: int) -> bool:
    """Return whether the address of `part` lies otherwise than `offset`, seen from a cache line."""
    address = torch.frombuffer(part, dtype=torch.uint8).data_ptr()
    return (address - offset) % _STEP_NBYTES != 0


def copy_blocks(source: memoryview, target: memoryview, seen: Seen) -> None:
    """Copy `source` to `target` in user space; pass the bytes to `seen` while they are cached."""
    for start in range(0, target.nbytes, BLOCK_NBYTES):
        block = target[start : start + BLOCK_NBYTES]
        copied = torch.frombuffer(source[start : start + block.nbytes], dtype=torch.uint8)
        torch.frombuffer(block, dtype=torch.uint8).copy_(copied)
        seen(block)


class SlotChunks:
    """The verified chunks of a slot. See `load.chunk_reader.ChunkSource`.

    Args:
        rank: the rank whose slot this is.
        is_pinned: returns whether all bytes of the slab below an offset are page-locked.

    Raises:
        CorruptCheckpointError: the slot differs from the agent's offer.
    """

    def __init__(
        self,
        slab: Slab,
        offer: Offer,
        rank: int,
        is_pinned: Callable[[int], bool] = lambda end: False,
    ) -> None:
        self.place = f"slot {offer.slot} of rank {rank}, {iteration_dir(offer.iteration)}"
        slot = slab.slots[offer.slot]
        header = slot.header
        if (header.iteration, header.save_id) != (offer.iteration, offer.save_id):
            raise CorruptCheckpointError(
                f"{self.place}: holds save {header.save_id!r} of iteration {header.iteration}, "
                f"but the agent offered {offer.save_id!r}; host memory is damaged, or another "
                "process writes to it"
            )
        #: Digests that the agent computed before its offer; None if that took longer than trainers
        #: wait.
        self._digests = offer.digests
        if self._digests is not None and len(self._digests) != chunk_count(header.data_nbytes):
            raise CorruptCheckpointError(
                f"{self.place}: {len(self._digests)} digests do not match "
                f"{header.data_nbytes} bytes of data; host memory is damaged"
            )
        self._fd = slab.fd
        self._offset = slot.data_offset
        self._is_pinned = is_pinned
        self._memory = slab.memory[slot.data_offset : slot.data_offset + header.data_nbytes]

    def data_nbytes(self, rank: int) -> int:
        return self._memory.nbytes

    def read_chunk(self, rank: int, number: int, parts: Sequence[memoryview]) -> None:
        digest = new_chunk_digest()
        self._fill(number * CHUNK_NBYTES, parts, digest.update)
        if self._digests is not None:
            self._check(number, digest.hexdigest(), self._digests[number])

    def _fill(self, start: int, parts: Sequence[memoryview], seen: Seen) -> None:
        """Fill `parts`, end to end, from byte `start` of the data on; pass all bytes to `seen`."""
        read: list[memoryview] = []
        begin = end = start
        for part in parts:
            if part.nbytes >= _COPIED_NBYTES and _is_shifted(part, end):
                read_parts(self._fd, self._offset + begin, read, seen)
                copy_blocks(self._memory[end : end + part.nbytes], part, seen)
                read, begin = [], end + part.nbytes
            else:
                read.append(part)
            end += part.nbytes
        read_parts(self._fd, self._offset + begin, read, seen)

    def locked(self, rank: int, low: int, high: int) -> list[memoryview]:
        """Return bytes `[low, high)` of the data, from which a GPU can copy asynchronously.

        The bytes come in several parts if no single copy may read them all. The list is empty if
        any byte is not page-locked (yet).
        """
        if not self._is_pinned(self._offset + high):
            return []
        ends = [*borders(self._offset + low, self._offset + high), self._offset + high]
        begins = [self._offset + low, *ends]
        return [
            self._memory[begin - self._offset : end - self._offset]
            for begin, end in zip(begins, ends, strict=False)
        ]

    def verify(self, rank: int, number: int) -> None:
        """Check the digest of a chunk where it lies.

        Raises:
            CorruptCheckpointError: names place, chunk and both digests.
        """
        if self._digests is None:
            return
        digest = new_chunk_digest()
        digest.update(self._memory[number * CHUNK_NBYTES : (number + 1) * CHUNK_NBYTES])
        self._check(number, digest.hexdigest(), self._digests[number])

    def _check(self, number: int, actual: str, expected: str) -> None:
        if actual != expected:
            raise CorruptCheckpointError(
                f"{self.place}, chunk {number}: digest {actual}, expected {expected}; host "
                "memory changed after it was staged"
            )


class OfferedSlot(SlotChunks):
    """A slot of this rank that the agent offers, with its description."""

    def __init__(
        self,
        slab: Slab,
        offer: Offer,
        rank: int,
        is_pinned: Callable[[int], bool] = lambda end: False,
    ) -> None:
        super().__init__(slab, offer, rank, is_pinned)
        self.meta: SlotMeta = slab.slots[offer.slot].meta
        if self.meta.rank != rank or self.meta.template.nbytes != self._memory.nbytes:
            raise CorruptCheckpointError(
                f"{self.place}: belongs to rank {self.meta.rank} and describes "
                f"{self.meta.template.nbytes} bytes of data, expected {self._memory.nbytes}; host "
                "memory is damaged"
            )
        if self._digests is None:
            logger.warning(
                "%s: is restored unverified, because the agent did not digest it in time: memory "
                "that changed after staging would not be noticed; set "
                "'restore_from_memory: false' to load from storage instead",
                self.place,
            )
        self.data = torch.frombuffer(self._memory, dtype=torch.uint8)
        """The data as flat uint8; only bytes that were read as chunks are verified."""


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
    """The slots of a node that one rank reads, by rank. See `SlotChunks`."""

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
