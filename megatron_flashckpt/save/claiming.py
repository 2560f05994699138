"""A run claims its save directory as it starts, before it loads: then nobody else writes there."""

from __future__ import annotations

import logging

from megatron_flashckpt.agent.claim import RunKey
from megatron_flashckpt.agent.takeover import take
from megatron_flashckpt.collectives import from_first
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.save import run_id
from megatron_flashckpt.save.agent_link import NodeLink
from megatron_flashckpt.storage.opening import open_storage
from megatron_flashckpt.storage.patient import PatientStorage

logger = logging.getLogger(__name__)


def begin(link: NodeLink, root: str, config: Config, known: str | None) -> str:
    """Return the id of a run that is now the writer of `root`. Collective: one small message.

    Args:
        known: the id of the run, if it has saved before; on all ranks.

    Raises:
        OtherWriterError: another run writes there; on all ranks.
        StorageError: the directory cannot be written; on all ranks.
    """

    def claim() -> tuple[str, int]:
        made = known or run_id.new()
        # A moment without an answer must not end a job that has just got its nodes.
        storage = PatientStorage(open_storage(root))
        try:
            key = take(storage, made, link.client, config.other_writer, config.other_writer_wait_s)
        except AgentError as error:
            # A save will find an agent, or report that there is none.
            logger.error("%s: not claimed, so other jobs are not kept away: %s", root, error)
            return made, 0
        return made, key.epoch

    made, epoch = from_first(claim)
    if epoch:
        link.agent.hold(RunKey(epoch, made))
    return made
