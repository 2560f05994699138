"""Optimizer state of parts of a model, which Megatron's own formats cannot store.

Frozen parameters, which an optimizer does not step, have no state. Layers that share a key are one
global tensor. If some of them are frozen, the tensors of their optimizer state have gaps.
"""

from __future__ import annotations

import math

import torch

from megatron_flashckpt.convert.common.contents import Contents, refuse_low_halves
from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.layout.piece import BUFFER, MASTER, WEIGHT
from megatron_flashckpt.megatron_lm.optimizer_state import MASTER_STATE

#: Explanation for optimizer state of fewer parameters than the model has.
FEWER = (
    "parameters that the job had frozen have no optimizer state, and these files do not say which "
    "parameters were frozen; load the checkpoint with megatron_flashckpt in a job with the same "
    "frozen parameters, whose next save is in the format flashckpt"
)


def refuse_partial_state(contents: Contents) -> None:
    """Raise if Megatron's own formats cannot store the optimizer state.

    Raises:
        UnsupportedError: some layers under a key were frozen while others trained; the message
            names all such keys. Or masters are split between weights and optimizer.
    """
    # Layers in fp32 are their own masters.
    mastered = {
        tensor.key: sum(
            math.prod(box[1]) for box in tensor.boxes if tensor.dtype_of(box).itemsize == 2
        )
        for tensor in contents.tensors
        if tensor.kind == WEIGHT
    }
    keys = set()
    for tensor in contents.tensors:
        if tensor.kind in (WEIGHT, BUFFER):
            continue
        if tensor.kind == MASTER_STATE and torch.int16 in tensor.dtypes:
            refuse_low_halves(f"{contents.place}: {tensor.name}")
        wanted = math.prod(tensor.shape)
        if tensor.kind == MASTER:
            wanted = mastered.get(tensor.key, wanted)
        if sum(math.prod(shape) for _, shape in tensor.boxes) < wanted:
            keys.add(tensor.key)
    if keys:
        raise UnsupportedError(
            f"{contents.place}: some of the layers under {', '.join(sorted(keys))} were frozen and "
            "have no optimizer state, but this format stores the state of all layers under a key "
            "or of none; convert to flashckpt, or the weights alone with --weights-only"
        )
