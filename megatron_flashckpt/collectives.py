"""Small objects and errors between the ranks of a group. Collective: for the start and for loads.

Of saves only those under `busy: skip` use one, `reduce_int`. Objects travel as pickles, as those of
`torch.distributed` do: the ranks of a job are one program. What small ones take is one collective,
where `all_gather_object` takes two.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
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


def this_rank() -> int:
    """Return the number of this rank."""
    return dist.get_rank() if dist.is_initialized() else 0


#: An object that fits into the head takes one collective; a larger one follows in parts.
_HEAD_NBYTES = 4096
_LENGTH_NBYTES = 8
#: Heads of all ranks in a gather are no longer than this together, and their lengths.
_HEADS_NBYTES = 2**20
#: Bytes of all ranks in one collective. With NCCL they lie in GPU memory, twice in a gather; a
#: restarted job may have little room: 1024 ranks with 10 MiB each would take 20 GiB at once.
PART_NBYTES = 16 * 2**20
#: Characters of an error that the other ranks are told.
MESSAGE_LENGTH = 2000


def gather_objects(value: Any, group: Group = None) -> list[Any]:
    """Return the `value` of every rank of `group`, in rank order. Collective.

    Values that are encoded alike are one object here: nobody may change them.
    """
    if not dist.is_initialized():
        return [value]
    mine = pickle.dumps(value)
    head_nbytes = min(_HEAD_NBYTES, _LENGTH_NBYTES + _HEADS_NBYTES // dist.get_world_size(group))
    heads = _all_gathered(_head(mine, head_nbytes), group)
    lengths = [_length(head) for head in heads]
    if max(lengths) <= head_nbytes - _LENGTH_NBYTES:
        bodies = [head[_LENGTH_NBYTES:] for head in heads]
    elif max(lengths) * len(lengths) <= 2 * sum(lengths):
        bodies = _gathered_by_parts(mine, lengths, group)
    else:
        # A few ranks have long values: all others would send as many bytes of padding.
        whole = memoryview(exchange_blobs(lengths, {dist.get_rank(group): mine}, group))
        ends = itertools.accumulate(lengths)
        bodies = [whole[end - n : end] for n, end in zip(lengths, ends, strict=True)]
    decoded: dict[bytes, Any] = {}
    found = []
    for body, n in zip(bodies, lengths, strict=True):
        encoded = bytes(body[:n])
        if encoded not in decoded:
            decoded[encoded] = pickle.loads(encoded)
        found.append(decoded[encoded])
    return found


def gather_named(named: Iterable[int]) -> tuple[list[int], bool]:
    """Return the ranks that name this one, in order, and whether any rank names any. Collective.

    One bit per pair of ranks travels.

    Args:
        named: the ranks that this one names.
    """
    if not dist.is_initialized():
        return [], False
    rank, world = dist.get_rank(), dist.get_world_size()
    bits = np.zeros(-(-world // 8) * 8, np.uint8)
    bits[list(named)] = 1
    mine = np.packbits(bits)
    step = max(PART_NBYTES // world, 1)
    where, bit = divmod(rank, 8)
    askers: list[int] = []
    is_any = False
    for start in range(0, len(mine), step):
        part = mine[start : start + step]
        of_all = np.frombuffer(b"".join(_all_gathered(part.tobytes(), None)), np.uint8)
        is_any = is_any or bool(of_all.any())
        if start <= where < start + len(part):
            column = of_all.reshape(world, -1)[:, where - start]
            askers = np.flatnonzero(column & (0x80 >> bit)).tolist()
    return askers, is_any


def broadcast_object(value: Any, source: int = 0) -> Any:
    """Return the `value` of rank `source`. Collective."""
    if not dist.is_initialized():
        return value
    is_source = dist.get_rank() == source
    mine = pickle.dumps(value) if is_source else b""
    head = _broadcast(_head(mine, _HEAD_NBYTES), source)
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


def _head(encoded: bytes, nbytes: int) -> bytes:
    """Return the length, and what follows of `encoded` if `nbytes` bytes have room for all."""
    room = nbytes - _LENGTH_NBYTES
    begin = encoded if len(encoded) <= room else b""
    return len(encoded).to_bytes(_LENGTH_NBYTES, "little") + begin.ljust(room, b"\0")


def _length(head: memoryview) -> int:
    return int.from_bytes(head[:_LENGTH_NBYTES], "little")


def _all_gathered(mine: bytes, group: Group) -> list[memoryview]:
    """Return the bytes of every rank, as many as there are here."""
    sent = _on_device(mine, group)
    ranks = dist.get_world_size(group)
    # One tensor and one copy to the host: thousands would take half a second.
    found = torch.empty(ranks * len(mine), dtype=torch.uint8, device=sent.device)
    _gather_single(found, sent, group)
    whole: memoryview = found.cpu().numpy().data
    return [whole[n * len(mine) : (n + 1) * len(mine)] for n in range(ranks)]


def _gather_single(received: torch.Tensor, sent: torch.Tensor, group: Group) -> None:
    # Since torch 2.13 by another name; the old one warns at every call.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(received, sent, group=group)


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


def reduce_largest(values: Sequence[int], group: Group = None) -> list[int]:
    """Return the largest of each of the values of `group`, from -2**63 to 2**63. Collective."""
    if not dist.is_initialized():
        return list(values)
    reduced = torch.tensor(list(map(int, values)), dtype=torch.int64, device=device_of(group))
    dist.all_reduce(reduced, dist.ReduceOp.MAX, group)
    largest: list[int] = reduced.cpu().tolist()
    return largest


def reduce_flags(flags: Sequence[bool], group: Group = None) -> list[bool]:
    """Return which of the flags are set on any rank of `group`. Collective.

    Args:
        flags: as many on every rank.
    """
    if not dist.is_initialized() or not flags:
        return list(flags)
    reduced = _on_device(bytes(flags), group)
    dist.all_reduce(reduced, dist.ReduceOp.MAX, group)
    return [bool(flag) for flag in reduced.cpu().tolist()]


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


def cut_short(text: str) -> str:
    """Return `text`, or what all ranks can be told of it: thousands may have as much to say."""
    if len(text) <= MESSAGE_LENGTH:
        return text
    return f"{text[:MESSAGE_LENGTH]} ... ({len(text) - MESSAGE_LENGTH} more characters)"


def cut_list(lines: Sequence[str]) -> tuple[str, ...]:
    """Return `lines`, or as many as all ranks can be told, and how many more there are."""
    ends = itertools.accumulate(len(line) for line in lines)
    told = max(1, sum(end <= MESSAGE_LENGTH for end in ends))
    if len(lines) <= told:
        return tuple(map(cut_short, lines))
    return (*map(cut_short, lines[:told]), f"... and {len(lines) - told} more")


def _said(error: Exception) -> Said:
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    name = type(error).__name__
    ours = getattr(errors, name, None) is type(error)
    number = error.errno if isinstance(error, StorageError) else None
    # Of an OSError, str() puts the number first.
    text = error.strerror if isinstance(error, StorageError) else str(error)
    repeats = isinstance(error, FlashCkptError) and error.repeats
    message = cut_short(str(text) if repeats else f"rank {rank}: {name}: {text}")
    return Said(is_damage(error), name if ours else FlashCkptError.__name__, number, message)
