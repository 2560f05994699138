"""Lineage: the pure rules by which every reader computes alone which saves count.

A save directory may hold saves of many runs: of runs that continued each other, of runs that were
set back and went another way, of agents that woke up late. Nothing here reads storage or a clock.
Names are written once, so late and doubled writes need not be fenced: nobody asks for them.

The rules, in short. A run descends from the runs in its `ancestors`, each up to the iteration at
which it was left; that is its *history*. The newest run is the highest one that continues a
checkpoint or has left one. A save counts if it is of the newest run's history. The tracker is a
person's wish if it is lower than what this package last wrote into it (`Tracked`) and names a save
of the history; if it names a checkpoint that is of no known run; if it says `release`; or if it is
there again after it was removed. A wish excludes all that is newer, in memory too. A wish for what
does not exist is none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from megatron_flashckpt.file_format.file_names import (
    RELEASE,
    SaveName,
    parse_save,
    run_number,
    run_of,
)
from megatron_flashckpt.file_format.run_object import FOREIGN, Ancestor, Ancestors

#: Iteration in `Tracked` if a run has opened although the tracker was removed; not `RELEASE`.
NOTHING = -2


class Save(NamedTuple):
    """A checkpoint in storage or memory."""

    iteration: int
    """The iteration of its directory, or `RELEASE`."""
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
    """Contents of `tracker.json`: an agent's last tracker, or the wish that was granted last."""

    iteration: int
    """Iteration in the tracker. `NOTHING`: a person had removed the tracker when a run opened,
    which began from scratch or with `--ckpt-step`."""
    save_id: str = ""
    """The save of that iteration; "": one of another program, or none. The run's name if
    `iteration` is `NOTHING`."""
    run: str = ""
    """The run that was granted the wish; "": an agent wrote the tracker after a commit."""


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
        if save.run == FOREIGN or RELEASE in (save.iteration, left_at):
            # A run that resumed from such a checkpoint has no other one of its maker.
            return save.iteration == left_at
        return left_at is None or save.iteration <= left_at


def descent(save: Save, ancestors: Ancestors) -> Ancestors:
    """Return the ancestors of a run that resumes from `save`.

    Args:
        ancestors: those of the run that has made the save.
    """
    nearest = Ancestor(save.run, save.iteration)
    # A release has weights only: training begins anew, at iteration 0.
    return (nearest,) if save.iteration == RELEASE else (nearest, *ancestors)


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
        not_before: a run that has opened although a person had removed the tracker: older runs
            do not count any more, except as its ancestors.
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
    """The iteration in the tracker, or `RELEASE`; None: no tracker, or it names no iteration."""
    tracked: Tracked | None
    runs: Mapping[str, Ancestors]
    """The known runs that a choice can depend on, with their ancestors."""
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

    @property
    def tracker_is_removed(self) -> bool:
        """True if a person has removed the tracker: nothing counts that is older."""
        is_missing = self.tracker is None and not self.tracker_is_damaged
        return is_missing and self.tracked is not None and self.tracked.iteration != NOTHING

    @property
    def begun_anew_by(self) -> str:
        """The run that has opened without a tracker; "": none, or later ones have saved.

        A tracker that is there now is a person's.
        """
        tracked = self.tracked
        return tracked.save_id if tracked is not None and tracked.iteration == NOTHING else ""

    def history(self) -> History | None:
        """Return the newest history; None: no run has continued or left a checkpoint."""
        left = {save.run for save in (*self.stored, *self.held)}
        return newest_history(self.runs, left, not_before=self.begun_anew_by)

    def in_storage(self) -> list[Save]:
        """Return the checkpoints in storage, those of other formats too."""
        return [*self.stored, *(Save(iteration, "") for iteration in self.foreign)]


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
    if facts.tracker_is_removed:
        reason = "the tracker was removed, so training begins from scratch"
        return Choice(removed=True, unused=dict.fromkeys(facts.held, reason))
    history = facts.history()
    wish, wanted = _wish(facts, history)
    if wanted is not None and wanted.run in facts.runs:
        history = History(wanted.run, facts.runs[wanted.run])

    def counts(save: Save) -> bool:
        return history is not None and history.holds(save)

    unused = {save: _why_not(save, facts) for save in facts.held if not counts(save)}
    candidates = [Candidate(save, in_memory=False) for save in facts.in_storage() if counts(save)]
    candidates += [Candidate(save, in_memory=True) for save in facts.held if counts(save)]
    if wish is not None:
        last = wish if wanted is None else wish - 1  # another checkpoint takes its place
        reason = f"the tracker names {_shown(wish)}, which "
        reason += "a person wrote there" if wanted is None else "no run of this directory has saved"
        unused |= {
            save: reason for save, in_memory in candidates if in_memory and save.iteration > last
        }
        candidates = [
            candidate
            for candidate in candidates
            if candidate.save.iteration <= (last if candidate.in_memory else wish)
        ]
    # Of one iteration, memory comes first: it needs no storage.
    candidates.sort(
        key=lambda candidate: (
            candidate.save.iteration,
            candidate.in_memory,
            candidate.save.order,
        ),
        reverse=True,
    )
    if wanted is not None and all(save != wanted for save, _ in candidates):
        # Of no known history: what the newest one has replaces it.
        candidates.insert(0, Candidate(wanted, in_memory=False))
    return Choice(tuple(candidates), history, wish, unused=unused)


def _shown(iteration: int) -> str:
    return "'release'" if iteration == RELEASE else str(iteration)


def _why_not(save: Save, facts: Facts) -> str:
    if save.run not in facts.runs:
        return (
            "the directory does not know its run: it was emptied, or another copy was put in its "
            "place"
        )
    return "it belongs to another history than the newest run of this directory"


def _wish(facts: Facts, history: History | None) -> tuple[int | None, Save | None]:
    """Return the iteration that a person wants, and its checkpoint if it is off the history.

    The iteration in the tracker is a person's if no agent has written it, as far as `Tracked`
    tells. None: it is an agent's, or names nothing that exists.
    """
    named, tracked = facts.tracker, facts.tracked
    there = [save for save in facts.in_storage() if save.iteration == named]
    if named is None or not there:
        return None, None
    if history is not None and any(map(history.holds, there)):
        is_wish = _is_alone(facts) or _is_set_back(named, tracked, history)
        return named if is_wish else None, None
    if _is_granted(tracked, there):
        return None, None
    known = _known_runs(facts)
    wanted = [save for save in there if save.run not in known or named == RELEASE]
    best = max(wanted, key=lambda save: save.order, default=None)
    return (None, None) if best is None else (named, best)


def _is_alone(facts: Facts) -> bool:
    """Return whether there is nothing of ours but checkpoints and tracker, as in a copy."""
    return facts.tracked is None and not facts.numbers


def _is_granted(tracked: Tracked | None, there: Collection[Save]) -> bool:
    """Return whether `tracked` says that the tracker led to one of these saves before."""
    return tracked is not None and Save(tracked.iteration, tracked.save_id) in there


def _known_runs(facts: Facts) -> set[str]:
    """Return the runs whose saves an agent may have written into the tracker.

    None, if a person has written the tracker: of a copy, or after a run has opened without one.
    """
    if _is_alone(facts) or facts.begun_anew_by:
        return set()
    ancestors = (ancestor for ancestors in facts.runs.values() for ancestor in ancestors)
    return {*facts.runs, *(ancestor.run for ancestor in ancestors)} - {FOREIGN}


def _is_set_back(named: int, tracked: Tracked | None, history: History) -> bool:
    """Return whether the tracker is lower than what was written there in the same history."""
    if tracked is None or tracked.iteration == NOTHING or tracked.iteration <= named:
        return False
    return tracked.run == history.run or history.holds(Save(tracked.iteration, tracked.save_id))


def at(facts: Facts, iteration: int) -> Save | None:
    """Return the checkpoint that a person means by an iteration (`--ckpt-step`, commands).

    Of several in one directory, the one of the newest history, else the latest.
    """
    history = facts.history()
    return max(
        (save for save in facts.in_storage() if save.iteration == iteration),
        key=lambda save: (history is not None and history.holds(save), save.order),
        default=None,
    )


def granted(facts: Facts, run: str) -> Tracked | None:
    """Return the new `tracker.json` once a run has opened; None: it stays as it is.

    What the tracker names now is then no wish any more.
    """
    if facts.tracker_is_removed:
        return Tracked(NOTHING, run)
    if facts.tracker is None:
        return None
    save = at(facts, facts.tracker)
    return Tracked(facts.tracker, "" if save is None else save.save_id, run)


def awaited(facts: Facts) -> str | None:
    """Return what a start must still wait for while names may be late; None: nothing."""
    named, tracked = facts.tracker, facts.tracked
    if facts.tracker_is_removed:
        return "the tracker, which an agent has written"
    if named is not None and not any(save.iteration == named for save in facts.in_storage()):
        return f"the checkpoint of iteration {_shown(named)}, which the tracker names"
    said = None if tracked is None else tracked.iteration
    if named is not None and named != said and facts.runs:
        return f"the tracker to name what its twin does ({_shown(named)}, {said})"
    # A run below the newest history decides nothing. Numbers have no gaps: an opener sees all.
    history = facts.history()
    decided = 0 if history is None else run_number(history.run)
    seen = {*facts.numbers, *map(run_number, facts.runs)}
    traces = {run_number(save.run) for save in (*facts.stored, *facts.held)}
    above = sorted(number for number in seen | traces if number > decided)
    for lower, number in zip([decided, *above], above, strict=False):
        if number not in seen or number > lower + 1:
            return f"the object of a run below or equal to {number}"
    return None
