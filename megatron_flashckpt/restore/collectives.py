"""Small objects and errors between the ranks of a group. Collective; used in loads only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_flashckpt.errors import FlashCkptError

_T = TypeVar("_T")

Group = Any
"""A `torch.distributed` process group; None: all ranks."""


def gather_objects(value: Any, group: Group = None) -> list[Any]:
    """Return the `value` of every rank of `group`, in rank order. Collective."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def broadcast_object(value: Any) -> Any:
    """Return rank 0's `value`. Collective."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def together(work: Callable[[], _T], group: Group = None) -> _T:
    """Return `work()`, or raise on all ranks of `group` if it raised on any. Collective.

    Raises:
        FlashCkptError: the error of the lowest rank that has one, with its rank.
    """
    result: _T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as failure:  # whatever it is: the other ranks are about to wait for us
        error = failure
    rank = dist.get_rank() if dist.is_initialized() else 0
    said = None if error is None else f"rank {rank}: {type(error).__name__}: {error}"
    failed = [other for other in gather_objects(said, group) if other is not None]
    if error is not None:
        raise error
    if failed:
        raise FlashCkptError(failed[0])
    return result  # type: ignore[return-value]
