"""What a rank will save, before the first step has made all of it: so much memory is reserved."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_flashckpt.layout.piece import MASTER, WEIGHT, Piece
from megatron_flashckpt.megatron_lm import optimizer_state, side_state
from megatron_flashckpt.megatron_lm.model_state import ModelState

#: What a plan takes for one piece, beside its key and its axes.
_PIECE_NBYTES = 256
#: Room for what a rank keeps beside tensors.
_SIDE_NBYTES = 8 * side_state.RANK_STATE_STEP


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a rank will save, as far as it is known before the first step."""

    pieces: list[Piece]
    """Without what the optimizer makes in its first step."""
    nbytes: int
    """With that (as Adam's two moments), and with room for the side state."""
    plan_nbytes: int
    """About what says which bytes are which; at least as much."""


def expect(state: ModelState, chunks: list[Any], optimizer: Any) -> Expected:
    """Return what this rank will save. No communication, and no copies.

    Raises:
        UnsupportedError: the job holds state that cannot be saved.
    """
    owned = state.owned(state.geometry(chunks), chunks, optimizer)
    nbytes = sum(local.piece.nbytes for local in owned)
    plan_nbytes = sum(_plan_nbytes(local.piece) for local in owned)
    entries = list(optimizer_state.entries(optimizer))
    if not any(entry.states() for entry in entries):
        if any(entry.keeps_master for entry in entries):  # the copies come with the moments
            weights = [local.piece for local in owned if local.piece.kind == WEIGHT]
            nbytes += 12 * sum(piece.numel for piece in weights)
        steppable = [local.piece for local in owned if local.piece.kind == MASTER]
        if not steppable and optimizer is not None:
            steppable = [local.piece for local in owned if local.piece.dtype == "F32"]
        nbytes += 2 * sum(piece.nbytes for piece in steppable)
        plan_nbytes *= 4  # a weight becomes four pieces at most
    return Expected([local.piece for local in owned], nbytes + _SIDE_NBYTES, plan_nbytes)


def _plan_nbytes(piece: Piece) -> int:
    """Return at least what a plan, its part of the file's header included, takes for `piece`."""
    return 2 * len(piece.key) + _PIECE_NBYTES + 10 * 3 * len(piece.shape)
