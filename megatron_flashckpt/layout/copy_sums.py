"""Sums of what a rank has of copies. Apart from `copies`, because the agent does without numpy."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from megatron_flashckpt.layout.copies import compared_numel
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import Piece

#: Elements summed up at a time: they take a few times 8 bytes each.
_AT_ONCE = 2**16


def weighed(piece: Piece, content: Any) -> int:
    """Return the sum of the first elements of `piece`, `compared_numel` of them, modulo 2**64.

    Each element counts times an odd number that follows from its place in its box.

    Args:
        content: their bytes, as a buffer; more may follow.
    """
    numel = compared_numel(piece)
    width = itemsize(piece.dtype)
    elements = np.frombuffer(content, np.dtype(f"<u{width}"), numel)
    box = msgspec.msgpack.encode((piece.offset, piece.shape))
    seed = np.uint64(xxhash.xxh3_64_intdigest(box))
    total = 0
    for low in range(0, numel, _AT_ONCE):
        high = min(low + _AT_ONCE, numel)
        places = np.arange(piece.start + low, piece.start + high, dtype=np.uint64)
        weights = _mixed(places + seed)
        total += int((weights * elements[low:high]).sum(dtype=np.uint64))
    return total % 2**64


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return an odd number for each, as good as random (the mixer of SplitMix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (numbers ^ (numbers >> np.uint64(31))) | np.uint64(1)
