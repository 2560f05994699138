"""Input and result of `Checkpointer.save`."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.save.copy_figures import CopyFigures
from megatron_flashckpt.tracing import Recorder


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """Contents of a save, and the time at which it returns. All ranks pass the same iteration."""

    iteration: int
    job: JobState
    rerun: Any = None
    """State of Megatron's rerun machine while a step is being rerun."""
    memory_only: bool = False
    """Keep the save in host memory; do not write it to storage."""
    blocking: bool = False
    """Copy everything before `save` returns, independent of `staging`."""
    must_wait: bool = False
    """Wait for a free slot, even with `busy: skip`. Equal on all ranks."""


@dataclasses.dataclass(frozen=True)
class SaveReport:
    """Result of a `save` call."""

    request: SaveRequest
    recorder: Recorder
    save_id: str = ""
    """Empty if nothing was staged."""
    copies: CopyFigures | None = None
    """Figures of the copies, which may still run; None if nothing was staged."""
    refusal: str | None = None
    """The reason why all ranks skipped the save (`busy: skip`)."""
    is_repeat: bool = False
    """True if the save was skipped because the same state was saved before."""
