"""Position of a local tensor in global tensors, independent of the model class."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from megatron_flashckpt.errors import LayoutError
from megatron_flashckpt.layout.copies import CopyPlace, as_copy, copy_kind, main_kind
from megatron_flashckpt.layout.piece import Piece, Shape
from megatron_flashckpt.megatron_lm.torch_dtypes import dtype_name


class Part(NamedTuple):
    """A piece and its half-open range of the flattened local tensor."""

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
        """Yield the part of local range `[start, end)` that lies in this run, if there is one."""
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
    """Position of one local tensor in the global tensors."""

    name: str
    """State-dict name, for messages."""
    runs: tuple[Run, ...]
    main: bool
    """True if this rank has the main copy: not a tensor-parallel or pipeline duplicate."""
    replica: int
    """Position among the data-parallel replicas."""
    resizable: bool
    """True if Megatron lets the global shape differ (padded vocabulary)."""
    copy: CopyPlace | None = None
    """Place of this rank's copy of the tensor; None for the main copy, and for copies that Megatron
    keeps equal to it, which are not saved. For example, tensor rank 1's copy has offset (0, 1)."""
    _parts: dict[tuple[str, torch.dtype, int, int], tuple[Part, ...]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def is_saved(self) -> bool:
        """True if saves store this rank's copy."""
        return self.main or self.copy is not None

    def saved_kind(self, kind: str) -> str:
        """Return the kind under which saves store this rank's copy."""
        return kind if self.copy is None else copy_kind(kind)

    def parts(self, kind: str, dtype: torch.dtype, start: int, end: int) -> tuple[Part, ...]:
        """Return local range `[start, end)` as pieces: of the main copy, or as `saved_kind` says.

        Pieces are independent of memory addresses, so all saves share them. Making 20,000 pieces
        anew took most of the time that a save of them blocked training.
        """
        request = (kind, dtype, start, end)
        parts = self._parts.get(request)
        if parts is None:
            try:
                name = dtype_name(dtype)
            except LayoutError as error:
                raise LayoutError(f"{self.name}: {error}") from None
            main = main_kind(kind)
            of_run = (run.parts(main, name, start, end) for run in self.runs)
            parts = tuple(itertools.chain.from_iterable(of_run))
            if kind != main:
                assert self.copy is not None
                parts = tuple(part._replace(piece=as_copy(part.piece, self.copy)) for part in parts)
            self._parts[request] = parts
        return parts
