"""What commits leave to be removed, in a thread of its own: after the outcome was told.

A checkpoint exists from its manifest on, and loads need nothing that is removed here. So trainers
are told and slots are free before the first file is deleted. What an agent that is killed has not
removed, the next one finds: records as leftovers, checkpoints by their moved manifests.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from megatron_flashckpt.agent.cleanup import Leftovers, beside
from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.catalog.retention import finish, hide
from megatron_flashckpt.catalog.tracker import tracked_before_commit
from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.failpoints import reach
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.tracing import phase

logger = logging.getLogger(__name__)


def tidy(save: PendingSave, pending: Callable[[], set[str]] = set) -> None:
    """Remove the records of a committed save, other attempts at it, and what retention lets go.

    Args:
        pending: returns the saves that are under way; their files stay.
    """
    storage, meta = save.storage, save.metas[0]
    try:
        with phase("tidy up"):
            _superfluous_files(save, pending).remove(storage)
        reach("commit.tidy")
        with phase("retention"):
            with save.manifests.changing:
                hide(
                    storage,
                    meta.retention,
                    retain_interval=meta.retain_interval,
                    tracked=tracked_before_commit(storage),
                    previous=save.previous,
                    manifests=save.manifests,
                )
            finish(storage)
        reach("commit.done")
    except (FlashCkptError, OSError) as error:
        # The checkpoint is committed; untidiness must not make it look failed.
        logger.warning("committed iteration %d, but: %s", save.iteration, error)


def _superfluous_files(save: PendingSave, pending: Callable[[], set[str]]) -> Leftovers:
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
