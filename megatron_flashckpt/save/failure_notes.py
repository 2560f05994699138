"""Ends of failed saves that a rank without an agent creates for the agents of other nodes.

Those agents otherwise wait for this rank's part until `commit_timeout_s`. An agent of this node
does the same; see `agent.saves.Saves.abandon`.
"""

from __future__ import annotations

import contextlib

from megatron_flashckpt.agent.worker import Worker
from megatron_flashckpt.catalog.directory import check_run_is_known
from megatron_flashckpt.errors import AlreadyExistsError
from megatron_flashckpt.file_format.end import Failure, encode_failure
from megatron_flashckpt.file_format.file_names import end_name, iteration_dir
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.retrying_store import RetryingStore

#: Seconds that an ending job waits until storage has taken the ends.
_END_S = 10.0


class FailureNotes:
    """Creates ends in a separate thread, because storage may hang and training must not wait."""

    def __init__(self, root: str, rank: int) -> None:
        self._root = root
        self._rank = rank
        self._worker = Worker(
            "flashckpt-failure-notes", f"rank {rank}: other nodes do not learn of this failure"
        )

    def add(self, iteration: int, save_id: str, reason: str) -> None:
        """Queue the end of a save that lacks this rank's part, for whatever `reason`."""
        self._worker.add(lambda: self._create_end(iteration, save_id, reason))

    def close(self) -> None:
        """Wait until storage has taken all ends, at most `_END_S` seconds."""
        self._worker.close(_END_S)

    def _create_end(self, iteration: int, save_id: str, reason: str) -> None:
        directory = open_store(self._root)
        store = RetryingStore(directory)
        # Final: another attempt would lack this rank's part, too.
        failure = Failure(failed=f"rank {self._rank}: {reason}", is_final=True)
        name = f"{iteration_dir(iteration)}/{end_name(save_id)}"
        store.with_retries(lambda: check_run_is_known(directory, save_id))
        with contextlib.suppress(AlreadyExistsError):  # the save has ended without this rank
            store.create(name, encode_failure(failure))
