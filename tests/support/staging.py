"""Copies to the stager, each given with its tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_flashckpt.memory.runs import Copy
from megatron_flashckpt.save.copy_figures import CopyFigures
from megatron_flashckpt.save.stager import Stager


class TensorCopy(NamedTuple):
    """A range of a tensor, and its offset in the slab."""

    source: torch.Tensor
    offset: int
    early: bool
    start: int = 0
    end: int | None = None


def stage(
    stager: Stager,
    copies: list[TensorCopy],
    finish: Callable[[float, BaseException | None], None],
) -> CopyFigures:
    """Call `stager.stage`; ranges of one tensor are sections of one source."""
    tensors = list({id(copy.source): copy.source for copy in copies}.values())
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    parts: dict[bool, list[Copy]] = {True: [], False: []}
    for source, offset, early, start, end in copies:
        parts[early].append(Copy(numbers[id(source)], offset, start, end))
    return stager.stage(tensors, parts[True], parts[False], finish, data_offset=0)
