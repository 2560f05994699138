"""Small objects and errors between the ranks of a group. Collective: for the start and for loads.

Of saves only those under `busy: skip` use one, `reduce_int`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from megatron_flashckpt import errors
from megatron_flashckpt.errors import FlashCkptError, StorageError, is_damage

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


def reduce_int(value: int, how: Literal["sum", "max"], group: Group = None) -> int:
    """Return the sum or the largest of the values of `group`, below 2**63. Collective."""
    if not dist.is_initialized():
        return value
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    reduced = torch.tensor([value], dtype=torch.int64, device=device)
    op = dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX
    dist.all_reduce(reduced, op, group)
    return int(reduced.item())


def together(work: Callable[[], _T], group: Group = None) -> _T:
    """Return `work()`, or raise on all ranks of `group` if it raised on any. Collective.

    Raises:
        FlashCkptError: of one class on all ranks, so that all decide alike what to do about it. If
            several ranks failed that is the error of the lowest, unless another is no damage: what
            is wrong with the job comes first. A rank with an error of that class raises its own.
    """
    result: _T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as failure:  # whatever it is: the other ranks are about to wait for us
        error = failure
    # One number, as all is well nearly always: a load asks twenty times, of thousands of ranks.
    if not reduce_int(error is not None, "max", group):
        return result  # type: ignore[return-value]
    gathered = gather_objects(None if error is None else _said(error), group)
    failures = [said for said in gathered if said is not None]
    agreed = min(failures, key=lambda said: said.damage)
    if error is None:
        raise agreed.error()
    if _said(error)[:2] == agreed[:2]:
        raise error
    raise agreed.error() from error


class _Said(NamedTuple):
    """What a rank tells the others of its error."""

    damage: bool
    kind: str
    """Name of the class, if it is one of ours."""
    number: int | None
    message: str

    def error(self) -> FlashCkptError:
        made: FlashCkptError
        if self.kind == StorageError.__name__:
            made = StorageError(self.number, self.message)
        else:
            made = getattr(errors, self.kind)(self.message)
        made.repeats = True
        return made


def _said(error: Exception) -> _Said:
    rank = dist.get_rank() if dist.is_initialized() else 0
    name = type(error).__name__
    ours = getattr(errors, name, None) is type(error)
    number = error.errno if isinstance(error, StorageError) else None
    # Of an OSError, str() puts the number first.
    text = error.strerror if isinstance(error, StorageError) else str(error)
    repeats = isinstance(error, FlashCkptError) and error.repeats
    message = str(text) if repeats else f"rank {rank}: {name}: {text}"
    return _Said(is_damage(error), name if ours else FlashCkptError.__name__, number, message)
