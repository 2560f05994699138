"""Reads of a slot into host memory, at any address."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch

from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.load import slot_chunks
from megatron_flashckpt.storage.scatter_read import Seen, read_parts
from tests.load.test_straight_copies import Held

#: Parts of a chunk: shorter and longer than the parts that are copied, and longer than a block.
SIZES = (0, 100, 3 << 20, 70_000, 1, 20_000)
SIZES += (CHUNK_NBYTES - sum(SIZES),)


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.close()


@pytest.fixture
def read_by_kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all parts that the kernel fills."""
    sizes: list[int] = []

    def read(fd: int, offset: int, parts: Sequence[memoryview], seen: Seen | None = None) -> int:
        sizes.extend(part.nbytes for part in parts)
        return read_parts(fd, offset, parts, seen)

    monkeypatch.setattr(slot_chunks, "read_parts", read)
    return sizes


def parts_at(shift: int) -> list[memoryview]:
    """Return parts of `SIZES`, each `shift` bytes past where the kernel copies fast."""
    starts = itertools.accumulate(SIZES, initial=0)
    parts = []
    for start, nbytes in zip(starts, SIZES, strict=False):
        memory = torch.zeros(nbytes + 128, dtype=torch.uint8)
        first = -memory.data_ptr() % 64 + (start + shift) % 64
        parts.append(memory.numpy().data[first : first + nbytes])
    return parts


@pytest.mark.parametrize("shift", [0, 2, 16, 32])
def test_a_chunk_is_read_to_any_address(held: Held, read_by_kernel: list[int], shift: int) -> None:
    parts = parts_at(shift)
    held.slot.read_chunk(0, 1, parts)
    with held.slab.slots[0].data() as data:
        assert b"".join(parts) == bytes(data[CHUNK_NBYTES : 2 * CHUNK_NBYTES])
    is_slow = shift % 32 != 0
    expected = [nbytes for nbytes in SIZES if nbytes < 16 * 1024 or not is_slow]
    assert read_by_kernel == expected


@pytest.mark.parametrize("shift", [0, 2])
def test_a_changed_byte_is_found_at_any_address(held: Held, shift: int) -> None:
    held.flip(CHUNK_NBYTES + SIZES[1] + (2 << 20))
    with pytest.raises(CorruptCheckpointError, match=r"chunk 1: digest .*, expected "):
        held.slot.read_chunk(0, 1, parts_at(shift))
