"""Checks before the first step that all ranks together save every element of the model once."""

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

#: Sums of as many remainders as there can be ranks stay below 2**63.
_PRIME = 2**45 - 55


def check(
    state: ModelState, geometry: ModelGeometry, chunks: list[Any], pieces: list[Piece]
) -> None:
    """Raise on all ranks unless all ranks together save every element once. Collective.

    Args:
        pieces: what this rank saves.

    Raises:
        UnsupportedError: lists the tensors of which too many or too few elements are saved.
    """
    _add_up(tally(_of_the_model(state, geometry, pieces), state.stands_for(chunks)))


def _of_the_model(state: ModelState, geometry: ModelGeometry, pieces: list[Piece]) -> list[Piece]:
    """Return weights and buffers, masters that are saved in place of weights among the weights.

    Layers that share a key may be saved in either way: only 16-bit weights are made of masters.
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


def _add_up(own: dict[str, Tally]) -> None:
    """Compare what all ranks hold with what is wanted.

    One number per rank says whether they do; only if not, all of them are compared.
    """
    products = (
        xxhash.xxh3_64_intdigest(name.encode()) * (count.held - count.wanted)
        for name, count in own.items()
    )
    if reduce_int(sum(products) % _PRIME, "sum") % _PRIME == 0:
        return
    total: dict[str, Tally] = {}
    for of_rank in gather_objects(own):
        for name, count in of_rank.items():
            total[name] = total.get(name, Tally(0, 0)).plus(count)
    raise self_check.refusal(
        [
            f"{name}: all ranks together would save {count.held} of {count.wanted} elements"
            for name, count in sorted(total.items())
            if count.held != count.wanted
        ]
    )
