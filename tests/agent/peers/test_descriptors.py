"""Descriptors of slots that are sent to other nodes: one reading of a slot serves all purposes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from unittest import mock

import pytest

from megatron_flashckpt.agent import slot_bytes
from megatron_flashckpt.agent.peers.redundancy import Redundancy
from megatron_flashckpt.agent.protocol import OpenPeers
from megatron_flashckpt.agent.rank_slots import RankSlots
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES, chunk_digest
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotHeader, SlotState
from tests.support.trainer import PATIENCE_S, new_save_id

NBYTES = CHUNK_NBYTES + 100


@pytest.fixture
def slots() -> Iterator[RankSlots]:
    slab = Slab.create(2, 0, NBYTES, "0")
    yield RankSlots(slab)
    slab.close()


@pytest.fixture
def peers(slots: RankSlots) -> Iterator[Redundancy]:
    made = Redundancy(OpenPeers("127.0.0.1", 1), lambda: {0: slots})
    yield made
    made.close()


def stage(slots: RankSlots, iteration: int) -> int:
    index = slots.acquire()
    header = SlotHeader(SlotState.KEPT, iteration, new_save_id(), 0, NBYTES)
    slots.slab.slots[index].set_header(header)
    return index


def expected(slots: RankSlots, index: int) -> tuple[str, ...]:
    with slots.slab.slots[index].data() as data:
        return chunk_digest(data[:CHUNK_NBYTES]), chunk_digest(data[CHUNK_NBYTES:])


def test_a_slot_is_read_once_for_its_copies_and_for_a_restart(
    slots: RankSlots, peers: Redundancy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that has changed since the first reading must not get digests that fit it."""
    index = stage(slots, 1)
    digests = expected(slots, index)
    first = peers._descriptor(0, slots, index)
    (offer,) = slots.offers()
    assert first is not None
    assert (first.digests, offer.digests) == (digests, digests)
    slots.infos[index].descriptor = None
    with slots.slab.slots[index].data() as data:
        data[50] ^= 4
    monkeypatch.setattr(slot_bytes, "chunk_digest", None)
    assert peers._descriptor(0, slots, index) == first


def test_a_slot_that_is_overwritten_while_it_is_read_has_no_descriptor(
    slots: RankSlots, peers: Redundancy
) -> None:
    first = stage(slots, 1)
    stage(slots, 2)
    taken = slot_bytes.descriptor_of

    def late(*arguments: object) -> object:
        descriptor = taken(*arguments)  # type: ignore[arg-type]
        assert stage(slots, 3) == first
        return descriptor

    with mock.patch.object(slot_bytes, "descriptor_of", late):
        assert peers._descriptor(0, slots, first) is None
    assert slots.infos[first].digests is None, "the digests of the former save"


def test_overtaken_requests_are_dropped_without_reading(
    slots: RankSlots, peers: Redundancy
) -> None:
    """Saves that follow each other fast made requests pile up, each of which read the slot."""
    free, ended = threading.Event(), threading.Event()
    peers._descriptor_thread.submit(free.wait, PATIENCE_S)
    for iteration in range(1, 8):
        peers.staged(0, slots, stage(slots, iteration))
    with mock.patch.object(peers, "_descriptor", wraps=peers._descriptor) as described:
        free.set()
        peers._descriptor_thread.submit(ended.set)
        assert ended.wait(PATIENCE_S)
    assert described.call_count == 2, "one per slot"
