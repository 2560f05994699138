"""Lineage: the pure rules by which every reader computes alone which saves count.

A save directory may hold saves of many runs: of runs that continued each other, of runs that were
set back and went another way, of agents that woke up late. Nothing here reads storage or a clock.
Names are written once, so late and doubled writes need not be fenced: nobody asks for them.

The rules, in short. A run descends from the runs in its `ancestors`, each up to the iteration at
which it was left; that is its *history*. The newest run is the highest one that continues a
checkpoint or has left one. A save counts if it is of the newest run's history. The tracker is a
person's wish if it is lower than what this package last wrote into it (`Tracked`) and names a save
of the history, or if it names a checkpoint that is of no known run; a wish excludes all that is
newer, in memory too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from megatron_flashckpt.file_format.file_names import SaveName, parse_save, run_number, run_of
from megatron_flashckpt.file_format.run_object import FOREIGN, Ancestor, Ancestors

#: Iteration in `Tracked` if a run was granted to begin from scratch.
NOTHING = -1


class Save(NamedTuple):
    """A checkpoint in storage or memory. Later ones are greater."""

    iteration: int
    save_id: str
    """Name of the save; "": a checkpoint of another format, which no run has made."""

    @property
    def run(self) -> str:
        return run_of(self.save_id) or FOREIGN

    @property
    def order(self) -> tuple[int, SaveName]:
        """Sort key: the iteration, then run, sequence and attempt."""
        return self.iteration, parse_save(self.save_id) or SaveName(0, "", 0, 0)


class Tracked(msgspec.Struct, frozen=True):
    """What an agent last wrote into the tracker, or whose wish was granted: `tracker.json`."""

    iteration: int
    """`NOTHING`: a run began from scratch, and the tracker named nothing."""
    save_id: str = ""
    """The save; the run's name if `iteration` is `NOTHING`; "" for a foreign checkpoint."""


class History:
    """The history of a run: its saves, and those of its ancestors up to where they were left."""

    def __init__(self, run: str, ancestors: Ancestors = ()) -> None:
        self.run = run
        self.ancestors = ancestors
        self._left_at: dict[str, int | None] = {run: None}
        for ancestor in ancestors:
            self._left_at.setdefault(ancestor.run, ancestor.left_at)

    def holds(self, save: Save) -> bool:
        """Return whether the save is of this history."""
        if save.run not in self._left_at:
            return False
        left_at = self._left_at[save.run]
        if save.run == FOREIGN:
            return save.iteration == left_at
        return left_at is None or save.iteration <= left_at


def descent(save: Save, ancestors: Ancestors) -> Ancestors:
    """Return the ancestors of a run that resumes from `save`.

    Args:
        ancestors: those of the run that has made the save.
    """
    return (Ancestor(save.run, save.iteration), *ancestors)


def sort_key(run: str) -> tuple[int, str]:
    """Return a key that sorts runs, the newest last."""
    return run_number(run), run


def newest_history(
    runs: Mapping[str, Ancestors], left: Collection[str], *, not_before: str = ""
) -> History | None:
    """Return the history of the newest run that continues a checkpoint or has left one.

    Args:
        runs: the ancestors of all known runs, from their objects, or as saves repeat them.
        left: runs that have left a checkpoint: committed, or held in memory by all its ranks.
        not_before: a run that began from scratch because a person had removed the tracker:
            older runs do not count any more.
    """
    for run in sorted(runs, key=sort_key, reverse=True):
        if sort_key(run) < sort_key(not_before):
            break
        if runs[run] or run in left:
            return History(run, runs[run])
    return None


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that a choice depends on, as one process sees it."""

    tracker: int | None
    """The iteration in the tracker; None: there is no tracker, or it names no iteration."""
    tracked: Tracked | None
    runs: Mapping[str, Ancestors]
    stored: Collection[Save]
    """Committed checkpoints in storage, of any run."""
    foreign: Collection[int] = ()
    """Iterations whose checkpoints are in other formats."""
    held: Collection[Save] = ()
    """Saves that all their ranks hold in memory, of any run."""
    numbers: Collection[int] = ()
    """Numbers of all runs whose objects are visible."""
    tracker_is_damaged: bool = False
    """A tracker that exists and names nothing is nobody's wish."""


class Candidate(NamedTuple):
    """A checkpoint that may be loaded."""

    save: Save
    in_memory: bool


@dataclasses.dataclass(frozen=True)
class Choice:
    """The checkpoints that a job may resume from, and why others are not used."""

    candidates: tuple[Candidate, ...] = ()
    """The best one first; the others replace it if it is damaged."""
    history: History | None = None
    wish: int | None = None
    """The iteration that a person wants, if the tracker was set back or names a foreign one."""
    removed: bool = False
    """True if a person has removed the tracker: nothing counts."""
    unused: Mapping[Save, str] = dataclasses.field(default_factory=dict)
    """Saves in memory that are not used, with the reason."""


def choose(facts: Facts) -> Choice:
    """Return the checkpoints that the directory and the memory offer to a job that resumes."""
    tracked = facts.tracked
    has_no_tracker = facts.tracker is None and not facts.tracker_is_damaged
    if has_no_tracker and tracked is not None and tracked.iteration != NOTHING:
        reason = "the tracker was removed, so training begins from scratch"
        return Choice(removed=True, unused=dict.fromkeys(facts.held, reason))
    scratch = tracked.save_id if tracked is not None and tracked.iteration == NOTHING else ""
    left = {save.run for save in (*facts.stored, *facts.held)}
    history = newest_history(facts.runs, left, not_before=scratch)
    # A tracker that a person made after a run was granted to begin from scratch counts anew.
    if scratch and history is None and facts.tracker is not None:
        history = newest_history(facts.runs, left)

    def counts(save: Save) -> bool:
        return history is not None and history.holds(save)

    foreign = [Save(iteration, "") for iteration in facts.foreign]
    stored = [save for save in (*facts.stored, *foreign) if counts(save)]
    held = [save for save in facts.held if counts(save)]
    wish = _wish(facts, history, stored)
    if wish is not None and not any(save.iteration == wish for save in stored):
        named = [save for save in _of_no_known_run(facts) if save.iteration == wish]
        best = max(named, key=lambda save: save.order)
        reason = f"the tracker names iteration {wish}, which no run of this directory has saved"
        return Choice(
            (Candidate(best, in_memory=False),),
            history,
            wish,
            unused=dict.fromkeys(facts.held, reason),
        )
    unused = {
        save: "it belongs to another history than the newest run of this directory"
        for save in facts.held
        if not counts(save)
    }
    if wish is not None:
        reason = f"the tracker was set back to iteration {wish}"
        unused |= {save: reason for save in held if save.iteration > wish}
        stored = [save for save in stored if save.iteration <= wish]
        held = [save for save in held if save.iteration <= wish]
    candidates = [Candidate(save, in_memory=False) for save in stored]
    candidates += [Candidate(save, in_memory=True) for save in held]
    # Of one iteration, memory comes first: it needs no storage.
    candidates.sort(
        key=lambda candidate: (
            candidate.save.iteration,
            candidate.in_memory,
            candidate.save.order,
        ),
        reverse=True,
    )
    return Choice(tuple(candidates), history, wish, unused=unused)


def _of_no_known_run(facts: Facts) -> list[Save]:
    """Return foreign checkpoints, and those that were copied here from another directory."""
    known = set(facts.runs)
    known |= {ancestor.run for ancestors in facts.runs.values() for ancestor in ancestors}
    copied = [save for save in facts.stored if save.run not in known]
    return [*copied, *(Save(iteration, "") for iteration in facts.foreign)]


def _wish(facts: Facts, history: History | None, stored: list[Save]) -> int | None:
    """Return the iteration in the tracker if a person has written it there; else None."""
    named, tracked = facts.tracker, facts.tracked
    if named is None:
        return None
    is_stored = any(save.iteration == named for save in stored)
    if not is_stored:
        elsewhere = any(save.iteration == named for save in _of_no_known_run(facts))
        is_ours = tracked is not None and tracked.iteration == named and history is not None
        return named if elsewhere and not is_ours else None
    is_set_back = tracked is not None and named < tracked.iteration
    is_of_history = (
        tracked is not None
        and history is not None
        and (tracked.save_id == "" or history.holds(Save(tracked.iteration, tracked.save_id)))
    )
    return named if is_set_back and is_of_history else None


def awaited(facts: Facts, numbers: Collection[int]) -> str | None:
    """Return what a start must still wait for while names may be late; None: nothing.

    Args:
        numbers: the numbers of all runs whose objects are visible.
    """
    named = facts.tracker
    known = {save.iteration for save in facts.stored} | {*facts.foreign}
    if named is not None and named not in known:
        return f"the checkpoint of iteration {named}, which the tracker names"
    tracked = facts.tracked
    if named is not None and (tracked is None or named > tracked.iteration) and facts.runs:
        return "the twin of the tracker"
    missing = set(range(1, max(numbers, default=0))) - set(numbers)
    if missing:
        return f"the object of run {max(missing)}"
    return None
