"""Where one local tensor belongs in the global ones, whoever found that out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from megatron_flashckpt.errors import LayoutError
from megatron_flashckpt.layout.piece import Piece, Shape
from megatron_flashckpt.megatron_lm.torch_dtypes import dtype_name


class Part(NamedTuple):
    """A piece, and the half-open range of the flattened local tensor that it stands for."""

    piece: Piece
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Run:
    """`numel` elements that are contiguous both in the local tensor and in a box."""

    key: str
    global_shape: Shape
    offset: Shape
    shape: Shape
    box_start: int
    local_start: int
    numel: int

    def parts(self, kind: str, dtype: str, start: int, end: int) -> Iterator[Part]:
        """Yield the part of local range `[start, end)` in this run, if there is one."""
        low = max(start, self.local_start)
        high = min(end, self.local_start + self.numel)
        if low < high:
            shift = self.box_start - self.local_start
            piece = Piece(
                self.key,
                kind,
                dtype,
                self.global_shape,
                self.offset,
                self.shape,
                low + shift,
                high + shift,
            )
            yield Part(piece, low, high)


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """Where one local tensor belongs."""

    name: str
    """State-dict name, for messages."""
    runs: tuple[Run, ...]
    main: bool
    """Whether this rank is among the writers: not a tensor-parallel or pipeline duplicate."""
    replica: int
    """Position among the data-parallel replicas."""
    resizable: bool
    """Whether Megatron lets the global shape differ (padded vocabulary)."""
    copy: str = ""
    """Where this rank's copy stands among those that are not the main one; empty: it is main.

    Numbers of duplicates over pipeline stages and over tensor ranks: "0.1" is what tensor rank 1
    holds alike with tensor rank 0."""
    _parts: dict[tuple[str, torch.dtype, int, int], tuple[Part, ...]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def parts(self, kind: str, dtype: torch.dtype, start: int, end: int) -> tuple[Part, ...]:
        """Return local range `[start, end)` as pieces.

        They say nothing of memory, so every save can have the same ones: making them anew took most
        of the time that 20,000 of them blocked training.
        """
        wanted = (kind, dtype, start, end)
        found = self._parts.get(wanted)
        if found is None:
            try:
                name = dtype_name(dtype)
            except LayoutError as error:
                raise LayoutError(f"{self.name}: {error}") from None
            of_run = (run.parts(kind, name, start, end) for run in self.runs)
            found = self._parts[wanted] = tuple(itertools.chain.from_iterable(of_run))
        return found
