"""What a save is told of the training job, and what it reports of itself."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_flashckpt.tracing import Recorder


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """What a save needs to know of the training job. All ranks pass the same iteration."""

    iteration: int
    chunks: list[Any]
    """Unwrapped model chunks of this rank."""
    optimizer: Any
    """None: weights only."""
    args: Any
    """Megatron's own."""
    scheduler: Any = None
    """Megatron's `OptimizerParamScheduler`; saved if there is an optimizer."""
    floating_point_operations: Any = 0
    """Counted by the training loop since the start of training."""
    data_iterator: Any = None
    """The training loop's; a step that is being rerun saves its position."""
    has_rerun_machine: bool = False
    """True if Megatron's training makes the call: its rerun machine may have state to save."""
    memory_only: bool = False
    """Stage it and leave it there: it is not written."""
    blocking: bool = False
    """Copy everything before `save` returns, whatever `staging` says."""
    must_wait: bool = False
    """Wait for a free slot, whatever `busy` says. Equal on all ranks."""
    in_loop: bool = False
    """True if the caller measures how long the training loop waits (`SaveReport.recorder`)."""


@dataclasses.dataclass(frozen=True)
class SaveReport:
    """What a save cost the training thread."""

    iteration: int
    blocked_s: float
    """Seconds that this call took."""
    nbytes: int
    recorder: Recorder
    skipped: bool = False
    """Nothing was staged."""
    refusal: str | None = None
    """Why all ranks skipped it (`busy: skip`)."""
    is_repeat: bool = False
    """Skipped because the same state was saved before."""
