"""Estimate of a rank's saves before the first step, which determines the memory to reserve.

Tensors that the first step will make are represented by tensors without storage. These are then
assigned to replicas and divided as in every save, because the assignment depends on all tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.megatron_lm import side_state
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.optimizer_state import MASTER_STATE, OptimizerEntry, kind_of

#: Bytes of one piece in a plan, without its key and its axes.
_PIECE_NBYTES = 256
#: Bytes reserved for a rank's side state, without the extra states of its modules.
SIDE_NBYTES = 8 * side_state.RANK_STATE_STEP


@dataclasses.dataclass(frozen=True)
class SizeEstimate:
    """Estimate of a rank's save before the first step."""

    pieces: list[Piece]
    """Pieces to save, including those that the optimizer makes in its first step."""
    side_nbytes: int
    """Upper bound of the side state's size."""

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces and of the side state."""
        return sum(piece.nbytes for piece in self.pieces) + self.side_nbytes

    @property
    def plan_nbytes(self) -> int:
        """Upper bound of the bytes of the plan, which names the bytes of each piece."""
        return sum(map(_plan_nbytes, self.pieces))


def expect(state: ModelState, chunks: list[Any], optimizer: Any) -> SizeEstimate:
    """Return the estimate for this rank. No communication, no copied tensors.

    Raises:
        UnsupportedError: the job holds state that cannot be saved.
    """
    geometry = state.geometry(chunks)
    owned = state.owned(geometry, chunks, optimizer, _tensors_after_step)
    side_nbytes = SIDE_NBYTES + side_state.extra_states_nbytes(chunks, geometry)
    return SizeEstimate(owned.pieces, side_nbytes)


def _tensors_after_step(entry: OptimizerEntry) -> dict[str, torch.Tensor]:
    """Return the tensors of `entry` after the first step; missing ones have no storage."""
    tensors = entry.tensors()
    if not entry.states():
        numel = entry.end - entry.start
        for name, dtype in future_states(entry):
            tensors[kind_of(name, dtype)] = torch.empty(numel, dtype=dtype, device="meta")
    return tensors


def future_states(entry: OptimizerEntry) -> Iterator[tuple[str, torch.dtype]]:
    """Yield name and type of the states that the first step makes, in order of creation.

    Optimizers do not list these, so the settings are used to recognize Adam, Lion, and optimizers
    that have only a momentum (Muon, SGD).
    """
    inner: Any = entry.inner
    settings = inner.defaults
    if "betas" in settings:
        names = ["exp_avg", "exp_avg_sq"] if "eps" in settings else ["exp_avg"]
    else:
        names = ["momentum_buffer"] if settings.get("momentum", 1) else []
    if entry.keeps_master:
        names.append(MASTER_STATE)
    # Only precision-aware optimizers have a table of types; all others step fp32 tensors.
    dtypes = dict(getattr(inner, "name_to_dtype_map", {}))
    if getattr(inner, "store_param_remainders", False) and entry.owned.dtype == torch.bfloat16:
        dtypes[MASTER_STATE] = torch.int16
    for name in names:
        yield name, dtypes.get(name, torch.float32)


def _plan_nbytes(piece: Piece) -> int:
    """Return an upper bound of the bytes of `piece` in a plan and in the file's header."""
    return 2 * len(piece.key) + _PIECE_NBYTES + 10 * 3 * len(piece.shape)
