"""Ends of failed saves that a rank without an agent creates for the agents of other nodes.

Those agents otherwise wait for this rank's part until `commit_timeout_s`. An agent of this node
does the same; see `agent.persister.Saves.abandon`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading

from megatron_flashckpt.catalog.directory import check_run_is_known
from megatron_flashckpt.errors import AlreadyExistsError
from megatron_flashckpt.file_format.end import Failure, encode_failure
from megatron_flashckpt.file_format.file_names import end_name, iteration_dir
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.retrying_store import RetryingStore

logger = logging.getLogger(__name__)

#: Seconds that an ending job waits until storage has taken the ends.
_END_S = 10.0


class FailureNotes:
    """Creates ends in a separate thread, because storage may hang and training must not wait."""

    def __init__(self, root: str, rank: int) -> None:
        self._root = root
        self._rank = rank
        self._work: queue.SimpleQueue[tuple[int, str, str] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, iteration: int, save_id: str, reason: str) -> None:
        """Queue the end of a save that lacks this rank's part, for whatever `reason`."""
        self._work.put((iteration, save_id, reason))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="flashckpt-failure-notes", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Wait until storage has taken all ends, at most `_END_S` seconds."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(_END_S)
            self._thread = None

    def _run(self) -> None:
        while (note := self._work.get()) is not None:
            try:
                self._create_end(*note)
            except Exception:  # the ends of later saves must still be created
                logger.exception("rank %d: other nodes do not learn of this failure", self._rank)

    def _create_end(self, iteration: int, save_id: str, reason: str) -> None:
        directory = open_store(self._root)
        store = RetryingStore(directory)
        # Final: another attempt would lack this rank's part, too.
        failure = Failure(failed=f"rank {self._rank}: {reason}", is_final=True)
        name = f"{iteration_dir(iteration)}/{end_name(save_id)}"
        store.with_retries(lambda: check_run_is_known(directory, save_id))
        with contextlib.suppress(AlreadyExistsError):  # the save has ended without this rank
            store.create(name, encode_failure(failure))
