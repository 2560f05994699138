"""Check before the first step that all ranks together save every model element exactly once."""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from megatron_flashckpt.collectives import gather_objects, reduce_int
from megatron_flashckpt.layout.completeness import Tally, tally
from megatron_flashckpt.layout.piece import MASTER, WEIGHT, Piece
from megatron_flashckpt.megatron_lm import self_check
from megatron_flashckpt.megatron_lm.model_geometry import ModelGeometry
from megatron_flashckpt.megatron_lm.model_state import ModelState

#: The sum of one remainder per rank stays below 2**63.
_PRIME = 2**45 - 55


def check(
    state: ModelState, geometry: ModelGeometry, chunks: list[Any], pieces: list[Piece]
) -> None:
    """Check on all ranks that the ranks together save every element once. Collective.

    One number per rank shows a difference; only then are the tallies of all ranks gathered.

    Args:
        pieces: the pieces that this rank saves.

    Raises:
        UnsupportedError: lists the tensors of which too many or too few elements are saved; on all
            ranks.
    """
    own = tally(_model_pieces(state, geometry, pieces), state.tensors_starting_here(chunks))
    products = (
        xxhash.xxh3_64_intdigest(name.encode()) * (count.held - count.wanted)
        for name, count in own.items()
    )
    if reduce_int(sum(products) % _PRIME, "sum") % _PRIME == 0:
        return
    total: dict[str, Tally] = {}
    for tallies in gather_objects(own):
        for name, count in tallies.items():
            total[name] = total.get(name, Tally(0, 0)).plus(count)
    raise self_check.refusal(
        [
            f"{name}: all ranks together would save {count.held} of {count.wanted} elements"
            for name, count in sorted(total.items())
            if count.held != count.wanted
        ]
    )


def _model_pieces(state: ModelState, geometry: ModelGeometry, pieces: list[Piece]) -> list[Piece]:
    """Return weights and buffers; a master that is saved in place of its weight counts as weight.

    Layers that share a key may differ in this: only 16-bit weights are derived from masters.
    """
    weights = {(piece.key, piece.offset, piece.shape) for piece in pieces if piece.kind == WEIGHT}
    return [
        msgspec.structs.replace(piece, kind=WEIGHT) if piece.kind == MASTER else piece
        for piece in pieces
        if piece.kind != MASTER
        or (
            state.derives_key(geometry, piece.key)
            and (piece.key, piece.offset, piece.shape) not in weights
        )
    ]
