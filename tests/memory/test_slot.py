"""Slot headers, which read as written or as EMPTY, and slots that do not overlap."""

from __future__ import annotations

import os
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.template import PlanCache
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import (
    EMPTY_HEADER,
    PAGE,
    SlabGeometry,
    SlotHeader,
    SlotMeta,
    SlotState,
    align,
)

headers = st.builds(
    SlotHeader,
    st.sampled_from(SlotState),
    st.integers(-(2**63), 2**63 - 1),
    st.text("0123456789abcdef", max_size=32),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)


def page_of(packed: bytes) -> bytes:
    return packed.ljust(PAGE, b"\0")


@given(header=headers)
def test_a_header_reads_as_written(header: SlotHeader) -> None:
    packed = header.pack()
    assert len(packed) <= PAGE
    assert SlotHeader.unpack(page_of(packed)) == header
    assert SlotHeader.unpack(memoryview(page_of(packed))) == header


@given(header=headers, bit=st.integers(0, 8 * len(EMPTY_HEADER.pack()) - 1))
def test_a_header_with_any_bit_flipped_reads_as_empty(header: SlotHeader, bit: int) -> None:
    packed = bytearray(header.pack())
    packed[bit // 8] ^= 1 << bit % 8
    assert SlotHeader.unpack(page_of(bytes(packed))) == EMPTY_HEADER


@given(old=headers, new=headers, cut=st.integers(0, len(EMPTY_HEADER.pack())))
def test_a_half_written_header_reads_as_old_new_or_empty(
    old: SlotHeader, new: SlotHeader, cut: int
) -> None:
    torn = new.pack()[:cut] + old.pack()[cut:]
    assert SlotHeader.unpack(page_of(torn)) in (old, new, EMPTY_HEADER)


geometries = st.builds(
    SlabGeometry,
    st.integers(1, 20),
    st.integers(0, 2**20).map(align),
    st.integers(0, 2**40).map(align),
)


@given(geometry=geometries)
def test_a_geometry_reads_as_written(geometry: SlabGeometry) -> None:
    assert SlabGeometry.unpack(page_of(geometry.pack()), geometry.nbytes) == geometry


@given(geometry=geometries)
def test_slots_start_at_pages_without_gap_or_overlap(geometry: SlabGeometry) -> None:
    position = PAGE
    for index in range(geometry.slots):
        assert geometry.slot_offset(index) == position
        assert geometry.meta_offset(index) == position + PAGE
        assert geometry.data_offset(index) == position + PAGE + geometry.meta_capacity
        assert geometry.data_offset(index) % PAGE == 0
        position = geometry.data_offset(index) + geometry.data_capacity
    assert position == geometry.nbytes


@given(geometry=geometries, difference=st.integers(-(2**20), 2**20).filter(bool))
def test_a_geometry_of_another_size_is_refused(geometry: SlabGeometry, difference: int) -> None:
    with pytest.raises(CorruptCheckpointError, match="not a slab"):
        SlabGeometry.unpack(page_of(geometry.pack()), geometry.nbytes + difference)


@pytest.mark.parametrize(
    "page",
    [
        bytes(PAGE),
        b"\xff" * PAGE,
        page_of(struct.pack("<8sIIQQ", b"FLASHSLB", 2, 1, 0, 0)),
        page_of(struct.pack("<8sIIQQ", b"FLASHSLB", 1, 0, 0, 0)),
        page_of(struct.pack("<8sIIQQ", b"flashslb", 1, 1, 0, 0)),
    ],
    ids=["zeros", "ones", "another version", "no slots", "another mark"],
)
def test_memory_without_the_magic_bytes_is_refused(page: bytes) -> None:
    for nbytes in (PAGE, 2 * PAGE):
        with pytest.raises(CorruptCheckpointError, match="not a slab"):
            SlabGeometry.unpack(page, nbytes)


@given(nbytes=st.integers(0, 2**50))
def test_alignment_rounds_up_to_whole_pages(nbytes: int) -> None:
    assert align(nbytes) % PAGE == 0
    assert nbytes <= align(nbytes) < nbytes + PAGE


# ---------------------------------------------------------------------- a slot in a slab


def meta_of(common: bytes = b"") -> SlotMeta:
    piece = Piece("w", "weight", "F32", (4, 5), (1, 0), (2, 5), 3, 9)
    layout = PlanCache().layout([piece])
    return SlotMeta(
        root="/a",
        rank=3,
        world_size=4,
        coordinates=Coordinates(tp=1, dp=1),
        template_fingerprint=layout.template_fingerprint,
        template=layout.template,
        placement=layout.placement,
        common=common,
        description={"layers": 3, "name": "ünï", "none": None},
        retain_interval=7,
    )


def test_a_slot_s_metadata_reads_as_written() -> None:
    meta = meta_of(os.urandom(10_000))
    encoded = msgspec.msgpack.encode(meta)
    slab = Slab.create(2, len(encoded), 100, "0")
    slot = slab.slots[1]
    slot.set_header(SlotHeader(SlotState.STAGED, 1, "ab", len(encoded), 100))
    slot.set_meta(encoded)
    assert slot.meta == meta
    slab.close()


def test_metadata_with_any_changed_byte_or_length_is_refused() -> None:
    slab = Slab.create(1, 100, 100, "0")
    (slot,) = slab.slots
    header = SlotHeader(SlotState.STAGED, 1, "ab", 100, 100)
    slot.set_header(header)
    slot.set_meta(msgspec.msgpack.encode("x" * 98))
    start = slab.geometry.meta_offset(0)
    for position in range(100):
        slab.memory[start + position] ^= 1
        with pytest.raises(CorruptCheckpointError, match="slot 0: its description has changed"):
            _ = slot.meta
        slab.memory[start + position] ^= 1
    for nbytes in (0, 50):
        slot.set_header(msgspec.structs.replace(header, meta_nbytes=nbytes))
        with pytest.raises(CorruptCheckpointError, match="slot 0: its description"):
            _ = slot.meta
    slab.close()


def test_a_slot_s_header_keeps_within_its_slot_and_changes_its_state_alone() -> None:
    slab = Slab.create(1, 100, 100, "0")
    (slot,) = slab.slots
    header = SlotHeader(SlotState.STAGING, 12, "ab", 1, 2)
    slot.set_header(header)
    for state in SlotState:
        slot.set_state(state)
        assert slot.header == msgspec.structs.replace(header, state=state)
    for sizes in ((2**60, 1), (1, 2**60)):
        slot.set_header(SlotHeader(SlotState.STAGED, 1, "ab", *sizes))
        assert slot.header == EMPTY_HEADER
    slab.close()


def test_slots_do_not_overlap_and_their_data_has_the_length_in_the_header() -> None:
    slab = Slab.create(3, 2 * PAGE, 3 * PAGE, "0")
    for slot in slab.slots:
        mark = bytes([slot.index + 1])
        header = SlotHeader(SlotState.STAGED, slot.index, "ab", 2 * PAGE, 3 * PAGE)
        slot.set_header(header)
        slot.set_meta(mark * (2 * PAGE))
        with slot.data() as data:
            assert len(data) == 3 * PAGE
            data[:] = mark * (3 * PAGE)
    for slot in slab.slots:
        assert slot.header.iteration == slot.index
        start = slab.geometry.meta_offset(slot.index)
        assert slab.memory[start : start + 5 * PAGE] == bytes([slot.index + 1]) * (5 * PAGE)
        assert slot.data_offset == start + 2 * PAGE
    assert SlabGeometry.unpack(slab.memory[:PAGE], slab.geometry.nbytes) == slab.geometry
    for nbytes in (0, 1, PAGE + 1, 3 * PAGE):
        slot.set_header(SlotHeader(SlotState.STAGED, 1, "ab", 0, nbytes))
        with slot.data() as data:
            assert data.nbytes == nbytes
    slab.close()
