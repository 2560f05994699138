"""Where one local tensor belongs in the global ones, whoever found that out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron_flashckpt.layout.piece import Piece, Shape


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

    def pieces(self, kind: str, dtype: str, start: int, end: int) -> Iterator[tuple[Piece, int]]:
        """Yield the part of local range `[start, end)` in this run: piece, local start."""
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
            yield piece, low


@dataclasses.dataclass(frozen=True)
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
