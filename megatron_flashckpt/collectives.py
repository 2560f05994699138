"""Collectives for small objects and errors, used at the start of a job and in loads.

Saves use only `reduce_int`, and only with `busy: skip`. Objects are sent as pickles, as in
`torch.distributed`, because all ranks of a job run one program. A small object needs one
collective; `all_gather_object` needs two.
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
    """Return this rank's number."""
    return dist.get_rank() if dist.is_initialized() else 0


#: Bytes of a head, the first collective. An object that fits needs no other; a larger one follows
#: in parts.
_HEAD_NBYTES = 4096
_LENGTH_NBYTES = 8
#: Bytes of the heads of all ranks in one gather, at most, without their lengths.
_HEADS_NBYTES = 2**20
#: Bytes of all ranks in one collective. With NCCL they lie in GPU memory, twice in a gather: 1024
#: ranks with 10 MiB each would need 20 GiB at once, which a restarted job may not have.
PART_NBYTES = 16 * 2**20
#: Characters of an error message that are sent to other ranks, at most.
MESSAGE_LENGTH = 2000


def gather_objects(value: Any, group: Group = None) -> list[Any]:
    """Return the `value` of every rank of `group`, in rank order. Collective.

    Values with equal pickles are one shared object, so callers must not change them.
    """
    if not dist.is_initialized():
        return [value]
    own = pickle.dumps(value)
    head_nbytes = min(_HEAD_NBYTES, _LENGTH_NBYTES + _HEADS_NBYTES // dist.get_world_size(group))
    heads = _all_gathered(_head(own, head_nbytes), group)
    lengths = [_length(head) for head in heads]
    if max(lengths) <= head_nbytes - _LENGTH_NBYTES:
        bodies = [head[_LENGTH_NBYTES:] for head in heads]
    elif max(lengths) * len(lengths) <= 2 * sum(lengths):
        bodies = _gathered_by_parts(own, lengths, group)
    else:
        # If few ranks have long values, a gather would send padding of that length for all others.
        blobs = memoryview(exchange_blobs(lengths, {dist.get_rank(group): own}, group))
        ends = itertools.accumulate(lengths)
        bodies = [blobs[end - n : end] for n, end in zip(lengths, ends, strict=True)]
    decoded: dict[bytes, Any] = {}
    values = []
    for body, n in zip(bodies, lengths, strict=True):
        encoded = bytes(body[:n])
        if encoded not in decoded:
            decoded[encoded] = pickle.loads(encoded)
        values.append(decoded[encoded])
    return values


def gather_named(named: Iterable[int]) -> tuple[list[int], bool]:
    """Return the ranks that name this rank, in order, and whether any rank names any. Collective.

    The ranks exchange one bit per pair of ranks.

    Args:
        named: ranks that this rank names.
    """
    if not dist.is_initialized():
        return [], False
    rank, world = dist.get_rank(), dist.get_world_size()
    bits = np.zeros(-(-world // 8) * 8, np.uint8)
    bits[list(named)] = 1
    own_bits = np.packbits(bits)
    step = max(PART_NBYTES // world, 1)
    byte, bit = divmod(rank, 8)
    askers: list[int] = []
    is_any = False
    for start in range(0, len(own_bits), step):
        part = own_bits[start : start + step]
        of_all = np.frombuffer(b"".join(_all_gathered(part.tobytes(), None)), np.uint8)
        is_any = is_any or bool(of_all.any())
        if start <= byte < start + len(part):
            column = of_all.reshape(world, -1)[:, byte - start]
            askers = np.flatnonzero(column & (0x80 >> bit)).tolist()
    return askers, is_any


def broadcast_object(value: Any, source: int = 0) -> Any:
    """Return the `value` of rank `source`. Collective."""
    if not dist.is_initialized():
        return value
    is_source = dist.get_rank() == source
    own = pickle.dumps(value) if is_source else b""
    head = _broadcast(_head(own, _HEAD_NBYTES), source)
    length = _length(head)
    if length <= _HEAD_NBYTES - _LENGTH_NBYTES:
        body = head[_LENGTH_NBYTES:]
    else:
        body = _broadcast_by_parts(own if is_source else bytes(length), source)
    return value if is_source else pickle.loads(body[:length])


def exchange_blobs(lengths: Sequence[int], own: Mapping[int, bytes], group: Group = None) -> bytes:
    """Return the concatenation of all blobs, each contributed by one rank. Collective.

    Each collective moves at most `PART_NBYTES`, for any number of blobs and ranks.

    Args:
        lengths: length of every blob; equal on all ranks.
        own: blobs of this rank, by number. Exactly one rank contributes each blob.
    """
    starts = [0, *itertools.accumulate(lengths)]
    body = bytearray(starts[-1])
    for number, blob in own.items():
        body[starts[number] : starts[number + 1]] = blob
    if not dist.is_initialized():
        return bytes(body)
    received = bytearray()
    for start in range(0, len(body), PART_NBYTES):
        # Exactly one rank contributes a blob, the others zeros, so the sum is the blob.
        part = _on_device(bytes(body[start : start + PART_NBYTES]), group)
        dist.all_reduce(part, dist.ReduceOp.SUM, group)
        received += part.cpu().numpy().data
    return bytes(received)


def _gathered_by_parts(own: bytes, lengths: list[int], group: Group) -> list[memoryview]:
    """Return the bytes of every rank, whose numbers are `lengths`. Collective."""
    longest = max(lengths)
    step = max(PART_NBYTES // len(lengths), 1)
    bodies = [bytearray() for _ in lengths]
    for start in range(0, longest, step):
        part = own[start : start + step].ljust(min(step, longest - start), b"\0")
        for body, length, received in zip(bodies, lengths, _all_gathered(part, group), strict=True):
            body += received[: max(length - start, 0)]
    return [memoryview(body) for body in bodies]


def _broadcast_by_parts(own: bytes, source: int) -> memoryview:
    """Return the bytes of rank `source`; `own` has the same length on every rank. Collective."""
    body = bytearray()
    for start in range(0, len(own), PART_NBYTES):
        body += _broadcast(own[start : start + PART_NBYTES], source)
    return memoryview(body)


def _head(encoded: bytes, nbytes: int) -> bytes:
    """Return the length of `encoded`, and `encoded` itself if both fit into `nbytes` bytes."""
    room = nbytes - _LENGTH_NBYTES
    begin = encoded if len(encoded) <= room else b""
    return len(encoded).to_bytes(_LENGTH_NBYTES, "little") + begin.ljust(room, b"\0")


def _length(head: memoryview) -> int:
    return int.from_bytes(head[:_LENGTH_NBYTES], "little")


def _all_gathered(own: bytes, group: Group) -> list[memoryview]:
    """Return the bytes of every rank; every rank passes the same number."""
    sent = _on_device(own, group)
    ranks = dist.get_world_size(group)
    # One tensor and one copy to the host; thousands of copies would take half a second.
    received = torch.empty(ranks * len(own), dtype=torch.uint8, device=sent.device)
    _gather_single(received, sent, group)
    gathered_bytes: memoryview = received.cpu().numpy().data
    return [gathered_bytes[n * len(own) : (n + 1) * len(own)] for n in range(ranks)]


def _gather_single(received: torch.Tensor, sent: torch.Tensor, group: Group) -> None:
    # torch 2.13 renamed the function; the old name warns at every call.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(received, sent, group=group)


def _broadcast(own: bytes, source: int) -> memoryview:
    sent = _on_device(own, None)
    dist.broadcast(sent, src=source)
    received: memoryview = sent.cpu().numpy().data
    return received


def _on_device(encoded: bytes, group: Group) -> torch.Tensor:
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device_of(group))


def device_of(group: Group) -> str:
    """Return the device on which `group` sends and receives tensors: `cuda` or `cpu`."""
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def reduce_int(value: int, how: Literal["sum", "max"], group: Group = None) -> int:
    """Return the sum or the maximum of one value per rank of `group`, below 2**63. Collective."""
    return _reduced([value], dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX, group)[0]


def reduce_largest(values: Sequence[int], group: Group = None) -> list[int]:
    """Return the elementwise maximum over the ranks of `group`, within 64 bits. Collective."""
    return _reduced(values, dist.ReduceOp.MAX, group)


def _reduced(values: Sequence[int], op: Any, group: Group) -> list[int]:
    numbers = list(map(int, values))
    if not dist.is_initialized():
        return numbers
    reduced = torch.tensor(numbers, dtype=torch.int64, device=device_of(group))
    dist.all_reduce(reduced, op, group)
    result: list[int] = reduced.tolist()
    return result


def run_and_agree(work: Callable[[], _T], group: Group = None) -> _T:
    """Run `work()` on all ranks of `group`; raise on all ranks if it raised on any. Collective.

    Raises:
        FlashCkptError: of one class on all ranks, so that all ranks handle it in the same way. The
            error is that of the lowest failed rank; errors other than damage come first, because
            they are faults of the job. A rank whose error has that class raises its own error. Any
            other exception becomes a FlashCkptError, also on the rank that raised it, so that a
            caller catches it on all ranks or on none.
    """
    tried = attempt(work)
    # One number, because nearly always no rank has failed.
    if reduce_int(tried.error is not None, "max", group):
        raise_agreed(gather_objects(tried.report, group), tried.error)
    return tried.value  # type: ignore[return-value]


def run_and_gather(work: Callable[[], tuple[_T, _S]]) -> tuple[_T, list[_S]]:
    """Run `work()`, which returns (local, shared), on all ranks and gather the results. Collective.

    Returns this rank's `local` and every rank's `shared`, in rank order. Raises as `run_and_agree`
    does, without a further collective.
    """
    tried = attempt(work)
    local, shared = (None, None) if tried.value is None else tried.value
    results = gather_objects((shared, tried.report))
    raise_agreed([report for _, report in results], tried.error)
    return local, [values for values, _ in results]  # type: ignore[return-value]


def run_on_rank_0(work: Callable[[], _T]) -> _T:
    """Run `work()` on rank 0; return its result, or raise its error, on all ranks. Collective."""
    tried: Attempt[_T] = attempt(work) if this_rank() == 0 else Attempt(None, None)
    # Not a gather: a manifest may have hundreds of megabytes.
    value, report = broadcast_object((tried.value, tried.report))
    raise_agreed([report], tried.error)
    return value  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class Attempt(Generic[_T]):
    """Result or error of a function, kept until all ranks have agreed on what to raise."""

    value: _T | None
    error: Exception | None

    @property
    def report(self) -> ErrorReport | None:
        """Report of the error for the other ranks."""
        return None if self.error is None else _report_of(self.error)


def attempt(work: Callable[[], _T]) -> Attempt[_T]:
    """Run `work()`; return its result or any exception."""
    try:
        return Attempt(work(), None)
    except Exception as failure:
        return Attempt(None, failure)


def raise_agreed(reports: list[ErrorReport | None], error: Exception | None) -> None:
    """Raise the error that all ranks agree on (see `run_and_agree`), if any rank has failed.

    Args:
        reports: error reports of all ranks; equal on all ranks.
        error: this rank's own error.
    """
    failures = [report for report in reports if report is not None]
    if not failures:
        return
    agreed = min(failures, key=lambda report: report.damage)
    if error is None:
        raise agreed.error()
    if isinstance(error, FlashCkptError) and _report_of(error)[:2] == agreed[:2]:
        raise error
    raise agreed.error() from error


class ErrorReport(NamedTuple):
    """Report of a rank's error for the other ranks."""

    damage: bool
    kind: str
    """Name of the error's class, or `FlashCkptError` for a foreign class."""
    number: int | None
    message: str

    def error(self) -> FlashCkptError:
        error: FlashCkptError
        if self.kind == StorageError.__name__:
            error = StorageError(self.number, self.message)
        else:
            error = getattr(errors, self.kind)(self.message)
        error.repeats = True
        return error


def shorten(text: str) -> str:
    """Return `text`, shortened to `MESSAGE_LENGTH`: thousands of ranks may send a message."""
    if len(text) <= MESSAGE_LENGTH:
        return text
    return f"{text[:MESSAGE_LENGTH]} ... ({len(text) - MESSAGE_LENGTH} more characters)"


def shorten_list(lines: Sequence[str]) -> tuple[str, ...]:
    """Return `lines`, shortened to `MESSAGE_LENGTH` in total, and the number of further lines."""
    ends = itertools.accumulate(len(line) for line in lines)
    count = max(1, sum(end <= MESSAGE_LENGTH for end in ends))
    if len(lines) <= count:
        return tuple(map(shorten, lines))
    return (*map(shorten, lines[:count]), f"... and {len(lines) - count} more")


def _report_of(error: Exception) -> ErrorReport:
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    name = type(error).__name__
    is_ours = getattr(errors, name, None) is type(error)
    number = error.errno if isinstance(error, StorageError) else None
    # str() of an OSError begins with the error number.
    text = error.strerror if isinstance(error, StorageError) else str(error)
    repeats = isinstance(error, FlashCkptError) and error.repeats
    message = shorten(str(text) if repeats else f"rank {rank}: {name}: {text}")
    return ErrorReport(
        is_damage(error), name if is_ours else FlashCkptError.__name__, number, message
    )
