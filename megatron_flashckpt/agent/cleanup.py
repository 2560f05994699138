"""Removal of orphaned files: parts of saves that crashes interrupted and no process will complete.

An agent removes its own files. If it was killed, the agent with rank 0 removes them, because only
that agent commits: when a job resumes from a checkpoint, and after commits.

A directory without a manifest is an incomplete save, and no load uses it. It is removed if the
committing agent does not know of that save: (a) when a job resumes, because no rank is saving then,
or (b) after a commit, if it is newer than neither of the two newest commits. Names carry the id of
their save, so files of a concurrent save are never hit.

On shared storage, this node may see a manifest that another node has written only after a while. So
files that are found when a job resumes stay until a second look finds them again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from megatron_flashckpt.catalog.manifest_facts import KnownManifests
from megatron_flashckpt.error_classes import may_pass
from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.base import Storage, is_probe, parse_temporary_name
from megatron_flashckpt.storage.parallel import for_all

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Pauses before a removal is repeated after a transient error.
_RETRIES_S = (0.2, 1.0)
#: Longest wait for storage while a job waits to resume.
_LOOK_S = 2.0
#: Seconds from a resume to the second look. NFS shows new names after 60 s at the latest by default
#: (`acdirmax`), and the probe of the save directory refuses longer delays (`probe_wait_s`).
_SETTLE_S = 90.0
_OF_ATTEMPTS = (".commit", ".failed")


@dataclasses.dataclass(frozen=True)
class OrphanedFiles:
    """Orphaned files that may be removed; may be empty."""

    files: list[str] = dataclasses.field(default_factory=list)
    """Files next to checkpoints, or in their directories without being part of them."""
    incomplete: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Directories of incomplete saves, with the files in them."""
    examined: list[int] = dataclasses.field(default_factory=list)
    """Iterations of the checkpoints whose directories were examined."""

    def also_in(self, later: OrphanedFiles) -> OrphanedFiles:
        """Return the files that a later look has found again, after a resume.

        Empty directories are left out, because another agent may be about to fill them.
        """
        incomplete = {
            directory: sorted({*within} & {*later.incomplete.get(directory, ())})
            for directory, within in self.incomplete.items()
        }
        return OrphanedFiles(
            sorted({*self.files} & {*later.files}),
            {directory: within for directory, within in incomplete.items() if within},
            later.examined,
        )

    def remove(self, storage: Storage) -> int:
        """Delete the files, and directories without other files; return the number of files."""
        files = list(self.files)
        for directory, within in self.incomplete.items():
            # A save that failed because storage did not answer may have been committed.
            if file_names.MANIFEST not in storage.list(directory):
                files += within
        for_all(lambda name: _delete(storage, name), files)
        for directory in self.incomplete:
            _delete_directory(storage, directory)
        return len(files)


def retried(step: Callable[[], _T]) -> _T:
    """Return `step()`, a removal, repeated after errors that may pass.

    Storage may remove a file and still report an error. A directory that stays empty is found only
    after later commits, so an error must not end the removal before the directory is deleted.
    """
    for pause_s in _RETRIES_S:
        try:
            return step()
        except OSError as error:
            if not may_pass(error):
                raise
        time.sleep(pause_s)
    return step()


def _delete(storage: Storage, name: str) -> None:
    retried(lambda: storage.delete(name))
    hit("leftover.file")


def _delete_directory(storage: Storage, name: str) -> None:
    retried(lambda: storage.delete_directory(name))


@dataclasses.dataclass(frozen=True)
class _FirstLook:
    """Files found when a job resumed."""

    orphans: OrphanedFiles
    is_pending: Callable[[int], bool]
    is_current: Callable[[], bool]
    again_at: float
    """Time of the second look; `time.monotonic`."""


class Sweeper:
    """Finds orphaned files at the right moments, and removes them in the background.

    It remembers checkpoints without orphaned files, so that each directory is listed once per
    start of the job.
    """

    def __init__(self, storage: Storage, manifests: KnownManifests | None = None) -> None:
        self._storage = storage
        #: Files found at the last resume, and the last ones that had a second look.
        self._first_look: _FirstLook | None = None
        self._looked_again: _FirstLook | None = None
        self._manifests = manifests or KnownManifests()
        self._clean: set[int] = set()
        self._committed: int | None = None
        #: Iteration that the job has just resumed from; its directory is never incomplete.
        self._resumed: int | None = None
        self._to_remove: queue.SimpleQueue[OrphanedFiles] = queue.SimpleQueue()

    def find_orphans_soon(
        self,
        is_pending: Callable[[int], bool],
        resumed: int | None = None,
        is_current: Callable[[], bool] = lambda: True,
    ) -> float | None:
        """Find files of all dead saves, if storage answers within `_LOOK_S`.

        Files that are found later may belong to a save that has begun meanwhile on another node.
        Files outside of checkpoints' directories need no second look.

        Args:
            resumed: iteration of the checkpoint that the job resumes from. Trainers may see its
                manifest before this node does, so its directory is not an incomplete save.
            is_current: returns whether no job has started since. A later job may have resumed from
                a save that was found here.

        Returns:
            Seconds until `sweep` is to take a second look; None if nothing was found.
        """
        self._first_look = None
        self._resumed = resumed
        # Files of an agent on another node may have become visible after the last look.
        self._clean = set()
        answer: queue.SimpleQueue[OrphanedFiles] = queue.SimpleQueue()
        threading.Thread(
            target=lambda: answer.put(self._find(is_pending, None)), name="look", daemon=True
        ).start()
        try:
            orphans = answer.get(timeout=_LOOK_S)
        except queue.Empty:
            logger.warning("storage is slow: orphaned files are removed after the next commit")
            return None
        inside = OrphanedFiles([name for name in orphans.files if "/" in name], orphans.incomplete)
        outside = [name for name in orphans.files if "/" not in name]
        unclean = {file_names.parse_iteration_dir(name.split("/")[0]) for name in inside.files}
        clean = [iteration for iteration in orphans.examined if iteration not in unclean]
        self._to_remove.put(OrphanedFiles(outside, examined=clean))
        if not inside.files and not inside.incomplete:
            return None
        again_at = time.monotonic() + _SETTLE_S
        self._first_look = _FirstLook(inside, is_pending, is_current, again_at)
        return _SETTLE_S

    def _look_again(self) -> None:
        """Take the second look once it is due."""
        first = self._first_look
        if first is None or first is self._looked_again or time.monotonic() < first.again_at:
            return
        self._looked_again = first
        again = self._find(first.is_pending, None)
        if first.is_current():
            self._warn_of_late_manifests(first.orphans, again)
            self._to_remove.put(first.orphans.also_in(again))

    def _warn_of_late_manifests(self, first: OrphanedFiles, again: OrphanedFiles) -> None:
        """Name the checkpoints that were visible too late for this start to resume from them."""
        for iteration in again.examined:
            directory = file_names.iteration_dir(iteration)
            saves = set(map(file_names.save_id_in, first.incomplete.get(directory, ())))
            if not saves:
                continue
            with contextlib.suppress(FlashCkptError, OSError):
                is_late = self._manifests.facts(self._storage, directory).save_id in saves
                if not is_late:  # this job has saved the iteration again
                    continue
                logger.warning(
                    "%s/%s: is a checkpoint, but this node saw its manifest only after the job had "
                    "resumed; it stays, and the next start finds it",
                    self._storage.place,
                    directory,
                )

    def find_orphans(
        self,
        is_pending: Callable[[int], bool],
        committed: int,
        former: int | None = None,
        is_current: Callable[[], bool] = lambda: True,
    ) -> None:
        """Find, after the commit of `committed`, files of dead saves up to the previous commit.

        Later saves are left out: agents of other nodes may not have read yet why those failed.

        Args:
            is_pending: returns whether a save of an iteration is pending on this node.
            former: the checkpoint that the tracker named before. Another agent that committed it
                may have been killed before it had tidied up.
            is_current: returns whether no job has started since. If one has, other nodes may be
                saving, unknown to this agent.
        """
        until, self._committed = self._committed, committed
        self._resumed = None
        if until is not None:
            # Training may have resumed from an older save, and other nodes may have begun the next
            # ones.
            orphans = self._find(is_pending, min(until, committed))
        elif former is not None:
            orphans = self._find(is_pending, former, only=former)
        else:
            return
        if is_current():
            self._to_remove.put(orphans)

    def _find(
        self, is_pending: Callable[[int], bool], until: int | None, only: int | None = None
    ) -> OrphanedFiles:
        orphans = OrphanedFiles()
        # The lock keeps this agent from writing temporary files during the listing.
        with self._manifests.changing:
            if only is None:
                self._find_now(is_pending, until, orphans)
            else:
                self._find_next_to(is_pending, only, orphans)
        return orphans

    def _find_next_to(
        self, is_pending: Callable[[int], bool], iteration: int, orphans: OrphanedFiles
    ) -> None:
        """Find orphaned files next to one checkpoint; nothing if it has no manifest."""
        directory = file_names.iteration_dir(iteration)
        try:
            if self._storage.kind(directory) != "directory" or is_pending(iteration):
                return
            if self._storage.present(directory, [file_names.MANIFEST]):
                self._look_into(directory, iteration, orphans)
        except (FlashCkptError, OSError) as error:
            logger.warning("cannot look for orphaned files of earlier crashes: %s", error)

    def _find_now(
        self, is_pending: Callable[[int], bool], until: int | None, orphans: OrphanedFiles
    ) -> None:
        try:
            listed = self._storage.list("")
            # A removed directory may be created again by an agent that resumes late.
            self._clean.intersection_update(map(file_names.parse_iteration_dir, listed))
            for name in listed:
                iteration = file_names.parse_iteration_dir(name)
                former = parse_temporary_name(name)
                of_a_start = former == file_names.CLAIM or is_probe(name)
                if former in (file_names.TRACKER, file_names.HISTORY) or (
                    until is None and of_a_start
                ):
                    orphans.files.append(name)
                elif (
                    iteration is not None
                    and iteration not in self._clean
                    and (until is None or iteration <= until)
                    and not is_pending(iteration)
                    and self._storage.kind(name) == "directory"
                ):
                    self._look_into(name, iteration, orphans)
        except (FlashCkptError, OSError) as error:
            logger.warning("cannot look for orphaned files of earlier crashes: %s", error)

    def _look_into(self, directory: str, iteration: int, orphans: OrphanedFiles) -> None:
        listed = self._storage.list(directory)
        if file_names.MANIFEST not in listed:
            if iteration == self._resumed:
                return
            if not listed:  # an earlier removal may have failed
                orphans.incomplete[directory] = []
                return
            committed = _committed_once(listed)
            removals = {file_names.removal_name(iteration, save_id) for save_id in committed}
            # Retention has moved the manifests of these, and deletes their files after a commit.
            removals = self._storage.present("", removals) if removals else set()
            lost = {
                save_id
                for save_id in committed
                if file_names.removal_name(iteration, save_id) not in removals
            }
            if lost:
                logger.warning(
                    "%s/%s: the manifest of save %s is missing, but the save was committed; its "
                    "files stay; put the manifest back, or remove the directory yourself",
                    self._storage.place,
                    directory,
                    ", ".join(sorted(lost)),
                )
            names = [
                f"{directory}/{name}"
                for name in listed
                if _is_ours(name) and file_names.save_id_of(name) not in committed
            ]
            files = [name for name in names if self._storage.kind(name) == "file"]
            if files:
                orphans.incomplete[directory] = files
            return
        # The file names tell whether anything must be removed; the manifest need not be read.
        saves = {file_names.save_id_of(name) for name in listed} - {None}
        if len(saves) > 1 or any(map(_is_of_an_attempt, listed)):
            facts = self._manifests.facts(self._storage, directory)
            orphans.files.extend(files_of_other_saves(self._storage, directory, facts.save_id))
        orphans.examined.append(iteration)  # after an error the next look comes back to it

    def sweep(self) -> None:
        """Take the second look if that is due, and remove the files that were found."""
        self._look_again()
        while not self._to_remove.empty():
            orphans = self._to_remove.get()
            try:
                count = orphans.remove(self._storage)
                self._clean.update(orphans.examined)
                if count:
                    logger.info("removed %d orphaned files of earlier crashes", count)
            except OSError as error:
                logger.warning("cannot remove orphaned files of earlier crashes: %s", error)


def _committed_once(listed: list[str]) -> set[str]:
    """Return the saves in a directory whose manifest was written and later removed.

    A commit writes the common state last and needs the records of all ranks, which are removed
    after the manifest is written. So a save with common state and without records was committed. A
    marker is written after its manifest.
    """
    attempts = {file_names.save_id_of(name) for name in listed if name.endswith(_OF_ATTEMPTS)}
    common = set(map(file_names.save_id_of_common, listed)) - attempts
    return set(filter(None, {*common, *map(file_names.save_id_of_marker, listed)}))


def files_of_other_saves(storage: Storage, directory: str, save_id: str) -> list[str]:
    """Return the package's files in a directory that are not part of its save `save_id`."""
    return [
        f"{directory}/{name}"
        for name in storage.list(directory)
        if _is_of_an_attempt(name) or file_names.save_id_of(name) not in (None, save_id)
    ]


def _is_of_an_attempt(name: str) -> bool:
    """Return whether a file has no use once its save is committed."""
    return _is_ours(name) and (
        parse_temporary_name(name) is not None or name.endswith(_OF_ATTEMPTS)
    )


def _is_ours(name: str) -> bool:
    """Return whether a file in an iteration directory is part of a save, complete or not."""
    target = parse_temporary_name(name) or name
    return file_names.save_id_of(target) is not None or (
        target == file_names.MANIFEST and target != name
    )
