"""A shard for a store that sends in order begins with its header: little waits in memory."""

from __future__ import annotations

import pytest

from megatron_flashckpt.agent.shard_writer import slot_shard
from megatron_flashckpt.agent.write_limits import Flow
from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from tests.support.memory_store import MemoryStore, MemoryWriter
from tests.support.trainer import staged_slot


class InOrder(MemoryStore):
    """A store that sends in order; notes the offsets that are written."""

    in_order = True

    def __init__(self) -> None:
        super().__init__()
        self.offsets: list[int] = []

    def writer(self, name: str, nbytes: int) -> MemoryWriter:
        offsets = self.offsets

        class Noting(MemoryWriter):
            def write_at(self, offset: int, chunk: bytes | memoryview) -> None:
                offsets.append(offset)
                super().write_at(offset, chunk)

        return Noting(self, name, nbytes)


@pytest.mark.parametrize("changes", [False, True])
def test_a_store_that_sends_in_order_gets_the_header_first(changes: bool) -> None:
    """Behind a gap all of the shard would wait in memory."""
    store = InOrder()
    with staged_slot(3 * CHUNK_NBYTES // 6) as slot:
        first = slot_shard(store, slot, slot.header, slot.meta, flow=Flow(1)).digests
        assert store.offsets == sorted(store.offsets)
        assert store.offsets[0] == 0
        on_disk = slot_shard(MemoryStore(), slot, slot.header, slot.meta).digests
        assert first == on_disk
        if changes:
            store, known = InOrder(), ("0" * 16, *first[1:])
            with pytest.raises(CorruptCheckpointError, match="changed after it was digested"):
                slot_shard(store, slot, slot.header, slot.meta, known=lambda: known)
            assert store.objects == {}
