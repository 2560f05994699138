"""A checkpoint of many boxes that are created on each read."""

from __future__ import annotations

import dataclasses

import torch

from megatron_flashckpt.convert.common.contents import Contents, GlobalTensor
from megatron_flashckpt.layout.reshard import Box
from tests.convert import made

BOXES = 48
#: Shape of a bfloat16 box of 4 MiB.
EXTENT = (1, 2048, 1024)


def contents(boxes: int) -> Contents:
    """Return one stacked weight of `boxes` layers."""
    shape = (boxes, *EXTENT[1:])

    def read(box: Box) -> torch.Tensor:
        return torch.full(box[1], float(box[0][0]), dtype=torch.bfloat16)

    cut = tuple(((layer, 0, 0), EXTENT) for layer in range(boxes))
    weight = GlobalTensor(
        "decoder.layers.mlp.linear_fc1.weight", "weight", torch.bfloat16, shape, cut, read
    )
    return dataclasses.replace(made.contents(), tensors=[weight], optimizer=None)
