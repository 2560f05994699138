"""The claim of a save directory at the start of a run, before its load, which excludes others."""

from __future__ import annotations

import logging

from megatron_flashckpt.agent.claim import RunKey
from megatron_flashckpt.agent.takeover import take
from megatron_flashckpt.collectives import run_on_rank_0
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.save import run_id
from megatron_flashckpt.save.agent_link import NodeLink
from megatron_flashckpt.storage.opening import open_storage
from megatron_flashckpt.storage.patient import RetryingStorage

logger = logging.getLogger(__name__)


def begin(link: NodeLink, root: str, config: Config, known: str | None) -> str:
    """Make this run the writer of `root`; return its id. Collective: one small message.

    Args:
        known: the id of the run if the run has saved before; equal on all ranks.

    Raises:
        OtherWriterError: another run writes to `root`; on all ranks.
        StorageError: the directory cannot be written; on all ranks.
    """

    def claim() -> tuple[str, int]:
        claimed_id = known or run_id.new()
        # A short outage of storage must not end a job that has just started.
        storage = RetryingStorage(open_storage(root))
        try:
            wait_s = config.other_writer_wait_s
            key = take(storage, claimed_id, link.client, config.other_writer, wait_s)
        except AgentError as error:
            # A save will connect to an agent, or report that there is none.
            logger.error(
                "%s: this run could not claim the directory, so another job may write to it: %s",
                root,
                error,
            )
            return claimed_id, 0
        return claimed_id, key.epoch

    claimed_id, epoch = run_on_rank_0(claim)
    if epoch:
        link.agent.hold(RunKey(epoch, claimed_id))
    return claimed_id
