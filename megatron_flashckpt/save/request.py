"""What the caller of a save says of the training job, and what it gets to know of the save."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron_flashckpt.megatron_lm.model_geometry import ModelGeometry
from megatron_flashckpt.tracing import Recorder

RankState = Callable[[ModelGeometry], dict[str, Any]]
"""Returns a rank's side state, for the geometry of its chunks."""


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """What a save needs to know of the training job. All ranks pass the same iteration."""

    iteration: int
    chunks: list[Any]
    """Unwrapped model chunks of this rank."""
    optimizer: Any
    """None: weights only."""
    rank_state: RankState
    """Called while nothing changes it."""
    common_state: Callable[[], dict[str, Any]]
    """What is alike on all ranks; called on rank 0."""
    description: dict[str, Any]
    retain_interval: int | None = None
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
