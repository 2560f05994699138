"""Pace, saves and interruptions of a job, computed from its history; pure functions.

`flashckpt report` and `flashckpt plan --measured` compute the save interval from these.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import msgspec

from megatron_flashckpt.catalog.history import PastSave, PastStart
from megatron_flashckpt.file_format.file_names import run_number, run_of
from megatron_flashckpt.layout.save_cost import SaveCost

#: With fewer interruptions, their mean distance is a guess.
ENOUGH = 3


class MeasuredJob(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the saves of a history, and the interruptions in it."""

    iteration_s: float
    """Seconds per iteration, with its share of the saves."""
    blocked_s: float
    """Seconds for which a save blocked training, on the slowest rank."""
    durable_s: float
    """Seconds from the call of a save to its commit."""
    nbytes_per_s: float
    """Bytes of all ranks over the seconds from the call to the commit."""
    nbytes: int
    """Bytes of a checkpoint."""
    interval_iterations: int
    """Iterations between two saves to storage."""
    world_size: int
    """Ranks of the last save."""
    trained_s: float
    """Seconds from each start to the last save of its run, added up."""
    interruptions: int
    """Starts that continue earlier work, after the first run in `trained_s`: each counts as the end
    of an interruption."""

    @property
    def mtbf_s(self) -> float | None:
        """Mean seconds of training between interruptions; None if there were too few."""
        return self.trained_s / self.interruptions if self.interruptions >= ENOUGH else None


def measured(past: Sequence[PastSave | PastStart]) -> MeasuredJob | None:
    """Return the figures of a history; None if no run has two timed saves in it."""
    starts = {start.run: start.started_at for start in past if isinstance(start, PastStart)}
    saves = {save.save_id: save for save in past if isinstance(save, PastSave)}
    runs: dict[str, list[tuple[PastSave, SaveCost]]] = {}
    for save in saves.values():
        if save.cost is not None:
            runs.setdefault(run_of(save.save_id), []).append((save, save.cost))
    steps = []
    intervals = []
    for run in runs.values():
        run.sort(key=lambda each: each[0].iteration)
        for (former, before), (later, after) in itertools.pairwise(run):
            if later.iteration > former.iteration:
                intervals.append(later.iteration - former.iteration)
                steps.append((after.started_at - before.started_at) / intervals[-1])
    if not steps or statistics.median(steps) <= 0:
        return None
    costs = [cost for run in runs.values() for _, cost in run]
    written = [cost.nbytes / max(cost.durable_s, 1e-9) for cost in costs]
    # A history keeps as many starts as saves, so it may have starts of runs without a save.
    first = min(map(run_number, runs))
    return MeasuredJob(
        iteration_s=statistics.median(steps),
        blocked_s=statistics.median(cost.blocked_s for cost in costs),
        durable_s=statistics.median(cost.durable_s for cost in costs),
        nbytes_per_s=statistics.median(written),
        nbytes=costs[-1].nbytes,
        interval_iterations=round(statistics.median(intervals)),
        world_size=[save for save in saves.values() if save.cost is not None][-1].world_size,
        trained_s=sum(_trained_s(run, starts.get(name)) for name, run in runs.items()),
        interruptions=sum(
            isinstance(each, PastStart)
            and each.source != "scratch"
            and run_number(each.run) > first
            for each in past
        ),
    )


def _trained_s(run: list[tuple[PastSave, SaveCost]], started_at: float | None) -> float:
    """Return the seconds from the start of a run, or else its first save, to its last save."""
    first = run[0][1].started_at if started_at is None else started_at
    return max(run[-1][1].started_at - first, 0.0)
