"""Whether optimizer state fits the weights: the only way to see that a saver mixed it up."""

from __future__ import annotations

import torch

from megatron_flashckpt.convert.contents import Contents, GlobalTensor
from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.layout.piece import MASTER, WEIGHT


def refuse_damage(contents: Contents) -> None:
    """Read all masters and weights; raise if a weight is not its master rounded to 16 bit.

    Raises:
        CorruptCheckpointError: names all tensors that differ, and how much of them does.
    """
    differing = masters_that_differ(contents)
    if differing:
        raise CorruptCheckpointError(
            f"{contents.place}: the fp32 masters of {len(differing)} tensors are not what their "
            f"16-bit weights were rounded from: {'; '.join(differing)}. {contents.suspicion}. "
            "Their moments are then wrong too. Convert the weights alone with --weights-only, or, "
            "if these weights are meant to differ (fp8, qk-clip), all of it with --accept-damage"
        )


def masters_that_differ(contents: Contents) -> list[str]:
    """Return one phrase for every tensor whose weight is not its master, rounded."""
    weights = {tensor.key: tensor for tensor in contents.tensors if tensor.kind == WEIGHT}
    found = []
    for master in contents.tensors:
        weight = weights.get(master.key)
        if master.kind == MASTER and weight is not None:
            count = sum(_differing(master, weight))
            if count:
                numel = master.nbytes // master.dtype.itemsize
                found.append(f"{master.key} ({count} of {numel} elements)")
    return found


def _differing(master: GlobalTensor, weight: GlobalTensor) -> list[int]:
    counts = []
    for box in master.boxes:
        rounded = master.read(box).to(weight.dtype)
        # By bits: a NaN fits a NaN.
        same = rounded.view(torch.int16) == weight.read(box).view(torch.int16)
        counts.append(int((~same).sum()))
    return counts
