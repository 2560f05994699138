"""The janitor: the only code besides the store that deletes anything in a save directory.

It works after a commit and once after an agreed load, only in the agent of rank 0 of the newest
run. Looking for a later run right before each removal, it stops at the first one, which may have
resumed from what was to be removed.

Nothing is judged by absence. A save without an end may be committed by an agent that nobody knows
of; so the janitor creates a failed end first, which decides. Then the save's files go at once, and
the end last, when no node can be waiting for it any more. A committed checkpoint that no rule keeps
loses its end, gets a failed one, and goes in the same way. Files without their final name are part
of no checkpoint, and need no end. Whatever instant a process is killed at, the next janitor goes on
from what it finds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from megatron_flashckpt.agent.durable_commands import DurableCommands, forget_due
from megatron_flashckpt.agent.proposals import create_end
from megatron_flashckpt.agent.worker import Worker
from megatron_flashckpt.catalog.directory import iteration_entries, run_numbers
from megatron_flashckpt.catalog.iteration_files import (
    IterationFiles,
    KnownManifests,
    SaveFiles,
    read_iteration,
)
from megatron_flashckpt.catalog.lineage import History, Save
from megatron_flashckpt.catalog.retention import (
    Stored,
    newest_of,
    why_each_is_kept,
)
from megatron_flashckpt.catalog.tracker import tracked_iteration
from megatron_flashckpt.config import Retention
from megatron_flashckpt.error_classes import class_of, may_pass
from megatron_flashckpt.errors import FlashCkptError, for_listing
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.end import (
    End,
    Failure,
    encode_failure,
    kind_of,
)
from megatron_flashckpt.file_format.run_object import Ancestor, RunObject
from megatron_flashckpt.storage.parallel import for_all
from megatron_flashckpt.storage.store import Store

logger = logging.getLogger(__name__)

_SHOWN = 8
#: Prefix of NFS for a deleted file that a process on the same node still has open.
_OPEN_ELSEWHERE = ".nfs"
_DEAD = Failure(failed="the job that began this save has ended or gone on; no agent completes it")
_EXPIRED = Failure(
    failed="the checkpoint was removed, because no rule of 'retention' keeps it", was_removed=True
)


@dataclasses.dataclass(frozen=True)
class CommittedSave:
    """Facts of a committed save that its removals need: some hundred bytes.

    While storage hangs in a removal, further committed saves queue here. Template and common state
    of one save may take megabytes, so they are not kept.
    """

    store: Store
    iteration: int
    save_id: str
    history: History
    """History of the newest run, whose rank 0 this agent has; the save may be of an earlier run."""
    rules: Retention
    retain_interval: int | None
    previous: int | None
    """The iteration that the tracker has passed with this save; see `track.moved_tracker`."""


class _OvertakenError(FlashCkptError):
    """A later run has started; it decides what is removed."""


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One walk of the janitor, for one run."""

    store: Store
    history: History
    committed: str | None
    """The save after whose commit the janitor works; None: after the start of the run."""

    @property
    def number(self) -> int:
        return file_names.run_number(self.history.run)

    def look(self) -> None:
        """Raise _OvertakenError if a later run has started. Called right before each removal."""
        later = max(run_numbers(self.store), default=0)  # also if its object is damaged
        if later > self.number:
            raise _OvertakenError(f"run {later} has started and decides what is removed")

    def is_later(self, save_id: str) -> bool:
        """Return whether a save is of a later run."""
        return file_names.run_number(file_names.run_of(save_id)) > self.number

    def is_dead(self, save: Save, newest: int) -> bool:
        """Return whether no agent needs to end a save, which is not pending and of no later run.

        Args:
            newest: iteration of the newest whole checkpoint of the history.
        """
        # What the run resumed from, perhaps in memory, stays until a later one is durable.
        if self.history.ancestors[:1] == (Ancestor(save.run, save.iteration),):
            return newest > save.iteration
        if save.run != self.history.run:
            return True
        return self.committed is not None and save.order[1] < Save(0, self.committed).order[1]


class _Look(NamedTuple):
    """The janitor's memory of an iteration directory."""

    again_at: float
    """Time of the next look, by the janitor's clock; infinite: the directory is settled."""
    stored: tuple[Stored, ...]


class Janitor:
    """Removes what no run needs, on one thread.

    A directory is listed after a start of the job until a look finds nothing to delete, and again
    only while something in it is not settled.
    """

    def __init__(
        self,
        pending: Callable[[], Collection[str]] = tuple,
        deadline_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        commands: DurableCommands | None = None,
    ) -> None:
        """Touch nothing.

        Args:
            pending: returns the saves that this agent has pending, of whatever run.
            deadline_s: seconds that a node waits for the end of a save (`commit_timeout_s`). Clocks
                of hosts are not compared: an end is as old as this janitor has known it.
            commands: runs `agent.on_durable` for checkpoints whose command has not ended.
        """
        self._pending = pending
        self._deadline_s = deadline_s
        self._clock = clock
        self._commands = commands
        self._worker = Worker("janitor", "obsolete files were not removed")
        self._looks: dict[int, _Look] = {}
        self._manifests: KnownManifests = {}
        #: Since when ends are known to be failed, and checkpoints to lack files, by save.
        self._known_since: dict[tuple[Save, End], float] = {}
        #: What was logged since the start of the run.
        self._told: set[str] = set()
        #: The last run after whose start the janitor has begun.
        self._begun = ""

    def wait_at_least(self, deadline_s: float) -> None:
        """Keep ends for at least this long. Nodes of an earlier run may wait as long as before."""
        self._deadline_s = max(self._deadline_s, deadline_s)

    # ------------------------------------------------------------------ the thread

    def after_commit(self, save: CommittedSave) -> None:
        """Have the thread tidy up after a commit by the agent of rank 0 of the newest run."""
        self._worker.add(lambda: self.tidy(save))

    def after_start(self, store: Store, run: RunObject) -> None:
        """Have the thread tidy up after an agreed load, in the agent of the run's rank 0.

        Once per run: the rank may connect again, and get another slab.
        """
        if run.name != self._begun:
            self._begun = run.name
            self._worker.add(lambda: self.tidy_after_start(store, run))

    def close(self, within_s: float) -> None:
        """Return when all work is done, or after `within_s`."""
        self._worker.close(within_s)

    # ------------------------------------------------------------------ what is done

    def tidy_after_start(self, store: Store, run: RunObject) -> None:
        """Remove what earlier runs have left unfinished; keep every checkpoint."""
        self._looks.clear()
        self._told.clear()
        walk = _Pass(store, History(run.name, run.ancestors), None)
        with self._errors_logged("obsolete files"):
            self._end_and_clear(walk)
            self._clear_own_directory(walk)

    def tidy(self, save: CommittedSave) -> None:
        """Remove unfinished saves that the commit of `save` has passed, and expired checkpoints."""
        walk = _Pass(save.store, save.history, save.save_id)
        # An earlier attempt, or an earlier save of this iteration, may have been looked at.
        self._looks.pop(save.iteration, None)
        with self._errors_logged("obsolete files"):
            self._end_and_clear(walk)
            hit("commit.tidy")
            self._retire(walk, self._expired(save))
            hit("commit.done")

    def _clear_own_directory(self, walk: _Pass) -> None:
        """Remove what overtaken runs have left in `flashckpt/`: signs of life, requests to save,
        and unfinished files.

        An overtaken agent may put its sign again until it ends, and a write whose unfinished file
        is gone begins again.
        """

        def is_overtaken(name: str) -> bool:
            of = file_names.parse_event_name(name) or name
            run = file_names.run_of(of) or of.partition(".")[0]
            number = file_names.parse_run_file(name) or file_names.run_number(run)
            return 0 < number < walk.number

        walk.look()
        listed = [entry.name for entry in walk.store.list(file_names.ALIVE, sizes=False)]
        left = filter(is_overtaken, listed)
        walk.store.delete(f"{file_names.ALIVE}/{name}" for name in left)
        walk.store.discard_unfinished(file_names.OWN, lambda name: True)
        walk.store.discard_unfinished(file_names.PROBES, lambda name: True)
        for directory in (file_names.ALIVE, file_names.RUNS, file_names.HISTORY):
            walk.store.discard_unfinished(directory, is_overtaken)

    def removable(self, save: CommittedSave) -> list[tuple[Save, SaveFiles]]:
        """Return what `tidy` would remove, with its files. Changes nothing; `prune` calls this."""
        walk = _Pass(save.store, save.history, save.save_id)
        read = self._read(walk)
        newest = newest_of(self._all_stored(), walk.history)
        expired = {checkpoint.save for checkpoint in self._expired(save)}
        return [
            (named, of_save)
            for files in read
            if files.origin is None
            for save_id, of_save in sorted(files.saves.items())
            if (named := Save(files.iteration, save_id)) in expired
            or (
                not walk.is_later(save_id)
                and (
                    of_save.end is End.FAILED
                    or (of_save.end is None and walk.is_dead(named, newest))
                )
            )
        ]

    @contextlib.contextmanager
    def _errors_logged(self, what: str) -> Iterator[None]:
        """Log errors: a failed removal must not make a committed save look failed."""
        try:
            yield
        except _OvertakenError as error:
            logger.info("%s stay: %s", what, error)
        except (FlashCkptError, OSError) as error:
            logger.warning("%s are not removed now: %s", what, error)

    # ------------------------------------------------------------------ unfinished saves

    def _read(self, walk: _Pass) -> list[IterationFiles]:
        """Read the directories that are due, and remember their checkpoints."""
        store = walk.store
        entries = iteration_entries(store)
        entries.pop(file_names.RELEASE, None)  # a person has put it there
        for entry in entries.values():
            if entry.kind == "link":
                self._tell(
                    "%s/%s: is a symbolic link; nothing in it is removed",
                    *(store.place, entry.name),
                )
        directories = [number for number, entry in entries.items() if entry.kind == "directory"]
        # A removed directory may be made again by an agent that wakes up late.
        self._looks = {
            number: self._looks[number] for number in directories if number in self._looks
        }
        now = self._clock()
        due = [
            number
            for number in directories
            if number not in self._looks or self._looks[number].again_at <= now
        ]
        read = for_all(lambda number: self._read_one(store, number), due)
        return [files for files in read if files is not None]

    def _read_one(self, store: Store, iteration: int) -> IterationFiles | None:
        try:
            files = read_iteration(store, iteration, self._manifests)
        except (FlashCkptError, OSError) as error:
            logger.warning("nothing of iteration %d is removed now: %s", iteration, error)
            return None
        stored = [of_save.stored for of_save in files.saves.values()]
        if files.origin is not None:
            stored = []
        self._looks[iteration] = _Look(0.0, tuple(filter(None, stored)))
        return files

    def _all_stored(self) -> list[Stored]:
        return [checkpoint for look in self._looks.values() for checkpoint in look.stored]

    def _end_and_clear(self, walk: _Pass) -> None:
        """End the saves that no agent completes, and delete the files of failed ones."""
        read = self._read(walk)
        newest = newest_of(self._all_stored(), walk.history)
        # After the listing: a save that has begun since is not in it.
        pending = set(self._pending())
        for files in read:
            with self._removal_errors_logged(files.iteration):
                again_at = self._settle(walk, files, newest, pending)
                self._looks[files.iteration] = self._looks[files.iteration]._replace(
                    again_at=again_at
                )

    @contextlib.contextmanager
    def _removal_errors_logged(self, iteration: int) -> Iterator[None]:
        try:
            yield
        except _OvertakenError:
            raise
        except (FlashCkptError, OSError) as error:
            logger.warning("cannot remove files of iteration %d: %s", iteration, error)

    def _settle(self, walk: _Pass, files: IterationFiles, newest: int, pending: set[str]) -> float:
        """Remove the unfinished saves in a directory; return the time of the next look."""
        place = f"{walk.store.place}/{files.directory}"
        if files.origin is not None:
            self._tell(
                "%s: holds the checkpoint of iteration %d, so it was renamed or copied by hand; "
                "nothing in it is removed",
                *(place, files.origin),
            )
            return math.inf
        self._discard_unfinished(walk, files, newest, pending)
        if not files.saves and files.iteration < newest:
            return self._settle_emptied(walk, files)
        # A directory without saves goes when the history has passed it.
        again_at = math.inf if files.saves else 0.0
        for save_id, of_save in files.saves.items():
            save = Save(files.iteration, save_id)
            if save_id in pending or walk.is_later(save_id):
                again_at = 0.0
            elif of_save.problem is not None:
                self._tell(
                    "nothing of save %s in %s is removed, because its end cannot be read: %s",
                    *(save_id, place, for_listing(str(of_save.problem))),
                )
                again_at = min(again_at, 0.0 if may_pass(of_save.problem) else math.inf)
            elif of_save.end is None and not walk.is_dead(save, newest):
                again_at = 0.0
            elif of_save.end is End.COMMITTED:
                if of_save.stored is not None and of_save.stored.is_due:
                    self._take_up_due(walk, save)
                    again_at = 0.0
                if of_save.stored is not None and not of_save.stored.is_whole:
                    self._age_s(save, End.COMMITTED)
                    again_at = 0.0
                elif of_save.records:
                    walk.look()
                    walk.store.delete(f"{files.directory}/{name}" for name in of_save.records)
                    hit("commit.records")
                    # A node whose create was not answered creates its record again, so a look that
                    # finds none comes last.
                    again_at = 0.0
            else:
                again_at = min(again_at, self._end_and_clear_one(walk, files, of_save))
        return again_at

    def _take_up_due(self, walk: _Pass, save: Save) -> None:
        """Have the command of a checkpoint run that an earlier agent has left, if it counts."""
        if not walk.history.holds(save):
            walk.look()
            forget_due(walk.store, save)
        elif self._commands is not None:
            self._commands.add(walk.store, save)

    def _discard_unfinished(
        self, walk: _Pass, files: IterationFiles, newest: int, pending: set[str]
    ) -> None:
        """Delete what killed agents have left of names that nobody needs any more.

        A dead save may have no other name. No checkpoint is made of unfinished names, so these need
        no end first.
        """

        def is_dead(name: str) -> bool:
            save_id = file_names.save_of(name)
            if save_id is None or save_id in pending or walk.is_later(save_id):
                return False
            of_save = files.saves.get(save_id)
            has_end = of_save is not None and of_save.end is not None
            return has_end or walk.is_dead(Save(files.iteration, save_id), newest)

        walk.look()
        walk.store.discard_unfinished(files.directory, is_dead)

    def _end_and_clear_one(self, walk: _Pass, files: IterationFiles, of_save: SaveFiles) -> float:
        """Delete the files of a save that is not committed; return the time of the next look."""
        save_id = of_save.save_id
        save = Save(files.iteration, save_id)
        if of_save.end is None:
            if self._ended_dead(walk, files, of_save) is End.COMMITTED:
                return 0.0
            hit("leftover.ended")
        end = f"{files.directory}/{file_names.end_name(save_id)}"
        if of_save.bulk:
            walk.look()
            walk.store.delete(f"{files.directory}/{name}" for name in of_save.bulk)
            hit("leftover.deleted")
            logger.info("removed the files of save %s in %s", save_id, files.directory)
            self._tell_of_others(walk.store, files)
        age_s = self._age_s(save, End.FAILED)
        if age_s < self._deadline_s:
            # Further files may come into view late, so a look that finds none comes first.
            return 0.0 if of_save.bulk else self._clock() + self._deadline_s - age_s
        walk.look()
        walk.store.delete([end])
        del self._known_since[save, End.FAILED]
        return 0.0

    def _ended_dead(self, walk: _Pass, files: IterationFiles, of_save: SaveFiles) -> End:
        """End a dead save, also if storage has no room for the end; return what its end says."""
        walk.look()
        try:
            return _ended(walk.store, files.iteration, of_save.save_id, _DEAD)
        except OSError as error:
            if class_of(error).kind != "full":
                raise
        # Only who has read the records of all ranks commits a save, so these make room first.
        walk.look()
        room = of_save.records or of_save.bulk
        walk.store.delete(f"{files.directory}/{name}" for name in room)
        return _ended(walk.store, files.iteration, of_save.save_id, _DEAD)

    def _age_s(self, save: Save, end: End) -> float:
        """Return for how many seconds the end (or that its checkpoint lacks files) is known."""
        now = self._clock()
        return now - self._known_since.setdefault((save, end), now)

    def _settle_emptied(self, walk: _Pass, files: IterationFiles) -> float:
        """Remove a directory without saves that the history has passed, if it is empty."""
        if files.others and all(name.startswith(_OPEN_ELSEWHERE) for name in files.others):
            self._tell(
                "%s/%s: a process still has deleted files open (%s); a later commit removes the "
                "directory",
                *(walk.store.place, files.directory, ", ".join(files.others[:_SHOWN])),
                level=logging.INFO,
            )
            return 0.0
        if not files.others:
            walk.look()
            # A process was killed between the last file and its directory, which goes with a file.
            walk.store.delete([f"{files.directory}/none"])
            return 0.0  # a save that is being written has no other name than an unfinished one
        return math.inf

    def _tell_of_others(self, store: Store, files: IterationFiles) -> None:
        others = [name for name in files.others if not name.startswith(_OPEN_ELSEWHERE)]
        if others and len(files.saves) == 1:
            self._tell(
                "%s/%s: the save was removed, but the directory stays, because it holds files of "
                "other programs: %s",
                *(store.place, files.directory, ", ".join(others[:_SHOWN])),
            )

    def _tell(self, message: str, *arguments: object, level: int = logging.WARNING) -> None:
        """Log a line once per start of the job."""
        line = message % arguments
        if line not in self._told:
            self._told.add(line)
            logger.log(level, "%s", line)

    # ------------------------------------------------------------------ expired checkpoints

    def _expired(self, save: CommittedSave) -> list[Stored]:
        """Return the checkpoints that no rule keeps; none without a tracker."""
        tracked = tracked_iteration(save.store)
        if tracked is None:
            return []
        stored = self._all_stored()
        reasons = why_each_is_kept(
            stored,
            save.history,
            save.rules,
            retain_interval=save.retain_interval,
            tracked=tracked,
            previous=save.previous,
        )
        best = save.rules.best
        if best is not None and not any(best.metric in each.facts.metrics for each in stored):
            logger.warning(
                "no checkpoint has the metric '%s' that 'retention.best' names, so none is "
                "removed; report the metric with megatron_flashckpt.report_metric",
                best.metric,
            )
        return [
            checkpoint
            for checkpoint in sorted(stored, key=lambda each: each.save.order)
            if not reasons[checkpoint.save]
            and not (self._commands is not None and self._commands.is_due(checkpoint.save))
            # A listing may be late: files are missing only if they stay missing.
            and (
                checkpoint.is_whole
                or self._age_s(checkpoint.save, End.COMMITTED) >= self._deadline_s
            )
        ]

    def _retire(self, walk: _Pass, expired: list[Stored]) -> None:
        """Remove committed checkpoints that are not pending."""
        if not expired:
            return
        for save in (checkpoint.save for checkpoint in expired):
            iteration, save_id = save
            if save_id in self._pending():
                continue
            with self._removal_errors_logged(iteration):
                hit("retain.chosen")
                walk.look()
                # First: a deletion may take effect and raise an error. What is not settled is
                # looked at again.
                self._manifests.pop(save, None)
                self._looks.pop(iteration, None)
                end = f"{file_names.iteration_dir(iteration)}/{file_names.end_name(save_id)}"
                walk.store.delete([end])
                hit("retain.hidden")
                if _ended(walk.store, iteration, save_id, _EXPIRED) is End.FAILED:
                    hit("retain.failed")
                    logger.info(
                        "removed the checkpoint of iteration %d (save %s)", iteration, save_id
                    )
        self._end_and_clear(walk)


def _ended(store: Store, iteration: int, save_id: str, failure: Failure) -> End:
    """Create the failed end of a save unless it has an end; return what its end says."""
    head, _ = create_end(store, iteration, save_id, encode_failure(failure))
    return kind_of(head)


def remove_own(store: Store, iteration: int, save_id: str, ranks: Collection[int]) -> None:
    """Delete the shards and records of a node's `ranks`, which has read that the save has failed.

    A full disk gets its space back at once, and thousands of nodes need no listing. The end stays
    for the nodes that still wait. Errors are logged; the janitor of rank 0 removes what is left.
    """
    names = [file_names.shard_name(rank, save_id) for rank in sorted(ranks)]
    names += [file_names.record_name(run, save_id) for run in file_names.runs_of(ranks)]
    if 0 in ranks:
        names += [file_names.common_name(save_id), file_names.due_name(save_id)]
    directory = file_names.iteration_dir(iteration)

    def delete(name: str) -> None:
        # One by one: what stands in the way of one file must not keep the space of the others.
        try:
            store.delete([f"{directory}/{name}"])
            hit("forget.file")
        except (FlashCkptError, OSError) as error:
            logger.warning("cannot remove files of a failed save: %s", error)

    for_all(delete, names)
