"""A save whose copies run beside training, and the line of the job's log that reports it."""

from __future__ import annotations

import dataclasses

from megatron_flashckpt.save.copy_figures import CopyFigures
from megatron_flashckpt.save.request import SaveReport
from megatron_flashckpt.tracing import LOOP


@dataclasses.dataclass(frozen=True)
class StagedSave:
    """A save that has returned to training, until its figures are reported."""

    report: SaveReport
    copies: CopyFigures
    memory_only: bool
    until_durable: bool
    """True if `save_checkpoint` has waited for the commit, too."""

    def line(self) -> str:
        """Return the line for the log. Called once, when the figures of the copies are known."""
        recorder = self.report.recorder
        recorder.step_on_gpu_s = self.copies.step_wait_s()
        where = "as the training loop sees it" if recorder.call == LOOP else "in save_checkpoint"
        if self.until_durable:
            where += " before its wait for a durable checkpoint"
        kept = " for host memory only" if self.memory_only else ""
        return (
            f"iteration {self.report.iteration} staged{kept}, "
            f"{self.report.nbytes / 2**20:.1f} MiB on rank 0, "
            f"blocked {1000 * recorder.call_s:.1f} ms {where}, then "
            f"{1000 * recorder.step_s:.1f} ms for the copies; {_copied(self.copies)}"
        )


def _copied(figures: CopyFigures) -> str:
    text = f"copied at {figures.nbytes / 1e9 / max(figures.seconds, 1e-9):.1f} GB/s"
    if figures.locked_nbytes is None:
        return text
    if figures.part_bytes_per_s is not None:
        text += f" (single parts {figures.part_bytes_per_s / 1e9:.1f})"
    total = figures.slab_nbytes
    return (
        f"{text}; of {total / 2**30:.1f} GiB of slots {figures.locked_nbytes / 2**30:.1f} are "
        f"page-locked, {figures.huge_nbytes / 2**30:.1f} in pages of 2 MiB"
    )
