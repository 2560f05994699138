"""Where the distributed optimizer's buffers keep each parameter.

A buffer lays out the parameters of one chunk and type in reverse order and cuts them into buckets;
the data-parallel ranks own equal shares of each bucket. Files hold buckets without their end
padding and without any name, so the layout is computed again from the order of the parameters.
A wrong layout cannot go unnoticed: `verify` compares every parameter with its master, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from megatron_flashckpt.convert.common.tensor_parts import Part
from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.layout.piece import MASTER
from megatron_flashckpt.megatron_lm.rebuild.rank_model import Chunk, LocalTensor, RankModel

#: Megatron's name of the masters in a buffer.
MAIN = "param"
REMEDY = "convert another iteration, or the weights alone with --weights-only"


@dataclasses.dataclass(frozen=True)
class Rules:
    """How one age of Megatron lays out parameters in buffers."""

    alignment: int
    """Elements to which the start of a parameter is aligned."""
    end_multiple: int
    """Elements of which a bucket with its end padding is a multiple, beside its replicas."""
    lone_embeddings: bool = True
    """Whether a copy of tied embeddings has a bucket of its own."""
    fewest: int = 1
    """Parameters that a full bucket needs to be ended."""
    grows: bool = True
    """Whether the size that ends a bucket grows with the number of replicas."""


#: Early 2024 (cb995d5).
EARLY = Rules(alignment=1, end_multiple=1, lone_embeddings=False, fewest=2, grows=False)
#: The newest first: since core 0.8, 0.7, 0.6.
RULES = (
    Rules(alignment=64, end_multiple=128),
    Rules(alignment=1, end_multiple=128),
    Rules(alignment=1, end_multiple=1, grows=False),
    EARLY,
)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a buffer keeps one parameter."""

    chunk: int
    parameter: LocalTensor
    bucket: int
    start: int
    """Element in the bucket."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """The parameters of one chunk that have one type."""

    dtype: torch.dtype
    places: tuple[Place, ...]
    bucket_numels: tuple[int, ...]
    """Without the padding at the end of each bucket."""

    @property
    def numel(self) -> int:
        return sum(self.bucket_numels)

    def coalesced_start(self, place: Place) -> int:
        """Return the element of `place` if all buckets are laid end to end."""
        return sum(self.bucket_numels[: place.bucket]) + place.start


def is_early(args: Any) -> bool:
    """Return whether the job ran on a Megatron of early 2024, which knew no `torch_dist`."""
    return hasattr(args, "use_mcore_models") and not hasattr(args, "use_dist_ckpt")


def remedy(args: Any) -> str:
    """Return what to do if masters and weights of a job contradict each other."""
    if not gathers_late(args):
        return REMEDY
    return (
        "under this job's --overlap-param-gather old releases save weights of before the last "
        f"step; if so, --accept-damage takes them from the masters, which are right; else {REMEDY}"
    )


def gathers_late(args: Any) -> bool:
    """Return whether weights may be saved before those of the last step have been gathered."""
    return bool(getattr(args, "overlap_param_gather", False))


def sub_optimizer_chunks(model: RankModel, args: Any) -> list[list[tuple[int, Chunk]]]:
    """Return the chunks, with their numbers, of each dense sub-optimizer."""
    chunks = list(enumerate(model.chunks))
    if getattr(args, "overlap_param_gather_with_optimizer_step", False):
        return [chunks[:1], chunks[1:]]
    return [chunks]


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
    """Return per sub-optimizer of a rank, per chunk: its number, its parameters in order."""
    found = [
        [(number, [it for it in chunk.parameters if not it.expert]) for number, chunk in chunks]
        for chunks in sub_optimizer_chunks(model, args)
    ]
    if experts:
        found.append(
            [
                (number, [it for it in chunk.parameters if it.expert])
                for number, chunk in enumerate(model.chunks)
            ]
        )
    return found


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
    found = []
    for number, parameters in chunks:
        bucket_numel = _bucket_numel(model, args, number, rules)
        by_dtype: dict[torch.dtype, list[LocalTensor]] = {}
        for parameter in parameters:
            by_dtype.setdefault(dtypes[number, parameter.name], []).append(parameter)
        for dtype, of_dtype in by_dtype.items():
            found.append(_buffer(number, dtype, of_dtype, bucket_numel, rules))
    return found


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
    """Return the buffers of one sub-optimizer, laid out by the rules that the stored sizes fit.

    Args:
        stored: of each buffer, the sizes of its buckets, or its own size.
        by_bucket: `stored` has the sizes of buckets.

    Raises:
        CorruptCheckpointError: by the args the sizes are others.
    """
    tried = []
    for rules in RULES:
        found = buffers(model, args, chunks, dtypes, rules)
        tried.append([buffer.bucket_numels for buffer in found])
        wholes = [(buffer.numel,) for buffer in found]
        if list(stored) == tried[-1] or (list(stored) == wholes and not by_bucket):
            return found
    raise CorruptCheckpointError(
        f"{where}: buffers of {stored} elements, by the args {tried[0]}; {REMEDY}"
    )


def _bucket_numel(model: RankModel, args: Any, chunk: int, rules: Rules) -> int | None:
    """Return the number of elements that ends a bucket; None: one bucket (but for embeddings)."""
    if (
        not getattr(args, "overlap_grad_reduce", False)
        or model.pp > 0
        or chunk > 0
        or getattr(args, "overlap_param_gather_with_optimizer_step", False)
    ):
        return None
    if getattr(args, "ddp_num_buckets", None) is not None:
        numel = sum(parameter.numel for each in model.chunks for parameter in each.parameters)
        return numel // int(args.ddp_num_buckets)
    if getattr(args, "ddp_bucket_size", None) is not None:
        return int(args.ddp_bucket_size)
    return max(40_000_000, 1_000_000 * int(args.data_parallel_size) if rules.grows else 0)


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
            # Alone in its bucket, so that first and last stage cut it into the same shares.
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
    """Return the parts of a buffer whose weights have proved the layout.

    Args:
        states: the types of what the buffer has, by name; `param` are the masters.
        weight: returns a whole parameter.
        read: returns elements of a parameter's state.
        where: of the buffer, for messages.
        remedy: for messages; None: 16-bit weights are not compared.

    Raises:
        CorruptCheckpointError: some weight is not what its master rounds to.
    """
    if remedy is not None or buffer.dtype == torch.float32:
        verify(
            (
                (at.parameter.name, weight(at), read(MAIN, at, 0, at.parameter.numel))
                for at in buffer.places
            ),
            where,
            remedy or REMEDY,
        )
    return [
        Part(
            at.parameter.geometry,
            MASTER if state == MAIN else state,
            dtype,
            functools.partial(read, state, at),
        )
        for at in buffer.places
        for state, dtype in states.items()
        # fp32 parameters are their own masters.
        if state != MAIN or buffer.dtype != torch.float32
    ]


def verify(
    held: Iterable[tuple[str, torch.Tensor, torch.Tensor]], where: str, remedy: str = REMEDY
) -> None:
    """Compare weights with what their masters, at the computed places, round to.

    Args:
        held: name, weight and master of every parameter.

    Raises:
        CorruptCheckpointError: they differ; all names are listed.
    """
    wrong = [
        name
        for name, weight, master in held
        if not is_rounded(weight.reshape(-1), master.reshape(-1))
    ]
    if wrong:
        raise CorruptCheckpointError(
            f"{where}: {len(wrong)} weights are not what the optimizer's masters, at the places "
            f"that the checkpoint's args give them, round to: {', '.join(wrong)}; so the optimizer "
            f"state cannot be told apart; {remedy}"
        )


def is_rounded(weight: torch.Tensor, master: torch.Tensor) -> bool:
    """Return whether `weight` is, bit for bit, what `master` rounds to."""
    return torch.equal(_bits(weight), _bits(master.to(weight.dtype)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers: NaN equals itself, and -0 is not 0."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
