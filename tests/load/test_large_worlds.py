"""Cost of a load's collectives with 16,384 ranks: calls, bytes on a GPU, objects on the host.

All ranks but this one are simulated: each test defines the values that the process group returns
for them. `test_collectives` and `test_rank_exchange` test the exchange between real ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import tracemalloc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_flashckpt import collectives
from megatron_flashckpt.collectives import (
    PART_NBYTES,
    gather_named,
    gather_objects,
    run_and_agree,
    run_and_gather,
)
from megatron_flashckpt.errors import CorruptCheckpointError, FlashCkptError
from megatron_flashckpt.load.all_to_all import ALIGNMENT, RoundSizes, Stream
from megatron_flashckpt.load.replica_sharing import _codes, _SharedChunks

WORLD = 16_384
RANK = 77
#: The rank that sends another value than all others.
ODD = 12_345
#: A typical summary of a slot: the fingerprint of its plan, and a placement of 60 numbers.
SUMMARY = ("0" * 32, 4096, tuple(range(1000, 1060)))


class EqualRanksGroup:
    """A process group in which all ranks but one send the same value as this rank."""

    def __init__(self, odd: bytes | None) -> None:
        self._odd = odd
        self._received = 0
        self.nbytes: list[int] = []
        """Bytes that each collective call needs on this rank's device."""

    def gather(self, received: torch.Tensor, sent: torch.Tensor, group: Any = None) -> None:
        rows = received.view(WORLD, -1)
        rows[:] = sent
        if self._odd is not None:
            part = self._odd[self._received :][: len(sent)].ljust(len(sent), b"\0")
            if not self.nbytes:
                part = collectives._head(self._odd, len(sent))
            else:
                self._received += len(sent)
            rows[ODD] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        self.nbytes.append(received.nbytes + sent.nbytes)

    def reduce(self, tensor: torch.Tensor, op: Any, group: Any = None) -> None:
        self.nbytes.append(tensor.nbytes)
        if tensor.dtype == torch.int64:
            tensor.fill_(1)  # another rank has failed
            return
        whole = torch.zeros(0, dtype=torch.uint8)
        if self._odd is not None:
            own = bytes(tensor.numpy()[RANK * self.each : (RANK + 1) * self.each])
            content = own * ODD + self._odd + own * (WORLD - ODD - 1)
            whole = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        tensor.copy_(whole)

    each = 0
    """Bytes of the value that all ranks but one send when blobs are exchanged."""


@contextlib.contextmanager
def many_ranks(odd: Any = None, same: Any = None) -> Iterator[EqualRanksGroup]:
    """Make this process one of many ranks: one rank sends `odd`, all others send `same`."""
    others = EqualRanksGroup(None if odd is None else pickle.dumps(odd))
    others.each = len(pickle.dumps(same))
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    replaced: dict[str, Any] = {
        "is_initialized": lambda: True,
        "get_rank": lambda group=None: RANK,
        "get_world_size": lambda group=None: WORLD,
        "get_backend": lambda group=None: "gloo",
        gather: others.gather,
        "all_reduce": others.reduce,
    }
    with mock.patch.multiple(dist, **replaced):
        yield others


def test_agreements_take_one_call_and_one_mebibyte() -> None:
    with many_ranks() as others:
        assert run_and_gather(lambda: (1, None))[1] == [None] * WORLD
    assert len(others.nbytes) == 1
    assert sum(others.nbytes) < 1.2 * 2**20


@pytest.mark.parametrize(
    ("odd", "same", "limit"),
    [
        # Parts fit into a GPU, and equal values are one object.
        (("1" * 32, 1, ()), SUMMARY, 3 * PART_NBYTES),
        # Other ranks do not pad to one long value.
        ("x" * 100_000, (), 2 * 2**20),
    ],
    ids=["summaries of slots", "one long value"],
)
def test_values_are_gathered_in_parts(odd: Any, same: Any, limit: int) -> None:
    with many_ranks(odd, same) as others:
        values = gather_objects(same)
    assert values == [same] * ODD + [odd] + [same] * (WORLD - ODD - 1)
    assert len({id(value) for value in values}) == 2
    assert max(others.nbytes) <= 1.01 * PART_NBYTES
    assert sum(others.nbytes) < limit


def test_an_error_and_a_list_are_shortened_before_they_are_sent_to_all_ranks() -> None:
    with many_ranks() as others, pytest.raises(CorruptCheckpointError) as raised:
        run_and_agree(lambda: (_ for _ in ()).throw(CorruptCheckpointError("x" * 100_000)))
    assert len(str(raised.value)) == 100_000, "the failed rank keeps the whole message"
    # Here all ranks have such an error: 1.6 GB in all.
    assert sum(others.nbytes) < 3 * PART_NBYTES
    assert max(others.nbytes) <= 1.01 * PART_NBYTES
    failure = collectives.attempt(lambda: (_ for _ in ()).throw(FlashCkptError("y" * 5000))).report
    assert failure is not None
    assert failure.message.endswith(" more characters)")
    assert len(failure.message) < 2100
    lines = [f"weight/layer.{number}" for number in range(10_000)]
    assert collectives.shorten_list(lines[:20]) == tuple(lines[:20])
    cut = collectives.shorten_list(lines)
    assert sum(map(len, cut)) < 2100
    assert cut[-1] == f"... and {len(lines) - len(cut) + 1} more"
    assert len(collectives.shorten_list(["z" * 9000])) == 1


def test_requests_between_ranks_take_one_bit_per_pair() -> None:
    named = [RANK - 1, RANK + 1, 9000]
    with many_ranks() as others:
        askers, is_any = gather_named(named)
        assert (askers, is_any) == ([], True), "no rank names this rank"
        assert gather_named([RANK])[0] == list(range(WORLD))
        assert gather_named([]) == ([], False)
    of_one = sum(others.nbytes) / 3
    assert of_one < 1.01 * WORLD * WORLD / 8
    assert max(others.nbytes) <= 1.01 * PART_NBYTES


lengths = st.lists(st.integers(1, 10_000), max_size=20)


@given(lengths, lengths, st.integers(1, 20_000), st.integers(1, 20_000))
def test_the_bytes_of_a_round_fit_into_every_rank_s_room(one, other, room, other_room):
    """The streams have any length; the smallest buffers determine the number of rounds."""
    streams = [
        {peer: Stream([(0, nbytes)]) for peer, nbytes in enumerate(each)} for each in (one, other)
    ]
    rooms = (room, other_room)
    proposals = [RoundSizes.of(each, nbytes) for each, nbytes in zip(streams, rooms, strict=True)]
    agreed = RoundSizes(
        max(sizes.most_rounds for sizes in proposals), min(sizes.least for sizes in proposals)
    )
    for each, nbytes, lengths_of in zip(streams, rooms, (one, other), strict=True):
        sent = dict.fromkeys(each, 0)
        for number in range(agreed.rounds(each)):
            cuts = agreed.cuts(each, number)
            sizes = {peer: sum(b - a for *_, a, b in of_peer) for peer, of_peer in cuts.items()}
            assert all(sizes.values()), "no empty messages"
            assert sum(sizes.values()) <= max(nbytes, 4 * ALIGNMENT * len(each))
            for peer, size in sizes.items():
                sent[peer] += size
        assert sent == dict(enumerate(lengths_of))
        assert agreed.rounds(each) <= agreed.most_rounds


def test_a_heavy_peer_adds_few_rounds_to_the_minimum() -> None:
    """16 peers hold the experts and 1,007 peers hold little, as in a job of 1,024 replicas."""
    heavy, light, room = 120 * 2**20, 20_000, 64 * 2**20
    sizes = np.array([heavy] * 16 + [light] * 1007)
    streams = {peer: Stream([(0, int(nbytes))]) for peer, nbytes in enumerate(sizes)}
    round_sizes = RoundSizes.of(streams, room)
    assert round_sizes.rounds(streams) <= 1.4 * sizes.sum() / room
    # With equal shares of the room for all peers, the exchange would take this many rounds.
    assert heavy // (room // len(streams)) > 1900


chunks = st.tuples(st.integers(0, 9), st.sampled_from([0, 1, 7, 2**40]))


@given(st.lists(st.lists(chunks, unique=True, max_size=12).map(sorted), max_size=6))
def test_each_chunk_that_several_replicas_need_has_one_reader_among_them(needs):
    shared = _SharedChunks.of([_codes(keys) for keys in needs])
    needed = list(itertools.chain(*needs))
    assert shared.keys == sorted({key for key in needed if needed.count(key) > 1})
    lists = shared.assigned()
    assert sorted(itertools.chain(*lists)) == list(range(len(shared.keys)))
    for member, positions in enumerate(lists):
        assert {shared.keys[position] for position in positions} <= set(needs[member])
    for position, key in enumerate(shared.keys):
        assert shared.needs[position].tolist() == [key in keys for keys in needs]
    assert shared.most_needed(range(len(shared.keys))) == max(
        (len(set(shared.keys) & set(keys)) for keys in needs), default=0
    )


def test_the_choice_of_readers_takes_few_bytes_per_needed_chunk() -> None:
    """Each replica needs the weights in all shards. As tuples in sets, a chunk took 170 bytes."""
    replicas, of_shard, own = 256, 8, 64
    weights = list(itertools.product(range(replicas), range(of_shard)))
    needs = [
        _codes([*weights, *((rank, of_shard + n) for n in range(own))]) for rank in range(replicas)
    ]
    tracemalloc.start()
    shared = _SharedChunks.of(needs)
    lists = shared.assigned()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert shared.keys == weights
    assert {len(positions) for positions in lists} == {of_shard}
    assert peak < 24 * sum(map(len, needs))
