"""Small objects and errors between the ranks of a group. Collective: for the start and for loads.

Of saves only those under `busy: skip` use one, `reduce_int`. Objects travel as pickles, as those of
`torch.distributed` do: the ranks of a job are one program. What small ones take is one collective,
where `all_gather_object` takes two.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from megatron_flashckpt import errors
from megatron_flashckpt.errors import FlashCkptError, StorageError, is_damage

_T = TypeVar("_T")
_S = TypeVar("_S")

Group = Any
"""A `torch.distributed` process group; None: all ranks."""


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


#: An object that fits into the head takes one collective; a larger one follows in parts.
_HEAD_NBYTES = 4096
_LENGTH_NBYTES = 8
#: Bytes of all ranks in one collective. With NCCL they lie in GPU memory, twice in a gather; a
#: restarted job may have little room: 1024 ranks with 10 MiB each would take 20 GiB at once.
PART_NBYTES = 16 * 2**20


def gather_objects(value: Any, group: Group = None) -> list[Any]:
    """Return the `value` of every rank of `group`, in rank order. Collective."""
    if not dist.is_initialized():
        return [value]
    mine = pickle.dumps(value)
    heads = _all_gathered(_head(mine), group)
    lengths = [_length(head) for head in heads]
    if max(lengths) <= _HEAD_NBYTES - _LENGTH_NBYTES:
        bodies = [head[_LENGTH_NBYTES:] for head in heads]
    else:
        bodies = _gathered_by_parts(mine, lengths, group)
    return [pickle.loads(body[:n]) for body, n in zip(bodies, lengths, strict=True)]


def broadcast_object(value: Any, source: int = 0) -> Any:
    """Return the `value` of rank `source`. Collective."""
    if not dist.is_initialized():
        return value
    is_source = dist.get_rank() == source
    mine = pickle.dumps(value) if is_source else b""
    head = _broadcast(_head(mine), source)
    length = _length(head)
    if length <= _HEAD_NBYTES - _LENGTH_NBYTES:
        body = head[_LENGTH_NBYTES:]
    else:
        body = _broadcast_by_parts(mine if is_source else bytes(length), source)
    return value if is_source else pickle.loads(body[:length])


def exchange_blobs(lengths: Sequence[int], mine: Mapping[int, bytes], group: Group = None) -> bytes:
    """Return all blobs, one after the other, given those that this rank contributes. Collective.

    The number of collectives follows from the bytes, at most `PART_NBYTES` in each, and not from
    the number of blobs or ranks.

    Args:
        lengths: the length of every blob; equal on all ranks.
        mine: by number, the blobs that this rank contributes. Exactly one rank has each.
    """
    starts = [0, *itertools.accumulate(lengths)]
    body = bytearray(starts[-1])
    for number, blob in mine.items():
        body[starts[number] : starts[number + 1]] = blob
    if not dist.is_initialized():
        return bytes(body)
    received = bytearray()
    for start in range(0, len(body), PART_NBYTES):
        # All other ranks contribute zeros, so the sum of all ranks is the blob.
        part = _on_device(bytes(body[start : start + PART_NBYTES]), group)
        dist.all_reduce(part, dist.ReduceOp.SUM, group)
        received += part.cpu().numpy().data
    return bytes(received)


def _gathered_by_parts(mine: bytes, lengths: list[int], group: Group) -> list[memoryview]:
    """Return the bytes of every rank; `lengths` are their numbers of bytes. Collective."""
    longest = max(lengths)
    step = max(PART_NBYTES // len(lengths), 1)
    bodies = [bytearray() for _ in lengths]
    for start in range(0, longest, step):
        part = mine[start : start + step].ljust(min(step, longest - start), b"\0")
        for body, length, received in zip(bodies, lengths, _all_gathered(part, group), strict=True):
            body += received[: max(length - start, 0)]
    return [memoryview(body) for body in bodies]


def _broadcast_by_parts(mine: bytes, source: int) -> memoryview:
    """Return the bytes of rank `source`; `mine` has the same length on every rank. Collective."""
    body = bytearray()
    for start in range(0, len(mine), PART_NBYTES):
        body += _broadcast(mine[start : start + PART_NBYTES], source)
    return memoryview(body)


def _head(encoded: bytes) -> bytes:
    """Return the length, and what follows of `encoded` if that is all of it."""
    room = _HEAD_NBYTES - _LENGTH_NBYTES
    begin = encoded if len(encoded) <= room else b""
    return len(encoded).to_bytes(_LENGTH_NBYTES, "little") + begin.ljust(room, b"\0")


def _length(head: memoryview) -> int:
    return int.from_bytes(head[:_LENGTH_NBYTES], "little")


def _all_gathered(mine: bytes, group: Group) -> list[memoryview]:
    """Return the bytes of every rank, as many as there are here."""
    sent = _on_device(mine, group)
    found = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, sent, group=group)
    return [tensor.cpu().numpy().data for tensor in found]


def _broadcast(mine: bytes, source: int) -> memoryview:
    sent = _on_device(mine, None)
    dist.broadcast(sent, src=source)
    found: memoryview = sent.cpu().numpy().data
    return found


def _on_device(encoded: bytes, group: Group) -> torch.Tensor:
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device_of(group))


def device_of(group: Group) -> str:
    """Return where tensors must lie for `group` to send and receive them: `cuda` or `cpu`."""
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def reduce_int(value: int, how: Literal["sum", "max"], group: Group = None) -> int:
    """Return the sum or the largest of the values of `group`, below 2**63. Collective."""
    if not dist.is_initialized():
        return value
    reduced = torch.tensor([value], dtype=torch.int64, device=device_of(group))
    op = dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX
    dist.all_reduce(reduced, op, group)
    return int(reduced.item())


def together(work: Callable[[], _T], group: Group = None) -> _T:
    """Return `work()`, or raise on all ranks of `group` if it raised on any. Collective.

    Raises:
        FlashCkptError: of one class on all ranks, so that all decide alike what to do about it. If
            several ranks failed that is the error of the lowest, unless another is no damage: what
            is wrong with the job comes first. A rank with an error of that class raises its own.
            An error that is not a FlashCkptError becomes one, also on the rank that raised it: a
            caller that catches FlashCkptError must catch it on all ranks or on none.
    """
    tried = attempt(work)
    # One number, as all is well nearly always.
    if reduce_int(tried.error is not None, "max", group):
        raise_agreed(gather_objects(tried.said, group), tried.error)
    return tried.value  # type: ignore[return-value]


def gathered(work: Callable[[], tuple[_T, _S]], group: Group = None) -> tuple[_T, list[_S]]:
    """Return what `work()` made for this rank, and what it made for all of every rank, in order.

    Collective. Raises as `together` does; whether all is well travels with what was made.
    """
    tried = attempt(work)
    mine, ours = (None, None) if tried.value is None else tried.value
    everyone = gather_objects((ours, tried.said), group)
    raise_agreed([said for _, said in everyone], tried.error)
    return mine, [theirs for theirs, _ in everyone]  # type: ignore[return-value]


def from_first(work: Callable[[], _T]) -> _T:
    """Return what `work()` returned on rank 0, or raise on all ranks what it raised. Collective."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    tried: Attempt[_T] = attempt(work) if is_first else Attempt(None, None)
    value, said = broadcast_object((tried.value, tried.said))
    raise_agreed([said], tried.error)
    return value  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class Attempt(Generic[_T]):
    """What became of something that may fail, while the other ranks wait for this one."""

    value: _T | None
    error: Exception | None

    @property
    def said(self) -> Said | None:
        """What the other ranks are told of the error."""
        return None if self.error is None else _said(self.error)


def attempt(work: Callable[[], _T]) -> Attempt[_T]:
    """Return what becomes of `work()`, whatever it raises."""
    try:
        return Attempt(work(), None)
    except Exception as failure:
        return Attempt(None, failure)


def raise_agreed(everyone: list[Said | None], mine: Exception | None) -> None:
    """Raise the error that all ranks agree on, see `together`; nothing if there is none.

    Args:
        everyone: what the ranks said of their errors, alike on all.
    """
    failures = [said for said in everyone if said is not None]
    if not failures:
        return
    agreed = min(failures, key=lambda said: said.damage)
    if mine is None:
        raise agreed.error()
    if isinstance(mine, FlashCkptError) and _said(mine)[:2] == agreed[:2]:
        raise mine
    raise agreed.error() from mine


class Said(NamedTuple):
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


def _said(error: Exception) -> Said:
    rank = dist.get_rank() if dist.is_initialized() else 0
    name = type(error).__name__
    ours = getattr(errors, name, None) is type(error)
    number = error.errno if isinstance(error, StorageError) else None
    # Of an OSError, str() puts the number first.
    text = error.strerror if isinstance(error, StorageError) else str(error)
    repeats = isinstance(error, FlashCkptError) and error.repeats
    message = str(text) if repeats else f"rank {rank}: {name}: {text}"
    return Said(is_damage(error), name if ours else FlashCkptError.__name__, number, message)
