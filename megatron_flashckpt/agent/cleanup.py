"""What crashes leave in a save directory: files of saves that nobody will complete any more.

An agent cleans up after itself. What it could not, because it was killed, the agent that holds rank
0 removes, which alone commits: when a job goes on from a checkpoint, and after commits.

A directory without a manifest is half a save, and no load looks at it. It is dead if the committing
agent does not know of that save: always when a job goes on, for then no rank is saving; later only
if it is not newer than the last but one that was committed, nor than the last. Names carry the id
of their save, so whatever is saved meanwhile cannot be hit.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable

from megatron_flashckpt.catalog.manifest_facts import KnownManifests
from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.failpoints import reach
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.base import Storage, is_probe, parse_temporary_name
from megatron_flashckpt.storage.parallel import for_all

logger = logging.getLogger(__name__)

#: Longest wait for storage while a job waits to go on.
_LOOK_S = 2.0
_OF_ATTEMPTS = (".commit", ".failed")


@dataclasses.dataclass(frozen=True)
class Leftovers:
    """What may be removed; may be empty."""

    files: list[str] = dataclasses.field(default_factory=list)
    """Beside checkpoints, or in them and not part of them."""
    halves: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Directories of half a save, with the files in them."""
    whole: list[int] = dataclasses.field(default_factory=list)
    """Iterations of the checkpoints that were looked into."""

    def remove(self, storage: Storage) -> int:
        """Delete the files, and directories that hold nothing else; return the number of files."""
        files = list(self.files)
        for directory, within in self.halves.items():
            # A save that was given up, because storage did not answer, may have been committed.
            if file_names.MANIFEST not in storage.list(directory):
                files += within
        for_all(lambda name: _delete(storage, name), files)
        for directory in self.halves:
            storage.delete_directory(directory)
        return len(files)


def _delete(storage: Storage, name: str) -> None:
    storage.delete(name)
    reach("leftover.file")


class Sweeper:
    """Finds leftovers at the right moments, and removes them in the background.

    It remembers which checkpoints have none, so that each directory is listed once while it exists.
    """

    def __init__(self, storage: Storage, manifests: KnownManifests | None = None) -> None:
        self._storage = storage
        self._manifests = manifests or KnownManifests()
        self._clean: set[int] = set()
        self._committed: int | None = None
        #: The iteration that the job has just resumed from, whatever its directory looks like.
        self._resumed: int | None = None
        self._found: queue.SimpleQueue[Leftovers] = queue.SimpleQueue()

    def look_soon(self, is_pending: Callable[[int], bool], resumed: int | None = None) -> None:
        """Note what is left of all dead saves, if storage answers within a moment.

        What is seen later may be of a save that has begun meanwhile, on another node.

        Args:
            resumed: the iteration of the checkpoint that the job resumes from. Its manifest may be
                visible to the trainers, but not here yet: its directory is no half of a save.
        """
        self._resumed = resumed
        answer: queue.SimpleQueue[Leftovers] = queue.SimpleQueue()
        threading.Thread(
            target=lambda: answer.put(self._find(is_pending, None)), name="look", daemon=True
        ).start()
        try:
            self._found.put(answer.get(timeout=_LOOK_S))
        except queue.Empty:
            logger.warning("storage is slow: what crashes left is removed after the next commit")

    def look(
        self,
        is_pending: Callable[[int], bool],
        committed: int,
        former: int | None = None,
        is_current: Callable[[], bool] = lambda: True,
    ) -> None:
        """Note, once `committed` is, what is left of dead saves up to the one committed before.

        Not of later ones: agents of other nodes may not have read yet why those failed.

        Args:
            is_pending: whether a save of an iteration is under way here.
            former: the checkpoint that the tracker named before. If another agent committed it,
                that one may have been killed before it had tidied up.
            is_current: whether no job has started since. If one has, other nodes may be saving
                what is not known here yet.
        """
        until, self._committed = self._committed, committed
        self._resumed = None
        if until is not None:
            # Training may have gone back, and other nodes may have begun what follows.
            found = self._find(is_pending, min(until, committed))
        elif former is not None:
            found = self._find(is_pending, former, only=former)
        else:
            return
        if is_current():
            self._found.put(found)

    def _find(
        self, is_pending: Callable[[int], bool], until: int | None, only: int | None = None
    ) -> Leftovers:
        found = Leftovers()
        # With the lock no temporary file that is listed is one that this agent is putting.
        with self._manifests.changing:
            if only is None:
                self._find_now(is_pending, until, found)
            else:
                self._find_beside(is_pending, only, found)
        return found

    def _find_beside(
        self, is_pending: Callable[[int], bool], iteration: int, found: Leftovers
    ) -> None:
        """Note what is left beside one checkpoint; nothing if it has no manifest."""
        directory = file_names.iteration_dir(iteration)
        try:
            if self._storage.kind(directory) != "directory" or is_pending(iteration):
                return
            if self._storage.present(directory, [file_names.MANIFEST]):
                self._look_into(directory, iteration, found)
        except (FlashCkptError, OSError) as error:
            logger.warning("cannot look for what earlier crashes left: %s", error)

    def _find_now(
        self, is_pending: Callable[[int], bool], until: int | None, found: Leftovers
    ) -> None:
        try:
            listed = self._storage.list("")
            # A directory that was removed may be made again, by an agent that comes back late.
            self._clean.intersection_update(map(file_names.parse_iteration_dir, listed))
            for name in listed:
                iteration = file_names.parse_iteration_dir(name)
                former = parse_temporary_name(name)
                of_a_start = former == file_names.CLAIM or is_probe(name)
                if former in (file_names.TRACKER, file_names.HISTORY) or (
                    until is None and of_a_start
                ):
                    found.files.append(name)
                elif (
                    iteration is not None
                    and iteration not in self._clean
                    and (until is None or iteration <= until)
                    and not is_pending(iteration)
                    and self._storage.kind(name) == "directory"
                ):
                    self._look_into(name, iteration, found)
        except (FlashCkptError, OSError) as error:
            logger.warning("cannot look for what earlier crashes left: %s", error)

    def _look_into(self, directory: str, iteration: int, found: Leftovers) -> None:
        listed = self._storage.list(directory)
        if file_names.MANIFEST not in listed:
            if iteration == self._resumed:
                return
            whole = _committed_once(listed)
            if whole:
                logger.warning(
                    "%s/%s: the manifest of save %s is missing, but the save was committed; its "
                    "files stay; put the manifest back, or remove the directory yourself",
                    self._storage.place,
                    directory,
                    ", ".join(sorted(whole)),
                )
            mine = [
                f"{directory}/{name}"
                for name in listed
                if _is_ours(name) and file_names.save_id_of(name) not in whole
            ]
            files = [name for name in mine if self._storage.kind(name) == "file"]
            if files:  # an empty directory may be one that somebody is about to fill
                found.halves[directory] = files
            return
        found.whole.append(iteration)
        # Whether all is as it should be shows without reading the manifest.
        saves = {file_names.save_id_of(name) for name in listed} - {None}
        if len(saves) > 1 or any(map(_is_of_an_attempt, listed)):
            facts = self._manifests.facts(self._storage, directory)
            found.files.extend(beside(self._storage, directory, facts.save_id))

    def sweep(self) -> None:
        """Remove what was found."""
        while not self._found.empty():
            found = self._found.get()
            try:
                count = found.remove(self._storage)
                self._clean.update(found.whole)
                if count:
                    logger.info("removed %d files that crashes left", count)
            except OSError as error:
                logger.warning("left behind by an earlier crash: %s", error)


def _committed_once(listed: list[str]) -> set[str]:
    """Return the saves in a directory without a manifest that had one, which somebody removed.

    A commit writes the common state last and needs the records of all ranks, which go when the
    manifest has come. So a save with its common state and without any record was committed.
    """
    attempts = {file_names.save_id_of(name) for name in listed if name.endswith(_OF_ATTEMPTS)}
    return set(filter(None, map(file_names.save_id_of_common, listed))) - attempts


def beside(storage: Storage, directory: str, save_id: str) -> list[str]:
    """Return the files of ours in a directory that are not part of its checkpoint `save_id`."""
    return [
        f"{directory}/{name}"
        for name in storage.list(directory)
        if _is_of_an_attempt(name) or file_names.save_id_of(name) not in (None, save_id)
    ]


def _is_of_an_attempt(name: str) -> bool:
    """Return whether a file of ours means nothing once its save is committed."""
    return _is_ours(name) and (
        parse_temporary_name(name) is not None or name.endswith(_OF_ATTEMPTS)
    )


def _is_ours(name: str) -> bool:
    """Return whether a file in an iteration directory is part of a save, complete or not."""
    target = parse_temporary_name(name) or name
    return file_names.save_id_of(target) is not None or (
        target == file_names.MANIFEST and target != name
    )
