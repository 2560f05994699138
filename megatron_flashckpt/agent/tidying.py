"""Removal of obsolete files after a commit, in a thread of its own.

A checkpoint exists once its manifest does, and loads do not need the files removed here. So results
are reported and slots freed before the first file is deleted. If an agent is killed meanwhile, the
next one finds the rest: records as orphaned files, checkpoints by their moved manifests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Iterator

from megatron_flashckpt.agent.claim import RunKey
from megatron_flashckpt.agent.cleanup import OrphanedFiles, files_of_other_saves
from megatron_flashckpt.agent.fence import Fence
from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.catalog.manifest_facts import KnownManifests
from megatron_flashckpt.catalog.retention import finish, hide
from megatron_flashckpt.catalog.tracker import tracked_before_commit
from megatron_flashckpt.config import Retention
from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.base import Storage
from megatron_flashckpt.tracing import phase

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CommittedSave:
    """Facts of a committed save that its removals need: some hundred bytes.

    While storage hangs in a removal, further committed saves queue here. Template and common state
    of one save may take megabytes, so they are not kept.
    """

    storage: Storage
    iteration: int
    save_id: str
    retention: Retention
    retain_interval: int | None
    previous: int | None
    """The iteration that the tracker named before this save."""
    manifests: KnownManifests
    fence: Fence | None
    run: RunKey | None

    @classmethod
    def of(cls, save: PendingSave) -> CommittedSave:
        """Return the facts of a save that this agent has committed."""
        return cls(
            storage=save.storage,
            iteration=save.iteration,
            save_id=save.save_id,
            retention=save.metas[0].retention,
            retain_interval=save.metas[0].retain_interval,
            previous=save.previous,
            manifests=save.manifests,
            fence=save.fence,
            run=save.run,
        )

    def under_rules_of(self, later: CommittedSave) -> CommittedSave:
        """Return these facts with the rules of a save of a later run."""
        return dataclasses.replace(
            self, retention=later.retention, retain_interval=later.retain_interval
        )

    @property
    def directory(self) -> str:
        return file_names.iteration_dir(self.iteration)

    @property
    def is_of_newest_run(self) -> bool:
        """Return whether no job has started since the agent received the save."""
        return self.fence is None or self.fence.newest == self.run


def tidy(save: CommittedSave, pending: Callable[[], set[str]] = set) -> None:
    """Remove a committed save's records, its other attempts, and expired checkpoints.

    Args:
        pending: returns the pending saves, whose files stay.
    """
    remove_obsolete(save, pending)
    retire_expired(save)


def remove_obsolete(save: CommittedSave, pending: Callable[[], set[str]]) -> None:
    """Remove the records of a committed save, and its other attempts; see `tidy`."""
    with _errors_logged(save):
        with phase("tidy up"):
            _obsolete_files(save, pending).remove(save.storage)
        hit("commit.tidy")


def retire_expired(
    save: CommittedSave,
    is_current: Callable[[], bool] = lambda: True,
    resumed: int | None = None,
) -> None:
    """Remove the checkpoints that no rule keeps after the commit of `save`.

    Args:
        is_current: returns whether no job has started since. A later job may load a checkpoint that
            was to be removed here.
        resumed: iteration from which a later job has resumed. Later checkpoints, which it could not
            load or did not want, do not count as the newest ones.
    """
    storage = save.storage
    with _errors_logged(save):
        with phase("retention"):
            with save.manifests.changing:
                tracked = tracked_before_commit(storage)
                if tracked is not None and resumed is not None:
                    tracked = min(tracked, resumed)
                hide(
                    storage,
                    save.retention,
                    retain_interval=save.retain_interval,
                    tracked=tracked,
                    previous=save.previous,
                    manifests=save.manifests,
                    is_current=is_current,
                )
            finish(storage)
        hit("commit.done")


@contextlib.contextmanager
def _errors_logged(save: CommittedSave) -> Iterator[None]:
    """Log errors, because a failed removal must not make a committed save look failed."""
    try:
        yield
    except (FlashCkptError, OSError) as error:
        logger.warning(
            "committed iteration %d, but obsolete files are not removed: %s", save.iteration, error
        )


def _obsolete_files(save: CommittedSave, pending: Callable[[], set[str]]) -> OrphanedFiles:
    """Return the files of other attempts in the directory of a committed save.

    Empty if another save of the same iteration has been committed since.
    """
    # The lock keeps the commit thread from renaming files that are being listed.
    with save.manifests.changing:
        try:
            committed = save.manifests.facts(save.storage, save.directory).save_id
        except FileNotFoundError:  # retention has removed the checkpoint since
            return OrphanedFiles()
        if committed != save.save_id:
            return OrphanedFiles()
        files = files_of_other_saves(save.storage, save.directory, save.save_id)
        # Query pending saves and the run after the listing. Until a job starts again, this agent
        # knows every save of the iteration before its files can be listed. After a start, other
        # nodes may have begun a save that this agent does not know.
        spared = pending()
        if not save.is_of_newest_run:
            return OrphanedFiles(
                [name for name in files if file_names.save_id_in(name) == save.save_id]
            )
    return OrphanedFiles([name for name in files if file_names.save_id_in(name) not in spared])


class Tidier:
    """Runs queued work in one thread until it is closed."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tidy", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, work: Callable[[], None]) -> None:
        """Queue `work` behind all earlier work."""
        self._work.put(work)

    def close(self, within_s: float) -> None:
        """Return when all work is done, or after `within_s`."""
        self._work.put(None)
        self._thread.join(within_s)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:  # otherwise all later removals would be lost
                logger.exception("obsolete files were not removed")
