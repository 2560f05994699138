"""A checkpoint in a slot of this rank: its description, and any chunk of it, verified.

The slot is read as the file that a memfd is, not through its mapping. In a process that has just
started no page of that is mapped, and mapping them took as long again as the copy: 256 MiB in 120
to 130 ms, read in 70 to 80 ms, where a plain copy took 60 to 70 ms.
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


class HeldSlot:
    """What the agent offers of this rank's slots. See `load.chunk_reader.ChunkSource`.

    Raises:
        CorruptCheckpointError: it is not what the agent offered.
    """

    def __init__(self, slab: Slab, offer: Offer, rank: int) -> None:
        self._place = f"slot {offer.slot} of rank {rank}, {iteration_dir(offer.iteration)}"
        slot = slab.slots[offer.slot]
        header = slot.header
        if (header.iteration, header.save_id) != (offer.iteration, offer.save_id):
            raise CorruptCheckpointError(
                f"{self._place}: holds save {header.save_id!r} of iteration {header.iteration}, "
                f"the agent offered {offer.save_id!r}; host memory is damaged or another process "
                "writes to it"
            )
        self.meta: SlotMeta = slot.meta
        if self.meta.rank != rank or self.meta.template.nbytes != header.data_nbytes:
            raise CorruptCheckpointError(
                f"{self._place}: is that of rank {self.meta.rank} with "
                f"{self.meta.template.nbytes} bytes of data, expected {header.data_nbytes}; host "
                "memory is damaged"
            )
        #: Taken when the agent read the slot, at the latest before it offered the slot; None if
        #: that took longer than trainers wait.
        self._digests = offer.digests
        if self._digests is None:
            logger.warning(
                "%s: is restored unverified, because the agent has not digested it in time: memory "
                "that has changed since it was staged is not noticed; "
                "'restore_from_memory: false' loads from storage instead",
                self._place,
            )
        if self._digests is not None and len(self._digests) != chunk_count(header.data_nbytes):
            raise CorruptCheckpointError(
                f"{self._place}: {len(self._digests)} digests do not stand for "
                f"{header.data_nbytes} bytes of data; host memory is damaged"
            )
        self._fd = slab.fd
        self._offset = slot.data_offset
        mapped = torch.frombuffer(memoryview(slab.memory), dtype=torch.uint8)
        self.data = mapped[slot.data_offset : slot.data_offset + header.data_nbytes]
        """The data, flat uint8; what has not been read as chunks is not verified."""

    def data_nbytes(self, rank: int) -> int:
        return self.meta.template.nbytes

    def read_chunk(self, rank: int, number: int, parts: Sequence[memoryview]) -> None:
        offset = self._offset + number * CHUNK_NBYTES
        if self._digests is None:
            read_parts(self._fd, offset, parts)
            return
        digest = new_chunk_digest()
        read_parts(self._fd, offset, parts, digest.update)
        found = digest.hexdigest()
        if found != self._digests[number]:
            raise CorruptCheckpointError(
                f"{self._place}, chunk {number}: digest {found}, expected {self._digests[number]}; "
                "host memory changed after it was staged"
            )
