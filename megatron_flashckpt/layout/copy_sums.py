"""Sums of a rank's copies. Separate from `copies` because the agent runs without numpy."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from megatron_flashckpt.layout.copies import compared_numel
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import Piece

#: Elements summed per step; each needs a few times 8 bytes of scratch memory.
_AT_ONCE = 2**16


def weighted_sum(piece: Piece, content: Any) -> int:
    """Return the weighted sum of the first `compared_numel` elements of `piece`, modulo 2**64.

    The weight of an element is an odd number derived from the element's position in its box.

    Args:
        content: buffer that starts with the bytes of these elements.
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
    """Return a pseudo-random odd number for each input (the mixer of SplitMix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (numbers ^ (numbers >> np.uint64(31))) | np.uint64(1)
