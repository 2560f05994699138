"""What a rank will save, before the first step has made all of it: so much memory is reserved.

What that step will make is put in its place as tensors without memory, and then shared out and cut
as in every save: which replica writes what follows from all that they write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from megatron_flashckpt.layout.copies import compared_numel
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.megatron_lm import side_state
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.optimizer_state import MASTER_STATE, OptimizerEntry, kind_of

#: What a plan takes for one piece, beside its key and its axes.
_PIECE_NBYTES = 256
#: How copies of the first pipeline stage begin. Those of other stages may be whole embeddings,
#: whose gradients Megatron reduces: they get no room before they are known to differ.
_OF_TENSOR_RANKS = "0."
#: Room for the side state of a rank, without the extra states of its modules.
SIDE_NBYTES = 8 * side_state.RANK_STATE_STEP


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a rank will save, as far as it is known before the first step."""

    pieces: list[Piece]
    """With what the optimizer makes in its first step."""
    side_nbytes: int
    """Upper bound of the side state's size."""
    copies: list[Piece]
    """Copies of what another tensor rank writes; saved as well if they turn out to differ."""
    compared_nbytes: int = 0
    """Host memory for copies that the first save only compares."""

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces, and room for copies and the side state."""
        return sum(piece.nbytes for piece in (*self.pieces, *self.copies)) + self.side_nbytes

    @property
    def plan_nbytes(self) -> int:
        """About what says which bytes are which; at least as much."""
        return sum(_plan_nbytes(piece) for piece in (*self.pieces, *self.copies))


def expect(state: ModelState, chunks: list[Any], optimizer: Any) -> Expected:
    """Return what this rank will save. No communication, and no copies.

    Raises:
        UnsupportedError: the job holds state that cannot be saved.
    """
    geometry = state.geometry(chunks)
    owned = state.owned(geometry, chunks, optimizer, _tensors_after_step)
    side_nbytes = SIDE_NBYTES + side_state.extra_states_nbytes(chunks, geometry)
    unsaved = geometry.copied_keys - state.differing_keys
    others = state.copies(geometry, chunks, optimizer, unsaved, _tensors_after_step)
    copies = [local.piece for local in others if local.copy.startswith(_OF_TENSOR_RANKS)]
    compared = sum(_compared_nbytes(local.piece) for local in others)
    return Expected([local.piece for local in owned], side_nbytes, copies, compared)


def _compared_nbytes(piece: Piece) -> int:
    numel = piece.end - piece.start
    return piece.nbytes * compared_numel(piece) // numel if numel else 0


def _tensors_after_step(entry: OptimizerEntry) -> dict[str, torch.Tensor]:
    """Return what `entry.tensors()` will have; what is not there yet takes no memory."""
    tensors = entry.tensors()
    if not entry.states():
        numel = entry.end - entry.start
        for name, dtype in _states_to_come(entry):
            tensors[kind_of(name, dtype)] = torch.empty(numel, dtype=dtype, device="meta")
    return tensors


def _states_to_come(entry: OptimizerEntry) -> Iterator[tuple[str, torch.dtype]]:
    """Yield name and type of the states that the first step makes, in the order it makes them.

    Optimizers do not say: their settings tell Adam, Lion, and what only has a momentum (Muon, SGD).
    """
    inner: Any = entry.inner
    settings = inner.defaults
    if "betas" in settings:
        names = ["exp_avg", "exp_avg_sq"] if "eps" in settings else ["exp_avg"]
    else:
        names = ["momentum_buffer"] if settings.get("momentum", 1) else []
    if entry.keeps_master:
        names.append(MASTER_STATE)
    # Only precision-aware optimizers know of types; what all others step is fp32.
    dtypes = dict(getattr(inner, "name_to_dtype_map", {}))
    if getattr(inner, "store_param_remainders", False) and entry.owned.dtype == torch.bfloat16:
        dtypes[MASTER_STATE] = torch.int16
    for name in names:
        yield name, dtypes.get(name, torch.float32)


def _plan_nbytes(piece: Piece) -> int:
    """Return at least what a plan, its part of the file's header included, takes for `piece`."""
    return 2 * len(piece.key) + _PIECE_NBYTES + 10 * 3 * len(piece.shape)
