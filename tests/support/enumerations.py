"""The pieces of an enumeration with their tensors."""

from __future__ import annotations

from megatron_flashckpt.megatron_lm.cutting import LocalPiece
from megatron_flashckpt.megatron_lm.enumeration import Enumeration


def local_pieces(enumeration: Enumeration) -> list[LocalPiece]:
    """Return every section as a piece with its tensor."""
    pieces = []
    for number, section in enumeration.numbered():
        tensor = enumeration.tensors[number]
        if section.end is not None:
            tensor = tensor[section.start : section.end]
        pieces.append(LocalPiece(section.piece, tensor, early=section.early))
    return pieces
