"""Frozen parameters in conversions: parameters that an optimizer does not step have no state.

Layers that share a key are one global tensor. If some of them are frozen, the tensors of their
optimizer state have gaps, which Megatron's own formats cannot store.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_flashckpt.convert.common.contents import Contents
from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.layout.piece import BUFFER, MASTER, WEIGHT

#: Explanation for optimizer state of fewer parameters than the model has.
FEWER = (
    "parameters that the job had frozen have no optimizer state, and these files do not say which "
    "parameters were frozen; load the checkpoint with megatron_flashckpt in a job with the same "
    "frozen parameters, whose next save is in the format flashckpt"
)


def refuse_partly_frozen(contents: Contents) -> None:
    """Raise if some layers under a key were frozen while others trained.

    Raises:
        UnsupportedError: names all such keys.
    """
    keys = sorted(set(_partly_frozen(contents)))
    if keys:
        raise UnsupportedError(
            f"{contents.place}: some of the layers under {', '.join(keys)} were frozen and have no "
            "optimizer state, but this format stores the state of all layers under a key or of "
            "none; convert to flashckpt, or the weights alone with --weights-only"
        )


def _partly_frozen(contents: Contents) -> Iterator[str]:
    # Layers in fp32 are their own masters.
    mastered = {
        tensor.key: sum(
            math.prod(box[1]) for box in tensor.boxes if tensor.dtype_of(box).itemsize == 2
        )
        for tensor in contents.tensors
        if tensor.kind == WEIGHT
    }
    for tensor in contents.tensors:
        if tensor.kind in (WEIGHT, BUFFER):
            continue
        wanted = math.prod(tensor.shape)
        if tensor.kind == MASTER:
            wanted = mastered.get(tensor.key, wanted)
        if sum(math.prod(shape) for _, shape in tensor.boxes) < wanted:
            yield tensor.key
