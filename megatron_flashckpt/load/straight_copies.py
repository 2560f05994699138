"""Copies of a load to the GPU, straight from a slot whose memory is page-locked.

The GPU reads the slot while threads compute the digests of the same bytes, so a load is as fast as
the slower of both. Bytes may be in place before their digest is known. If a digest is wrong, the
load fails, as it does after a wrong digest of any other chunk (`chunk_reader`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.load.chunk_reader import ChunkReads, Part, part_of
from megatron_flashckpt.load.gpu_buffers import Gpu
from megatron_flashckpt.load.slot_chunks import NodeSlots
from megatron_flashckpt.load.targets import Targets


class StraightCopies:
    """See `chunk_reader.InPlace`. Fills `targets`, which lie on a GPU, from `source`."""

    def __init__(self, source: NodeSlots, targets: Targets, gpu: Gpu) -> None:
        self._source = source
        self._targets = targets
        self._gpu = gpu

    def take(self, chunks: Sequence[ChunkReads]) -> bool:
        """Enqueue the copies of adjacent chunks, and verify the chunks meanwhile."""
        first = chunks[0]
        low = first.number * CHUNK_NBYTES
        high = min(low + len(chunks) * CHUNK_NBYTES, self._source.data_nbytes(first.rank))
        views = self._source.locked(first.rank, low, high)
        if not views:
            return False
        self._targets.enqueue(list(_parts(chunks, low, views)))
        for chunk in chunks:
            self._source.verify(chunk.rank, chunk.number)
        return True

    def wait(self) -> None:
        self._gpu.synchronize()


def _parts(chunks: Sequence[ChunkReads], low: int, views: list[memoryview]) -> Iterator[Part]:
    """Yield the requested parts of `views`, which lie end to end from byte `low` of the data on."""
    # A long read belongs to several of the chunks, and is copied once.
    reads = list({id(read): read for chunk in chunks for read in chunk.reads}.values())
    for view in views:
        for read in reads:
            part = part_of(read, low, view)
            if part.source.nbytes:
                yield part
        low += view.nbytes
