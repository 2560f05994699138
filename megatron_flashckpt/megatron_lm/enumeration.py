"""The pieces of one save, divided into what is constant between saves and the save's tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import torch

from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.megatron_lm.cutting import LocalPiece


class Section(msgspec.Struct, frozen=True, gc=False):
    """A piece, and the place of its elements among the tensors of a block."""

    piece: Piece
    tensor: int
    """Number of the flat tensor in the block."""
    start: int = 0
    end: int | None = None
    """The half-open range of the piece's elements in that tensor; None: up to its end."""
    early: bool = False
    """True if other code than `optimizer.step()` may change the tensor."""


class Enumeration:
    """The pieces that one save writes, in blocks; all that depends on sections only can be reused.

    Sections hold no tensors, so they may be kept. A list of sections that is the same object as in
    the last save is compared without a look at its 10,000 sections.
    """

    def __init__(self) -> None:
        self.blocks: list[tuple[int, list[Section]]] = []
        """Each block's number of tensors, and its sections."""
        self.tensors: list[torch.Tensor] = []
        """The tensors of all blocks."""

    def add(self, pieces: Sequence[LocalPiece]) -> None:
        """Add a block of `pieces`."""
        sections = [
            Section(local.piece, number, early=local.early) for number, local in enumerate(pieces)
        ]
        self.add_block(sections, [local.tensor for local in pieces])

    def add_block(self, sections: list[Section], tensors: list[torch.Tensor]) -> None:
        """Add a block of `sections`, which nobody changes from now on."""
        self.blocks.append((len(tensors), sections))
        self.tensors += tensors

    @property
    def pieces(self) -> list[Piece]:
        """The pieces of all blocks."""
        return [section.piece for _, sections in self.blocks for section in sections]

    def numbered(self) -> Iterator[tuple[int, Section]]:
        """Yield every section with the number of its tensor in `tensors`."""
        first = 0
        for count, sections in self.blocks:
            for section in sections:
                yield first + section.tensor, section
            first += count
