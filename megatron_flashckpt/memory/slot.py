"""Layout of one rank's checkpoint in memory.

A slab is a memfd: one page of `SlabGeometry` and `Signals`, then the slots. A slot is one page of
`SlotHeader` and the digest of the encoded `SlotMeta`, `meta_capacity` bytes for the latter, and
`data_capacity` bytes for the pieces. All offsets are multiples of the page size.

The slot header decides the slot's state. Exactly one process writes the header at a time: the
trainer up to STAGED or KEPT, the agent from then on.
"""

from __future__ import annotations

import enum
import mmap
import struct
from typing import Any, Generic, TypeVar

import msgspec
import xxhash

from megatron_flashckpt.config import Retention
from megatron_flashckpt.errors import UNDECODABLE, CorruptCheckpointError
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.file_format.run_object import Ancestors
from megatron_flashckpt.layout.template import Placement, Template

_T = TypeVar("_T")

#: Alignment of slot headers and slot data, so that data can be written with O_DIRECT.
PAGE = max(4096, mmap.PAGESIZE)

_SLAB = struct.Struct("<8sIIQQ")
_SLOT = struct.Struct("<8sIIq32sQQ")
_SUM = struct.Struct("<Q")
#: Offset of the description's digest in the header page: far from the bytes that state changes
#: write.
_META_SUM_AT = PAGE - _SUM.size
_SLAB_MAGIC = b"FLASHSLB"
_SLOT_MAGIC = b"FLASHSLT"


class SlotState(enum.IntEnum):
    """State of a slot's bytes."""

    EMPTY = 0
    """No checkpoint."""
    STAGING = 1
    """Incomplete: a trainer is copying, or has died or given up the save."""
    STAGED = 2
    """Complete: a rank can load the slot, and the agent can persist it."""
    DURABLE = 3
    """Complete, and its save is committed in storage."""
    FAILED = 4
    """Complete and loadable, but the agent could not persist it."""
    KEPT = 5
    """Complete and loadable, but not meant for storage."""


#: States in which the bytes are complete.
COMPLETE = (SlotState.STAGED, SlotState.DURABLE, SlotState.FAILED, SlotState.KEPT)


class _Meta(msgspec.Struct, Generic[_T], frozen=True, kw_only=True):
    """Facts with which the agent persists and commits a slot, even if every trainer is dead."""

    root: str
    """Absolute save directory."""
    rank: int
    world_size: int
    coordinates: Coordinates
    template_fingerprint: str
    template: _T
    placement: Placement
    common: bytes
    """Contents of the common file; empty except for rank 0."""
    description: dict[str, Any]
    ancestors: Ancestors = ()
    """Those of the run that makes the save: a load needs no other object to judge it."""
    retain_interval: int | None = None
    """Megatron's `--save-retain-interval`."""
    retention: Retention = Retention()
    metrics: dict[str, float] = {}
    """Metrics of the model that training code on this rank has reported."""


SlotMeta = _Meta[Template]
EncodedMeta = _Meta[msgspec.Raw]
"""For the process that encodes it: the template is most of it, and the same in every save."""


class SlotHeader(msgspec.Struct, frozen=True):
    """State and extent of one slot."""

    state: SlotState
    iteration: int
    save_id: str
    meta_nbytes: int
    data_nbytes: int

    def pack(self) -> bytes:
        body = _SLOT.pack(
            _SLOT_MAGIC,
            1,
            int(self.state),
            self.iteration,
            self.save_id.encode(),
            self.meta_nbytes,
            self.data_nbytes,
        )
        return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, page: bytes | memoryview) -> SlotHeader:
        """Return the header; a torn, damaged or unwritten one decodes as EMPTY."""
        packed = bytes(page[: _SLOT.size + _SUM.size])  # one copy: the header may be changing
        body = packed[: _SLOT.size]
        (check,) = _SUM.unpack(packed[_SLOT.size :])
        magic, version, state, iteration, save_id, meta, data = _SLOT.unpack(body)
        if (magic, version) != (_SLOT_MAGIC, 1) or check != xxhash.xxh3_64_intdigest(body):
            return EMPTY_HEADER
        try:
            return cls(SlotState(state), iteration, save_id.rstrip(b"\0").decode(), meta, data)
        except ValueError:  # no such state, or no text
            return EMPTY_HEADER


EMPTY_HEADER = SlotHeader(SlotState.EMPTY, -1, "", 0, 0)


def align(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class SlabGeometry(msgspec.Struct, frozen=True):
    """Division of a slab into slots; stored in its first page."""

    slots: int
    meta_capacity: int
    data_capacity: int

    @property
    def stride(self) -> int:
        return PAGE + self.meta_capacity + self.data_capacity

    @property
    def nbytes(self) -> int:
        return PAGE + self.slots * self.stride

    def slot_offset(self, index: int) -> int:
        return PAGE + index * self.stride

    def meta_offset(self, index: int) -> int:
        return self.slot_offset(index) + PAGE

    def data_offset(self, index: int) -> int:
        return self.meta_offset(index) + self.meta_capacity

    def pack(self) -> bytes:
        return _SLAB.pack(_SLAB_MAGIC, 1, self.slots, self.meta_capacity, self.data_capacity)

    @classmethod
    def unpack(cls, page: bytes | memoryview, nbytes: int) -> SlabGeometry:
        """Return the geometry of a slab of `nbytes`, or raise CorruptCheckpointError."""
        magic, version, slots, meta, data = _SLAB.unpack(page[: _SLAB.size])
        geometry = cls(slots, meta, data)
        if (magic, version) != (_SLAB_MAGIC, 1) or geometry.nbytes != nbytes or slots < 1:
            raise CorruptCheckpointError(
                f"memory of {nbytes} bytes is not a slab of this release; restart the agent"
            )
        return geometry


_META = msgspec.msgpack.Decoder(SlotMeta)


def decoded_meta(encoded: bytes, index: int) -> SlotMeta:
    """Return the description of slot `index`. Decoding thousands of pieces takes a while.

    Raises:
        CorruptCheckpointError: `encoded` is not a description.
    """
    try:
        return _META.decode(encoded)
    except UNDECODABLE as error:
        raise CorruptCheckpointError(
            f"slot {index}: its description cannot be decoded ({error})"
        ) from error


class Slot:
    """A view of one slot of a mapped slab."""

    def __init__(self, memory: memoryview, geometry: SlabGeometry, index: int) -> None:
        self.index = index
        self._memory = memory
        self._geometry = geometry

    @property
    def header(self) -> SlotHeader:
        """The slot's header; EMPTY if its sizes do not fit the slot."""
        start = self._geometry.slot_offset(self.index)
        header = SlotHeader.unpack(self._memory[start : start + PAGE])
        geometry = self._geometry
        fits = (
            header.meta_nbytes <= geometry.meta_capacity
            and header.data_nbytes <= geometry.data_capacity
        )
        return header if fits else EMPTY_HEADER

    def set_header(self, header: SlotHeader) -> None:
        start = self._geometry.slot_offset(self.index)
        packed = header.pack()
        self._memory[start : start + len(packed)] = packed

    def set_state(self, state: SlotState) -> None:
        """Change the state and nothing else."""
        self.set_header(msgspec.structs.replace(self.header, state=state))

    @property
    def meta(self) -> SlotMeta:
        """The description.

        Raises:
            CorruptCheckpointError: the description is damaged.
        """
        return decoded_meta(self.encoded_meta(), self.index)

    def encoded_meta(self) -> bytes:
        """Return a copy of the encoded description, for `decoded_meta`.

        Raises:
            CorruptCheckpointError: the bytes have changed since `set_meta`.
        """
        start = self._geometry.meta_offset(self.index)
        encoded = bytes(self._memory[start : start + self.header.meta_nbytes])
        if self._memory[self._meta_sum] != _SUM.pack(xxhash.xxh3_64_intdigest(encoded)):
            raise CorruptCheckpointError(
                f"slot {self.index}: its description has changed; host memory is damaged"
            )
        return encoded

    def set_meta(self, encoded: bytes) -> None:
        """Describe the slot, for agents that read it when trainer or storage are gone."""
        start = self._geometry.meta_offset(self.index)
        self._memory[start : start + len(encoded)] = encoded
        self._memory[self._meta_sum] = _SUM.pack(xxhash.xxh3_64_intdigest(encoded))

    @property
    def _meta_sum(self) -> slice:
        start = self._geometry.slot_offset(self.index) + _META_SUM_AT
        return slice(start, start + _SUM.size)

    @property
    def data_offset(self) -> int:
        """Offset of the data in the slab."""
        return self._geometry.data_offset(self.index)

    def data(self) -> memoryview:
        """The bytes of the pieces. Release the view before the slab is closed."""
        return self._memory[self.data_offset : self.data_offset + self.header.data_nbytes]
