"""Tensors of Megatron and of Hugging Face that hold the same elements, as ranges of rows.

Megatron joins the projections of queries, keys and values, group by group, and the two halves of a
gated MLP. It pads the vocabulary. So every tensor of a Hugging Face model consists of whole rows of
one tensor of Megatron, which GPT-2 stores transposed. Both directions of a conversion read the same
ranges.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from megatron_flashckpt.errors import UnsupportedError, first_few
from megatron_flashckpt.layout.piece import Shape

Rows = tuple[tuple[int, int], ...]
"""Half-open ranges of rows of Megatron's tensor, in the order of the Hugging Face tensor."""


class Dimension(NamedTuple):
    """First dimension of a tensor of Megatron."""

    size: int
    parts: tuple[Rows, ...]
    """Rows of each Hugging Face tensor; together all rows but for padding."""
    padded: bool = False
    """True if Megatron may have more rows, which no Hugging Face tensor holds."""


def whole(size: int) -> Dimension:
    """Return rows of one tensor, in equal order."""
    return Dimension(size, (((0, size),),))


def vocabulary(words: int) -> Dimension:
    """Return rows of embeddings, which Megatron pads."""
    return Dimension(words, (((0, words),),), padded=True)


def gate_up(size: int) -> Dimension:
    """Return rows of the gate and of the up projection, `size` rows each."""
    return Dimension(2 * size, (((0, size),), ((size, 2 * size),)))


def attention(heads: int, groups: int, head_size: int) -> Dimension:
    """Return rows of queries, keys and values.

    Megatron stores, for each of `groups` groups, its query heads, its key head and its value head.
    """
    group = (heads // groups + 2) * head_size
    starts = range(0, groups * group, group)
    keys, values = group - 2 * head_size, group - head_size
    return Dimension(
        groups * group,
        (
            tuple((start, start + keys) for start in starts),
            tuple((start + keys, start + values) for start in starts),
            tuple((start + values, start + group) for start in starts),
        ),
    )


def joined(dimension: Dimension) -> Dimension:
    """Return the same rows for one tensor that holds all parts one after the other."""
    return Dimension(dimension.size, (sum(dimension.parts, ()),), dimension.padded)


@dataclasses.dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face model."""

    name: str
    rows: Rows
    transposed: bool
    shape: Shape


@dataclasses.dataclass(frozen=True)
class Match:
    """A tensor of Megatron for one layer and one expert, and the tensors with its elements."""

    names: tuple[str, ...]
    """Names in Megatron's state dict, of which a model has one: layers of Transformer Engine and
    local layers differ."""
    shape: Shape
    """Shape in Megatron without padding."""
    padded: bool
    parts: tuple[HfTensor, ...]

    def fits(self, shape: Shape) -> bool:
        """Return whether `shape` is this shape, with or without padding."""
        if self.padded:
            return shape[1:] == self.shape[1:] and shape[:1] >= self.shape[:1]
        return shape == self.shape

    def assemble(
        self, shape: Shape, tensors: Iterable[torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return Megatron's tensor in `shape`; padding is zero.

        Args:
            tensors: the tensors of `parts`, of which one at a time is in memory.
        """
        result = torch.zeros(shape, dtype=dtype)
        for part, tensor in zip(self.parts, tensors, strict=True):
            rows = tensor.T if part.transposed else tensor
            position = 0
            for start, stop in part.rows:
                result[start:stop] = rows[position : position + stop - start]
                position += stop - start
        return result


def taken(tensor: torch.Tensor, part: HfTensor) -> torch.Tensor:
    """Return `part` of `tensor`, which is Megatron's whole tensor for a layer and an expert."""
    rows = torch.cat([tensor[start:stop] for start, stop in part.rows])
    return (rows.T if part.transposed else rows).contiguous()


def match(
    names: tuple[str, ...], dimensions: list[Dimension], hf_names: tuple[str, ...], transposed: bool
) -> Match:
    """Return the tensor of Megatron with `names`, whose rows `hf_names` hold in this order."""
    first, *others = dimensions
    inner = tuple(dimension.size for dimension in others)
    parts = []
    for name, rows in zip(hf_names, first.parts, strict=True):
        shape = (sum(stop - start for start, stop in rows), *inner)
        parts.append(HfTensor(name, rows, transposed, shape[::-1] if transposed else shape))
    assert sum(math.prod(part.shape) for part in parts) == first.size * math.prod(inner)
    return Match(names, (first.size, *inner), first.padded, tuple(parts))


def refuse_differences(
    place: str,
    template: str,
    remedy: str,
    *,
    missing: Sequence[str],
    extra: Sequence[str],
    wrong: Sequence[str],
) -> None:
    """Raise if any tensor differs.

    Args:
        place: where the tensors are.
        template: the `config.json` that they should fit.
        missing, extra: names of tensors.
        wrong: a phrase for each tensor of another shape.

    Raises:
        UnsupportedError: the message has the first names of each kind.
    """
    problems = [
        f"{phrase} {first_few(names)}"
        for phrase, names in (
            ("missing tensors:", missing),
            ("tensors that this model does not have:", extra),
            ("tensors of another shape:", wrong),
        )
        if names
    ]
    if problems:
        raise UnsupportedError(
            f"{place}: is not the model of {template}: {'; '.join(problems)}; nothing was written; "
            f"{remedy}"
        )
