"""The input of a load of one checkpoint: the model and optimizer to fill, and the policy."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megatron_flashckpt.errors import FlashCkptError, MissingStateError, UnsupportedError
from megatron_flashckpt.layout.piece import WEIGHT, Piece
from megatron_flashckpt.load.load_policy import LoadPolicy
from megatron_flashckpt.load.saved_job import SavedJob
from megatron_flashckpt.megatron_lm import hyper_parameters, load_pieces, side_state
from megatron_flashckpt.megatron_lm.accounting import unquantizable
from megatron_flashckpt.megatron_lm.cutting import LocalPiece
from megatron_flashckpt.megatron_lm.model_geometry import ModelGeometry
from megatron_flashckpt.megatron_lm.model_state import ModelState

Names = set[tuple[str, str]]
"""Kinds and keys."""

StateTypes = dict[str, dict[str, torch.dtype]]
"""Types of optimizer states: family of optimizers, then kind of state, to type."""


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """The model and optimizer that a load fills."""

    model_state: ModelState
    chunks: list[Any]
    """Unwrapped model chunks of this rank."""
    optimizer: Any
    """Megatron's optimizer; None to load weights only."""
    policy: LoadPolicy
    overwritten: Names = dataclasses.field(default_factory=set)
    """Kind and key of the tensors that a damaged checkpoint has overwritten on this rank.
    The checkpoint that is loaded instead must replace all of them."""
    refusal: FlashCkptError | None = None
    """Error that forbids this rank to load or to start from scratch; raised on all ranks."""

    @property
    def geometry(self) -> ModelGeometry:
        return self.model_state.geometry(self.chunks)

    @property
    def fills_optimizer(self) -> bool:
        return self.policy.fill and self.optimizer is not None

    def raise_refusal(self) -> None:
        """Raise the refusal of this rank, if any; the caller raises on all ranks."""
        if self.refusal is not None:
            raise self.refusal

    def extra_states(self) -> list[str]:
        """Return the global names of the extra states of this rank's modules."""
        return side_state.extra_state_names(self.chunks, self.geometry)

    def state_types(self, job: SavedJob) -> StateTypes:
        """Return the states that `job` stored for the parameters of this rank's optimizers."""
        if not self.policy.fill:
            return {}
        return load_pieces.state_types(self.geometry, self.optimizer, job.state_types)

    def pieces(self, job: SavedJob, state_types: StateTypes) -> list[LocalPiece]:
        """Return the pieces that a load fills on this rank; allocates missing optimizer state.

        Args:
            state_types: the state types of all ranks.

        Raises:
            UnsupportedError: the load would not read the masters of FP8 or FP4 weights.
        """
        if not self.policy.fill:
            return []
        refuse_missing_masters(self, job.place)
        return load_pieces.load_pieces(
            self.geometry, self.chunks, self.optimizer, state_types, job.state_type
        )

    def frozen(self) -> list[Piece]:
        """Return the weights of this rank that do not train, so have no optimizer state."""
        return [
            part.piece
            for parameter, geometry in self.geometry.parameters
            if not parameter.requires_grad
            for part in geometry.parts(WEIGHT, parameter.dtype, 0, parameter.numel())
        ]

    def requantized(self) -> Names:
        """Return the names of the weights that are derived from their masters after the load."""
        if not self.policy.fill:
            return set()
        return {(WEIGHT, key) for key in self.geometry.quantized_keys}

    def check(self, names: Names, param_groups: list[dict[str, Any]], place: str) -> None:
        """Check that `names` may be filled.

        Raises:
            MissingStateError: param groups are missing, or a damaged checkpoint's tensors stay.
        """
        if self.fills_optimizer:
            hyper_parameters.check(self.optimizer, param_groups, self.geometry)
        refuse_mixture(self, names, place)


def refuse_missing_masters(request: LoadRequest, place: str) -> None:
    """Raise an error if this rank has FP8 or FP4 weights whose masters this load does not read."""
    lines = unquantizable(request.chunks, request.optimizer)
    if lines:
        raise UnsupportedError(
            f"{place}: {'; '.join(lines)}. A load derives such weights from their masters, so it "
            "needs the optimizer: load without --finetune and --no-load-optim; or load without "
            "--fp8-param-gather and --fp4-param-gather. Nothing was loaded"
        )


def refuse_mixture(request: LoadRequest, names: Names, place: str) -> None:
    """Raise an error if tensors would keep the values of a damaged checkpoint."""
    unfilled = sorted(f"{kind}/{key}" for kind, key in request.overwritten - names)
    if unfilled:
        raise MissingStateError(
            f"{place}: lacks {', '.join(unfilled)}, which a damaged checkpoint has already "
            "overwritten; restart the job with --ckpt-step for this iteration"
        )


def refuse_missing_optimizer(
    request: LoadRequest, param_groups: list[dict[str, Any]], place: str
) -> None:
    """Raise an error if the load fills an optimizer but the checkpoint has no optimizer state.

    Args:
        param_groups: the param groups of the checkpoint.
    """
    if request.fills_optimizer and not param_groups:
        raise MissingStateError(
            f"{place}: has no optimizer state (it was saved with --no-save-optim, or without "
            "an optimizer); load it with --no-load-optim or --finetune; nothing was loaded"
        )
