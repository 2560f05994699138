"""Layout of parameters in the distributed optimizer's buffers.

A buffer holds the parameters of one chunk and type in reverse order, divided into buckets; the
data-parallel ranks own equal shares of each bucket. Files hold buckets without end padding and
without names, so the layout is computed again from the order of the parameters. `verify` detects a
wrong layout, because it compares every parameter with its master, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from megatron_flashckpt.convert.common.damage_check import bits
from megatron_flashckpt.convert.common.frozen import FEWER
from megatron_flashckpt.convert.common.tensor_parts import Part
from megatron_flashckpt.errors import CorruptCheckpointError, first_few
from megatron_flashckpt.layout.piece import MASTER
from megatron_flashckpt.megatron_lm.rebuild.rank_model import LocalTensor, RankModel

#: Megatron's name of the masters in a buffer.
MAIN = "param"
REMEDY = "convert another iteration, or the weights alone with --weights-only"


@dataclasses.dataclass(frozen=True)
class Rules:
    """Layout rules of some Megatron releases."""

    alignment: int
    """Elements to which the start of a parameter is aligned."""
    end_multiple: int
    """Factor of a bucket's elements including end padding, in addition to the replicas."""
    lone_embeddings: bool = True
    """True if a copy of tied embeddings has a bucket of its own."""
    fewest: int = 1
    """Least number of parameters in a full bucket."""
    grows: bool = True
    """True if the size of a full bucket grows with the number of replicas."""
    counts_context: bool = False
    """True if context parallel ranks count as replicas for this size."""


#: Rules of early 2024 (cb995d5).
EARLY = Rules(alignment=1, end_multiple=1, lone_embeddings=False, fewest=2, grows=False)
#: Rules, newest first: since core 0.12, 0.8, 0.7, 0.6, and early 2024.
RULES = (
    Rules(alignment=64, end_multiple=128, counts_context=True),
    Rules(alignment=64, end_multiple=128),
    Rules(alignment=1, end_multiple=128),
    Rules(alignment=1, end_multiple=1, grows=False),
    EARLY,
)


@dataclasses.dataclass(frozen=True)
class Place:
    """Position of one parameter in a buffer."""

    chunk: int
    parameter: LocalTensor
    bucket: int
    start: int
    """First element in the bucket."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Parameters of one chunk and one type."""

    dtype: torch.dtype
    places: tuple[Place, ...]
    bucket_numels: tuple[int, ...]
    """Elements of each bucket, without end padding."""

    @property
    def numel(self) -> int:
        return sum(self.bucket_numels)

    def coalesced_start(self, place: Place) -> int:
        """Return the first element of `place` in the concatenation of all buckets."""
        return sum(self.bucket_numels[: place.bucket]) + place.start


def is_early(args: Any) -> bool:
    """Return whether the job ran on a Megatron of early 2024, which had no `torch_dist`."""
    return hasattr(args, "use_mcore_models") and not hasattr(args, "use_dist_ckpt")


def remedy(args: Any) -> str:
    """Return the remedy for masters and weights that contradict each other."""
    if getattr(args, "use_precision_aware_optimizer", False):
        return (
            "with this job's --use-precision-aware-optimizer the files may hold only the low "
            f"halves of masters; {REMEDY}"
        )
    if not gathers_late(args):
        return REMEDY
    return (
        "with this job's --overlap-param-gather old releases save the weights before the last "
        "step; if this checkpoint has such weights, --accept-damage derives them from the "
        f"masters, which are right; else {REMEDY}"
    )


def gathers_late(args: Any) -> bool:
    """Return whether a save may store weights that are one step older than their masters."""
    return bool(getattr(args, "overlap_param_gather", False))


def has_experts(models: Iterable[RankModel]) -> bool:
    """Return whether a sub-optimizer for expert parameters exists (on every rank)."""
    return any(
        parameter.expert
        for model in models
        for chunk in model.chunks
        for parameter in chunk.parameters
    )


def sub_optimizers(
    model: RankModel, args: Any, *, experts: bool
) -> list[list[tuple[int, list[LocalTensor]]]]:
    """Return, per sub-optimizer of a rank and per chunk, the chunk's number and parameters.

    Args:
        experts: the last sub-optimizer is that of the expert parameters.
    """
    chunks = list(enumerate(model.chunks))
    subs = [(chunks, False)]
    if getattr(args, "overlap_param_gather_with_optimizer_step", False):
        subs = [(chunks[:1], False), (chunks[1:], False)]
    if experts:
        subs.append((chunks, True))
    return [
        [
            (number, [parameter for parameter in chunk.parameters if parameter.expert == expert])
            for number, chunk in of_sub
        ]
        for of_sub, expert in subs
    ]


def buffers(
    model: RankModel,
    args: Any,
    chunks: list[tuple[int, list[LocalTensor]]],
    dtypes: dict[tuple[int, str], torch.dtype],
    rules: Rules,
) -> list[Buffer]:
    """Return the buffers of one sub-optimizer, in Megatron's order.

    Args:
        chunks: one entry of `sub_optimizers`.
        dtypes: the types of parameters by chunk number and name.
    """
    result = []
    for number, parameters in chunks:
        bucket_numel = _bucket_numel(model, args, number, rules)
        by_dtype: dict[torch.dtype, list[LocalTensor]] = {}
        for parameter in parameters:
            by_dtype.setdefault(dtypes[number, parameter.name], []).append(parameter)
        for dtype, same_dtype in by_dtype.items():
            result.append(_buffer(number, dtype, same_dtype, bucket_numel, rules))
    return result


def layout(
    model: RankModel,
    args: Any,
    chunks: list[tuple[int, list[LocalTensor]]],
    dtypes: dict[tuple[int, str], torch.dtype],
    stored: Sequence[tuple[int, ...]],
    where: str,
    *,
    by_bucket: bool = False,
) -> list[Buffer]:
    """Return the buffers of one sub-optimizer, by the first rules that match the stored sizes.

    Args:
        stored: the sizes of each buffer's buckets, or the buffer's own size.
        by_bucket: True if `stored` has the sizes of buckets.

    Raises:
        CorruptCheckpointError: no rules and the args lead to the stored sizes.
    """
    tried = []
    for rules in RULES:
        candidate = buffers(model, args, chunks, dtypes, rules)
        tried.append([buffer.bucket_numels for buffer in candidate])
        buffer_numels = [(buffer.numel,) for buffer in candidate]
        if list(stored) == tried[-1] or (list(stored) == buffer_numels and not by_bucket):
            return candidate
    fewer = sum(map(sum, stored)) < sum(map(sum, tried[0]))
    remedy = f"{FEWER}; or {REMEDY}" if fewer else REMEDY
    raise CorruptCheckpointError(
        f"{where}: buffers have {stored} elements, expected {tried[0]} by the args; {remedy}"
    )


def _bucket_numel(model: RankModel, args: Any, chunk: int, rules: Rules) -> int | None:
    """Return the elements of a full bucket; None for a single bucket (except for embeddings)."""
    if (
        not getattr(args, "overlap_grad_reduce", False)
        or model.pp > 0
        or chunk > 0
        or getattr(args, "overlap_param_gather_with_optimizer_step", False)
    ):
        return None
    if getattr(args, "ddp_num_buckets", None) is not None:
        numel = sum(
            parameter.numel for model_chunk in model.chunks for parameter in model_chunk.parameters
        )
        return numel // int(args.ddp_num_buckets)
    if getattr(args, "ddp_bucket_size", None) is not None:
        return int(args.ddp_bucket_size)
    replicas = int(args.data_parallel_size) if rules.grows else 0
    if rules.counts_context:
        replicas *= int(getattr(args, "context_parallel_size", None) or 1)
    return max(40_000_000, 1_000_000 * replicas)


def _buffer(
    chunk: int,
    dtype: torch.dtype,
    parameters: Sequence[LocalTensor],
    bucket_numel: int | None,
    rules: Rules,
) -> Buffer:
    places: list[Place] = []
    numels: list[int] = []
    position = 0
    count = 0
    for parameter in reversed(parameters):
        alone = parameter.shared_embedding and rules.lone_embeddings
        position = -(-position // rules.alignment) * rules.alignment
        if alone and count:
            # A bucket of its own, so that first and last stage divide it into the same shares.
            numels.append(position)
            position = 0
        places.append(Place(chunk, parameter, len(numels), position))
        position += parameter.numel
        count += 1
        full = bucket_numel is not None and position >= bucket_numel and count >= rules.fewest
        if alone or full:
            numels.append(position)
            position = 0
            count = 0
    if count:
        numels.append(position)
    return Buffer(dtype, tuple(places), tuple(numels))


def buffer_parts(
    buffer: Buffer,
    states: dict[str, torch.dtype],
    weight: Callable[[Place], torch.Tensor],
    read: Callable[[str, Place, int, int], torch.Tensor],
    where: str,
    remedy: str | None = REMEDY,
) -> list[Part]:
    """Return the parts of a buffer, after a comparison of its masters with the weights.

    Args:
        states: types of the buffer's states by name; `param` are the masters.
        weight: returns a parameter.
        read: returns elements of a parameter's state.
        where: name of the buffer, for messages.
        remedy: remedy for messages; None to skip the comparison of 16-bit weights.

    Raises:
        CorruptCheckpointError: a weight is not its rounded master.
    """
    if remedy is not None or buffer.dtype == torch.float32:
        verify(
            (
                (place.parameter.name, weight(place), read(MAIN, place, 0, place.parameter.numel))
                for place in buffer.places
            ),
            where,
            remedy or REMEDY,
        )
    return [
        Part(
            place.parameter.geometry,
            MASTER if state == MAIN else state,
            dtype,
            functools.partial(read, state, place),
        )
        for place in buffer.places
        for state, dtype in states.items()
        # fp32 parameters are their own masters.
        if state != MAIN or buffer.dtype != torch.float32
    ]


def verify(
    entries: Iterable[tuple[str, torch.Tensor, torch.Tensor]], where: str, remedy: str = REMEDY
) -> None:
    """Compare weights with their rounded masters at the computed places.

    Args:
        entries: name, weight and master of every parameter.

    Raises:
        CorruptCheckpointError: weights differ; the message lists the first names.
    """
    differing = [
        name
        for name, weight, master in entries
        if not is_rounded(weight.reshape(-1), master.reshape(-1))
    ]
    if differing:
        raise CorruptCheckpointError(
            f"{where}: {len(differing)} weights differ from the rounded masters at the places that "
            f"follow from the checkpoint's args: {first_few(differing)}; so the optimizer state "
            f"cannot be assigned to parameters; {remedy}"
        )


def is_rounded(weight: torch.Tensor, master: torch.Tensor) -> bool:
    """Return whether `weight` equals the rounded `master`, bit for bit."""
    return torch.equal(bits(weight), bits(master.to(weight.dtype)))
