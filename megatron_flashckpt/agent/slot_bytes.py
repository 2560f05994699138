"""A slot as one range of bytes, its description first: the form that is sent and combined.

Slots are read without locking them. A writer empties the header before it overwrites a slot. So the
copied bytes belong to the checkpoint if the header still names it after the copy. Thus a slow
network never makes training wait for a slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import msgspec
import xxhash

from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES, chunk_digest
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import (
    COMPLETE,
    EMPTY_HEADER,
    SlabGeometry,
    SlotHeader,
    SlotState,
)


class SlotDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """Slot descriptor: facts with which a slot is rebuilt from its bytes and verified."""

    rank: int
    iteration: int
    save_id: str
    geometry: SlabGeometry
    meta_nbytes: int
    data_nbytes: int
    meta_digest: str
    digests: tuple[str, ...]
    """Digests of the data, one per 4 MiB, as in a shard file."""
    memory_only: bool
    """The slot is not meant for storage."""

    @property
    def nbytes(self) -> int:
        return self.meta_nbytes + self.data_nbytes


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of one checkpoint of a rank, from which a slot can be filled."""

    descriptor: SlotDescriptor
    place: str
    """Where the copy is, for people."""
    fill: Callable[[Slab, int], None]
    """Writes the copy's bytes into a slot; raises `FlashCkptError` or `OSError`."""
    is_in_slot: bool = False
    """True if an agent that is alive has the checkpoint in a slot, where the rank staged it."""
    otherwise: Copy | None = None
    """Another copy of the same checkpoint, for the case that this one is damaged."""


def header_of(slab: Slab, index: int) -> SlotHeader:
    """Return the header of a slot; EMPTY if the slab was closed."""
    try:
        return slab.slots[index].header
    except ValueError:
        return EMPTY_HEADER


def descriptor_of(
    rank: int, slab: Slab, index: int, digests: tuple[str, ...] | None
) -> SlotDescriptor | None:
    """Return the descriptor of a complete slot; None if the slot was overwritten meanwhile.

    Args:
        digests: of the data, if they are known; None: the data is read.
    """
    header = header_of(slab, index)
    meta_at, data_at = slab.geometry.meta_offset(index), slab.geometry.data_offset(index)
    taken = []
    for start in range(0, header.data_nbytes if digests is None else 0, CHUNK_NBYTES):
        end = min(start + CHUNK_NBYTES, header.data_nbytes)
        chunk = _copy(slab, index, header.save_id, data_at + start, data_at + end)
        if chunk is None:
            return None
        taken.append(chunk_digest(chunk))
    meta = _copy(slab, index, header.save_id, meta_at, meta_at + header.meta_nbytes)
    if meta is None:
        return None
    return SlotDescriptor(
        rank=rank,
        iteration=header.iteration,
        save_id=header.save_id,
        geometry=slab.geometry,
        meta_nbytes=header.meta_nbytes,
        data_nbytes=header.data_nbytes,
        meta_digest=xxhash.xxh3_64_hexdigest(meta),
        digests=digests or tuple(taken),
        memory_only=header.state == SlotState.KEPT,
    )


def holds(slab: Slab, index: int, save_id: str) -> bool:
    """Return whether a slot still holds the complete checkpoint `save_id`."""
    header = header_of(slab, index)
    return header.state in COMPLETE and header.save_id == save_id


def read(
    slab: Slab, index: int, descriptor: SlotDescriptor, start: int, nbytes: int
) -> bytes | None:
    """Return bytes of the range; None if the slot has been overwritten."""
    parts = []
    for at, size in _spans(slab, index, descriptor, start, nbytes):
        part = _copy(slab, index, descriptor.save_id, at, at + size)
        if part is None:
            return None
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def write(
    slab: Slab, index: int, descriptor: SlotDescriptor, start: int, data: bytes | memoryview
) -> None:
    """Write bytes of the range to their place in the slot."""
    done = 0
    for at, size in _spans(slab, index, descriptor, start, len(data)):
        slab.memory[at : at + size] = data[done : done + size]
        done += size


def description(slab: Slab, index: int, descriptor: SlotDescriptor) -> bytes:
    """Return the bytes of a slot's encoded description."""
    meta_at = slab.geometry.meta_offset(index)
    return bytes(slab.memory[meta_at : meta_at + descriptor.meta_nbytes])


def damage(slab: Slab, index: int, descriptor: SlotDescriptor) -> str | None:
    """Return the damage of a rebuilt slot, or None."""
    data_at = slab.geometry.data_offset(index)
    digest = xxhash.xxh3_64_hexdigest(description(slab, index, descriptor))
    if digest != descriptor.meta_digest:
        return f"description: digest {digest}, expected {descriptor.meta_digest}"
    for chunk, expected in enumerate(descriptor.digests):
        start = data_at + chunk * CHUNK_NBYTES
        end = min(start + CHUNK_NBYTES, data_at + descriptor.data_nbytes)
        digest = chunk_digest(slab.memory[start:end])
        if digest != expected:
            return f"chunk {chunk}: digest {digest}, expected {expected}"
    return None


def _spans(
    slab: Slab, index: int, descriptor: SlotDescriptor, start: int, nbytes: int
) -> Iterator[tuple[int, int]]:
    """Yield the places `(offset, nbytes)` of a range in the slab, at most two."""
    geometry, cut = slab.geometry, descriptor.meta_nbytes
    end = start + nbytes
    if start < cut:
        yield geometry.meta_offset(index) + start, min(end, cut) - start
    if end > cut:
        begin = max(start, cut)
        yield geometry.data_offset(index) + begin - cut, end - begin


def _copy(slab: Slab, index: int, save_id: str, start: int, end: int) -> bytes | None:
    try:
        copied = bytes(slab.memory[start:end])
    except ValueError:  # the slab was closed
        return None
    # Check after the copy: the header is emptied before the first byte is overwritten.
    return copied if holds(slab, index, save_id) else None
