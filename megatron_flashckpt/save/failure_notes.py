"""Failure notes that a rank without an agent leaves in storage for the agents of other nodes.

Those agents otherwise wait for this rank's part until `commit_timeout_s`. An agent of this node
leaves the same notes; see `agent.persister.Saves.abandon`.
"""

from __future__ import annotations

import logging
import queue
import threading

from megatron_flashckpt.agent import claim as claims
from megatron_flashckpt.agent.claim import RunKey
from megatron_flashckpt.agent.failed_save import leave_note
from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.file_format.file_names import next_attempt
from megatron_flashckpt.storage.base import Storage
from megatron_flashckpt.storage.opening import open_storage

logger = logging.getLogger(__name__)

#: Seconds that an ending job waits until storage has taken the notes.
_END_S = 10.0


class FailureNotes:
    """Writes notes in a separate thread, because storage may hang and training must not wait."""

    def __init__(self, root: str, rank: int) -> None:
        self._root = root
        self._rank = rank
        self._work: queue.SimpleQueue[tuple[int, str, str, RunKey | None] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def add(self, iteration: int, save_id: str, reason: str, run: RunKey | None) -> None:
        """Queue a note that this rank's part of a save is missing.

        Args:
            run: this rank's run. No note is left if another run has claimed the save directory.
        """
        self._work.put((iteration, save_id, reason, run))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="flashckpt-failure-notes", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Wait until storage has taken all notes, at most `_END_S` seconds."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(_END_S)
            self._thread = None

    def _run(self) -> None:
        while (note := self._work.get()) is not None:
            try:
                self._leave(*note)
            except Exception:  # the notes of later saves must still be left
                logger.exception("rank %d: other nodes do not learn of this failure", self._rank)

    def _leave(self, iteration: int, save_id: str, reason: str, run: RunKey | None) -> None:
        storage = open_storage(self._root)
        if run is not None and _is_overtaken(storage, run):
            return
        # The note also rules out the next attempt at this save.
        for attempt in (save_id, next_attempt(save_id)):
            leave_note(storage, iteration, attempt, self._rank, f"rank {self._rank}: {reason}")


def _is_overtaken(storage: Storage, run: RunKey) -> bool:
    try:
        claim = claims.read(storage)
    except (FlashCkptError, OSError):
        return False
    return claim is not None and claim.key != run
