"""Sums of copies: they add up over any shards, and differ if any bit differs."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from megatron_flashckpt.layout import copies
from megatron_flashckpt.layout.completeness import incomplete
from megatron_flashckpt.layout.copies import (
    CopySum,
    added_up,
    compared,
    copy_kind,
    differing_keys,
    is_copy,
    split_kind,
)
from megatron_flashckpt.layout.copy_sums import weighted_sum
from megatron_flashckpt.layout.piece import Piece, equal_shares
from tests.support.worlds import sources_of

SHAPE = (5, 7)


def piece(start: int, end: int, *, kind: str = "exp_avg", layer: int = 0, **more: object) -> Piece:
    fields = {"key": "norm", "dtype": "F32", "global_shape": (3, *SHAPE), "shape": (1, *SHAPE)}
    return Piece(kind=kind, offset=(layer, 0, 0), start=start, end=end, **{**fields, **more})


def summed(content: np.ndarray, replicas: int, copy: str = "") -> list[tuple[CopySum, ...]]:
    """Return the sums of a copy of all layers that `replicas` ranks share."""
    sizes = [(math.prod(SHAPE), 4)] * len(content)
    of_ranks = []
    for replica in range(replicas):
        shares = equal_shares(sizes, replicas, replica)
        parts = [
            (piece(low, high, kind=copy_kind("exp_avg", copy), layer=layer), low, high)
            for layer, (low, high) in enumerate(shares)
            if low < high
        ]
        of_ranks.append(
            added_up(
                (it, weighted_sum(it, content[it.offset[0]].reshape(-1)[low:high].tobytes()))
                for it, low, high in parts
            )
        )
    return of_ranks


@pytest.fixture
def content() -> np.ndarray:
    return np.random.default_rng(7).normal(size=(3, *SHAPE)).astype(np.float32)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_equal_copies_have_equal_sums_on_any_number_of_replicas(
    content: np.ndarray, replicas: int
) -> None:
    ranks = summed(content, 2) + summed(content.copy(), replicas, "0.1")
    assert differing_keys(ranks) == frozenset()


@pytest.mark.parametrize("bit", [0, 12, 31])
def test_one_bit_makes_copies_differ(content: np.ndarray, bit: int) -> None:
    other = content.copy()
    other.view(np.uint32)[2, 4, 3] ^= np.uint32(1 << bit)
    ranks = summed(content, 2) + summed(content, 2, "0.1") + summed(other, 3, "0.2")
    assert differing_keys(ranks) == {"norm"}


def test_exchanged_layers_or_elements_make_copies_differ(content: np.ndarray) -> None:
    turned, layers = content[:, ::-1].copy(), content[::-1].copy()
    for other in (turned, layers):
        assert differing_keys(summed(content, 1) + summed(other, 1, "0.1")) == {"norm"}


def test_a_copy_on_two_ranks_counts_twice(content: np.ndarray) -> None:
    ranks = summed(content, 1) + 2 * summed(content, 2, "1.0")
    assert differing_keys(ranks) == frozenset()
    other = content + 1
    ranks = summed(content, 1) + summed(content, 2, "1.0") + summed(other, 1, "1.0")
    assert differing_keys(ranks) == {"norm"}


def test_partial_copies_are_not_compared(content: np.ndarray) -> None:
    other = content + 1
    assert differing_keys(summed(content, 1) + summed(other, 2, "0.1")[:1]) == frozenset()
    assert differing_keys(summed(other, 1, "0.1")) == frozenset(), (
        "there is no main copy to compare"
    )


def test_only_the_first_elements_of_a_box_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "COMPARED_NUMEL", 10)
    content = np.arange(35, dtype=np.float32)
    whole = weighted_sum(piece(0, 35), content)
    assert whole == weighted_sum(piece(0, 10), content)
    assert (
        whole
        == (weighted_sum(piece(0, 4), content) + weighted_sum(piece(4, 35), content[4:])) % 2**64
    )
    assert [copies.compared_numel(piece(low, 35)) for low in (0, 9, 10, 20)] == [10, 1, 0, 0]


def test_elements_of_any_type_are_summed() -> None:
    seed = random.Random(3)
    for dtype, width in (("BF16", 2), ("F8_E4M3", 1), ("I64", 8)):
        data = seed.randbytes(35 * width)
        changed = bytes([data[0], data[1] ^ 1, *data[2:]])
        it = piece(0, 35, dtype=dtype)
        assert (
            weighted_sum(it, data) == weighted_sum(it, bytearray(data)) != weighted_sum(it, changed)
        )


def test_all_sums_have_the_same_size() -> None:
    assert [
        len(it.total) for total in (0, 1, 2**64 - 1) for it in added_up([(piece(0, 35), total)])
    ]
    lengths = {
        len(it.total) for total in (0, 1, 2**64 - 1) for it in added_up([(piece(0, 35), total)])
    }
    assert lengths == {8}


def test_a_copy_s_kind_names_the_copy() -> None:
    assert copy_kind("master", "") == "master"
    kind = copy_kind("master", "0.1")
    assert (is_copy(kind), is_copy("master")) == (True, False)
    assert (split_kind(kind), split_kind("master")) == (("master", "0.1"), ("master", ""))


class Report:
    def __init__(self, sums: tuple[CopySum, ...] | None, differing: tuple[str, ...] = ()) -> None:
        self.sums = sums
        self.differing = differing


def test_copies_are_compared_only_if_all_ranks_have_sums(content: np.ndarray) -> None:
    (main,), (other,) = summed(content, 1), summed(content + 1, 1, "0.1")
    assert compared([Report(main), Report(other)]) == ({"norm"}, True)
    assert compared([Report(main), Report(None)]) == (frozenset(), False)
    assert compared([Report(main), Report(None, ("bias",))]) == ({"bias"}, False)
    assert compared([Report(main, ("bias",)), Report(other)]) == ({"bias", "norm"}, True)


def test_a_checkpoint_may_lack_parts_of_copies_but_not_of_main_tensors() -> None:
    layers = [piece(0, 35, kind="weight", layer=layer) for layer in range(3)]
    part = piece(0, 9, kind=copy_kind("weight", "0.1"), layer=1)
    assert incomplete(sources_of([layers, [part]])) == []
    assert incomplete(sources_of([layers[1:], [part]])) != []
