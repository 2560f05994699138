"""Comparison of masters with weights: the only check that finds mixed-up optimizer state."""

from __future__ import annotations

import math

import torch

from megatron_flashckpt.convert.common.contents import Contents
from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.layout.piece import MASTER, WEIGHT


def refuse_damage(contents: Contents) -> None:
    """Read all masters and weights; raise if a weight is not its rounded master.

    Raises:
        CorruptCheckpointError: the message names all tensors that differ, with element counts.
    """
    differing = masters_that_differ(contents)
    if differing:
        raise CorruptCheckpointError(
            f"{contents.place}: the fp32 masters of {len(differing)} tensors are not what their "
            f"weights were rounded from: {'; '.join(differing)}. {contents.suspicion}. "
            "Their moments are then wrong too. Convert the weights alone with --weights-only, or, "
            "if these weights differ on purpose (fp8, qk-clip), everything with --accept-damage"
        )


def masters_that_differ(contents: Contents) -> list[str]:
    """Return one phrase for every tensor whose weight is not its rounded master."""
    weights = {tensor.key: tensor for tensor in contents.tensors if tensor.kind == WEIGHT}
    phrases = []
    for master in (*contents.tensors, *contents.doubles):
        weight = weights.get(master.key)
        if master.kind == MASTER and weight is not None:
            count = sum(_differing(weight.read(box), master.read(box)) for box in master.boxes)
            if count:
                numel = sum(math.prod(shape) for _, shape in master.boxes)
                phrases.append(f"{master.key} ({count} of {numel} elements)")
    return phrases


def _differing(weight: torch.Tensor, master: torch.Tensor) -> int:
    return int((bits(weight) != bits(master.to(weight.dtype))).sum())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers, so that NaN equals itself and -0 differs from 0."""
    return tensor.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    )
