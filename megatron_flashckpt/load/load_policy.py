"""Choice of a checkpoint, and of its parts that a load takes; equal on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from megatron_flashckpt.megatron_lm.side_state import COMMON_STATE


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadPolicy:
    """The wishes of the caller. The stand-ins make it from Megatron's args."""

    step: int | None = None
    """The iteration to load; None for the newest. If it is given, no other is loaded instead."""
    weights_only: bool = False
    """True: a new training begins with these weights, at iteration 0, with a new history. Its
    vocabulary may be another one, so rows of embeddings may be cut or added."""
    wants_optimizer: bool = True
    """False: new masters are made from the weights."""
    wants_rng: bool = True
    strict: bool = True
    """False: missing state keeps its values, except for masters of loaded weights, and unexpected
    state is not read."""
    keeps_all_weights: bool = False
    """True: `weights_only`, too, refuses tensors of the checkpoint that the model does not have. A
    new training may drop a head."""
    words: int | None = None
    """Number of words of the job's vocabulary, as `vocabulary.least_words` returns it."""
    fill: bool = True
    """False: read the side state only."""
    needs: tuple[str, ...] = COMMON_STATE
    """Keys of the common state without which the caller cannot resume."""
    caller_loads: Callable[[str], bool] = lambda directory: False
    """Returns whether the caller itself loads from a directory what other programs wrote there;
    otherwise it is an error."""
    uses_checkpoint_args: bool = False
    """True: ranks have taken args from checkpoints, which must agree (`argument_source`)."""
    pretrained: str | None = None
    """Directory whose weights a new training takes if there is no other checkpoint."""
    timeout_s: float | None = None
    """Longest wait of the job's collectives, in seconds; retries of storage end before."""

    @property
    def refuses_unexpected(self) -> bool:
        """True if the model must have all tensors of the checkpoint."""
        return self.strict and (self.keeps_all_weights or not self.weights_only)

    @property
    def falls_back(self) -> bool:
        """True if an older checkpoint may replace a damaged one."""
        return not (self.step or self.weights_only)
