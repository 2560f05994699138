"""Ends of saves that lack this rank's part, which the rank creates for the agents of all nodes.

Those agents otherwise wait for the part until `commit_timeout_s`. The rank needs no agent for it:
an agent that it tells may be killed before it has created the end. A part that storage has a record
of is not missing: the save may become a checkpoint, though this rank's agent is gone.
"""

from __future__ import annotations

import logging
import sys

from megatron_flashckpt.agent.proposals import is_recorded
from megatron_flashckpt.agent.worker import Worker
from megatron_flashckpt.catalog.directory import check_run_is_known
from megatron_flashckpt.errors import AlreadyExistsError, FlashCkptError
from megatron_flashckpt.file_format.end import Failure, encode_failure
from megatron_flashckpt.file_format.file_names import end_name, iteration_dir
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.retrying_store import RetryingStore

logger = logging.getLogger(__name__)

#: Seconds that an ending rank waits until storage has taken the ends.
_WAIT_S = 10.0


class FailedEnds:
    """Creates ends in a separate thread, because storage may hang and training must not wait."""

    def __init__(self, root: str, rank: int) -> None:
        self._root = root
        self._rank = rank
        self._worker = Worker("flashckpt-failed-ends", f"rank {rank}: no end of a failed save")
        self.untold: set[str] = set()
        """Saves whose end storage has not taken, whatever was tried."""

    def create(self, iteration: int, save_id: str, reason: str) -> None:
        """Create the end of a save, soon, for whatever `reason`, if it lacks this rank's part."""
        self._worker.add(lambda: self._create(iteration, save_id, reason))

    def wait(self, within_s: float = _WAIT_S) -> None:
        """Wait until storage has taken all ends, at most `within_s` seconds."""
        self._worker.wait(within_s)

    def _create(self, iteration: int, save_id: str, reason: str) -> None:
        directory = open_store(self._root)
        store = RetryingStore(directory)
        # Final: another attempt would lack this rank's part, too.
        failure = Failure(failed=f"rank {self._rank}: {reason}", is_final=True)
        name = f"{iteration_dir(iteration)}/{end_name(save_id)}"
        try:
            store.with_retries(lambda: check_run_is_known(directory, save_id))
            if not is_recorded(store, iteration, save_id, self._rank, sys.maxsize):
                store.create(name, encode_failure(failure))
        except AlreadyExistsError:  # the save has ended without this rank
            pass
        except (FlashCkptError, OSError) as error:
            self.untold.add(save_id)
            logger.error(
                "rank %d: other nodes do not learn that iteration %d failed, and wait for their "
                "timeout: %s",
                *(self._rank, iteration, error),
            )
