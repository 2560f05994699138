"""What commits leave to be removed, in a thread of its own: after the outcome was told.

A checkpoint exists from its manifest on, and loads need nothing that is removed here. So trainers
are told and slots are free before the first file is deleted. What an agent that is killed has not
removed, the next one finds: records as leftovers, checkpoints by their moved manifests.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable

from megatron_flashckpt.agent.claim import RunKey
from megatron_flashckpt.agent.cleanup import Leftovers, beside
from megatron_flashckpt.agent.fence import Fence
from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.catalog.manifest_facts import KnownManifests
from megatron_flashckpt.catalog.retention import finish, hide
from megatron_flashckpt.catalog.tracker import tracked_before_commit
from megatron_flashckpt.config import Retention
from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.failpoints import reach
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.base import Storage
from megatron_flashckpt.tracing import phase

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CommittedSave:
    """The facts of a committed save that its removals need: some hundred bytes.

    Storage that hangs in a removal takes new saves all the same, and each of them waits here. The
    template and the common state of one save may have megabytes, so they must not wait with it.
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

    @property
    def directory(self) -> str:
        return file_names.iteration_dir(self.iteration)

    @property
    def is_of_newest_run(self) -> bool:
        """Return whether no job has started since the agent was given the save."""
        return self.fence is None or self.fence.newest == self.run


def tidy(save: CommittedSave, pending: Callable[[], set[str]] = set) -> None:
    """Remove the records of a committed save, other attempts at it, and what retention lets go.

    Args:
        pending: returns the saves that are under way; their files stay.
    """
    storage = save.storage
    try:
        with phase("tidy up"):
            _superfluous_files(save, pending).remove(storage)
        reach("commit.tidy")
        with phase("retention"):
            with save.manifests.changing:
                hide(
                    storage,
                    save.retention,
                    retain_interval=save.retain_interval,
                    tracked=tracked_before_commit(storage),
                    previous=save.previous,
                    manifests=save.manifests,
                )
            finish(storage)
        reach("commit.done")
    except (FlashCkptError, OSError) as error:
        # The checkpoint is committed; untidiness must not make it look failed.
        logger.warning("committed iteration %d, but: %s", save.iteration, error)


def _superfluous_files(save: CommittedSave, pending: Callable[[], set[str]]) -> Leftovers:
    """Return what of ours is in the directory of a committed save and not part of it.

    Nothing if another save of the same iteration has been committed since.
    """
    # With the lock no file that is listed is one that the commit thread is about to rename.
    with save.manifests.changing:
        try:
            committed = save.manifests.facts(save.storage, save.directory).save_id
        except FileNotFoundError:  # retention has taken it away since: all of its files go
            return Leftovers()
        if committed != save.save_id:
            return Leftovers()
        files = beside(save.storage, save.directory, save.save_id)
        # Both asked after the listing. Until a job starts again, a save of the same iteration whose
        # files are listed is known here before. Later the other nodes may have begun one.
        spared = pending()
        if not save.is_of_newest_run:
            return Leftovers(
                [name for name in files if file_names.save_id_in(name) == save.save_id]
            )
    return Leftovers([name for name in files if file_names.save_id_in(name) not in spared])


class Tidier:
    """Does one piece of work after the other until it is closed."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tidy", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def add(self, work: Callable[[], None]) -> None:
        """Have `work` done after all that was added before."""
        self._work.put(work)

    def close(self, within_s: float) -> None:
        """Return when all work is done, but not later than after `within_s`."""
        self._work.put(None)
        self._thread.join(within_s)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:  # or nothing would be removed any more
                logger.exception("left behind")
