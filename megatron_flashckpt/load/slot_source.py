"""A checkpoint in a slot of this rank: its description, and its verified chunks.

The slot is read through its file descriptor (a memfd), not through its mapping. A new process must
first map every page, which takes as long as the copy itself. For 256 MiB both take 120 to 130 ms
together; reading takes 70 to 80 ms.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.file_format.file_names import iteration_dir
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES, chunk_count, new_chunk_digest
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotMeta
from megatron_flashckpt.storage.scatter_read import read_parts

logger = logging.getLogger(__name__)


class OfferedSlot:
    """A slot of this rank that the agent offers. See `load.chunk_reader.ChunkSource`.

    Raises:
        CorruptCheckpointError: the slot differs from the agent's offer.
    """

    def __init__(self, slab: Slab, offer: Offer, rank: int) -> None:
        self._place = f"slot {offer.slot} of rank {rank}, {iteration_dir(offer.iteration)}"
        slot = slab.slots[offer.slot]
        header = slot.header
        if (header.iteration, header.save_id) != (offer.iteration, offer.save_id):
            raise CorruptCheckpointError(
                f"{self._place}: holds save {header.save_id!r} of iteration {header.iteration}, "
                f"but the agent offered {offer.save_id!r}; host memory is damaged, or another "
                "process writes to it"
            )
        self.meta: SlotMeta = slot.meta
        if self.meta.rank != rank or self.meta.template.nbytes != header.data_nbytes:
            raise CorruptCheckpointError(
                f"{self._place}: belongs to rank {self.meta.rank} and describes "
                f"{self.meta.template.nbytes} bytes of data, expected {header.data_nbytes}; host "
                "memory is damaged"
            )
        #: Digests that the agent computed before its offer; None if that took longer than trainers
        #: wait.
        self._digests = offer.digests
        if self._digests is None:
            logger.warning(
                "%s: is restored unverified, because the agent did not digest it in time: memory "
                "that changed after staging would not be noticed; set "
                "'restore_from_memory: false' to load from storage instead",
                self._place,
            )
        if self._digests is not None and len(self._digests) != chunk_count(header.data_nbytes):
            raise CorruptCheckpointError(
                f"{self._place}: {len(self._digests)} digests do not match "
                f"{header.data_nbytes} bytes of data; host memory is damaged"
            )
        self._fd = slab.fd
        self._offset = slot.data_offset
        mapped = torch.frombuffer(memoryview(slab.memory), dtype=torch.uint8)
        self.data = mapped[slot.data_offset : slot.data_offset + header.data_nbytes]
        """The data as flat uint8; only bytes that were read as chunks are verified."""

    def data_nbytes(self, rank: int) -> int:
        return self.meta.template.nbytes

    def read_chunk(self, rank: int, number: int, parts: Sequence[memoryview]) -> None:
        offset = self._offset + number * CHUNK_NBYTES
        if self._digests is None:
            read_parts(self._fd, offset, parts)
            return
        digest = new_chunk_digest()
        read_parts(self._fd, offset, parts, digest.update)
        actual = digest.hexdigest()
        if actual != self._digests[number]:
            raise CorruptCheckpointError(
                f"{self._place}, chunk {number}: digest {actual}, expected "
                f"{self._digests[number]}; host memory changed after it was staged"
            )
