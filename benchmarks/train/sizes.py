"""Sizes of the model in `python -m benchmarks train`, with the schedule of its saves."""

from __future__ import annotations

import dataclasses

from tools.gpu_check.megatron_run import MODELS


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Saves of a run: every `interval` iterations, `saves` times, and at the end."""

    interval: int
    saves: int
    after_restart: int | None = None
    """Iterations from a restart to the save in its job; None: `interval`."""

    @property
    def iterations(self) -> int:
        """Number of iterations of the run. One more save follows the last iteration."""
        return self.interval * (self.saves + 1) - 1

    @property
    def saved_at(self) -> list[int]:
        """Iterations with a save, without the save at the end."""
        return [self.interval * number for number in range(1, self.saves + 1)]

    @property
    def resumed_from(self) -> int:
        """Iteration of the checkpoint that new ranks load; at least one save follows it."""
        return self.interval * (self.saves - 1)

    def saved_after(self, first: int) -> int:
        """Return the iteration of the only save of a job that resumes from iteration `first`.

        It is also that job's interval, because no other multiple of it follows before the end. So
        memory holds no newer save when the job is killed, however slow storage is.
        """
        return first + (self.after_restart or self.interval)


@dataclasses.dataclass(frozen=True)
class Size:
    """Model, and the schedule, limits and estimates of its runs."""

    model: tuple[str, ...]
    schedule: Schedule
    rounds: int
    timeout_s: float
    system_s: float
    """Estimate: seconds of one system in one round, on two quiet cores."""
    disk_nbytes: float
    """Size of all checkpoints of one run."""


def _model(layers: int, hidden: int, heads: int, sequence: int, batch: int) -> tuple[str, ...]:
    arguments = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
        f"--seq-length {sequence} --max-position-embeddings {sequence} "
        f"--global-batch-size {batch} --micro-batch-size {min(2, batch // 2)}"
    )
    return tuple(arguments.split())


USUAL, QUICK, LARGE = "usual", "quick", "large"
SIZES = {
    # 29.3 million parameters: 0.41 GB of weights, masters and moments.
    USUAL: Size(_model(8, 512, 8, 64, 8), Schedule(5, 4), 3, 240.0, 36.0, 3e9),
    QUICK: Size(_model(2, 128, 4, 32, 4), Schedule(3, 2), 1, 240.0, 13.0, 3e8),
    # 210 million parameters: 2.9 GB, 1.5 GB for each of two ranks, as in DLRover's published runs.
    # At 100 MB/s a save takes 30 s; the interval is longer, so that no system has to skip one.
    LARGE: Size(_model(16, 1024, 16, 32, 2), Schedule(10, 2), 1, 900.0, 240.0, 12e9),
}

GPU_QUICK = "quick"
#: Models for one GPU. `system_s` is for an H100; there a rank's imports are already made.
GPU_SIZES = {
    # 0.4 billion parameters: 5 GB, which that machine's disk takes in 3 s, 12 steps in 4 s.
    "0.4b": Size(
        (*MODELS["0.4b"].split(), "--micro-batch-size", "8", "--global-batch-size", "24"),
        *(Schedule(12, 3, 2), 2, 100.0, 35.0, 26e9),
    ),
    # 1.3 billion parameters: 18 GB, 12 s of writing, 32 steps in 12 s.
    "1.3b": Size(
        (*MODELS["1.3b"].split(), "--micro-batch-size", "4", "--global-batch-size", "8"),
        *(Schedule(32, 2, 16), 1, 180.0, 90.0, 56e9),
    ),
    GPU_QUICK: Size(_model(2, 128, 4, 32, 4), Schedule(3, 2, 2), 1, 120.0, 30.0, 3e8),
}
