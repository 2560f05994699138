"""Whole global tensors of opened checkpoints, compared bit for bit."""

from __future__ import annotations

import torch

from megatron_flashckpt.convert.common.contents import Contents

Wholes = dict[tuple[str, str], torch.Tensor]
"""Tensors by kind and key."""


def wholes(contents: Contents) -> Wholes:
    """Return every tensor, read in one piece."""
    return {
        (tensor.kind, tensor.key): tensor.read(((0,) * len(tensor.shape), tensor.shape))
        for tensor in contents.tensors
    }


def assert_equal(one: Wholes, other: Wholes) -> None:
    assert one.keys() == other.keys()
    unequal = [
        name
        for name in one
        if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])
    ]
    assert unequal == []
