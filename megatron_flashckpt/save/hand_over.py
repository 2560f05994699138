"""The hand-over of a completely copied slot to the agent. Runs in the copy thread."""

from __future__ import annotations

import dataclasses
import logging

import msgspec

from megatron_flashckpt.agent.client import AgentClient
from megatron_flashckpt.errors import (
    AgentError,
    AgentRefusedError,
    FlashCkptError,
    SaveFailedError,
)
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.layout.save_cost import PlanOrigin
from megatron_flashckpt.memory.slot import Slot, SlotHeader, SlotState
from megatron_flashckpt.save.pending_saves import PendingSaves
from megatron_flashckpt.tracing import Recorder

logger = logging.getLogger(__name__)

#: Longest wait of a staged slot for the call of the save, whose duration goes into the record.
#: Training continues within milliseconds, except if other ranks are late.
_LOOP_S = 1.0


@dataclasses.dataclass(frozen=True)
class HandOver:
    """One save's step from copied to handed over. Every failure becomes the save's outcome."""

    rank: int
    saves: PendingSaves
    client: AgentClient
    slot: Slot
    header: SlotHeader
    """The slot's header during the copies."""
    recorder: Recorder
    plan: PlanOrigin
    memory_only: bool

    def __call__(self, seconds: float, error: BaseException | None) -> None:
        """Mark the slot as staged and notify the agent; the stager calls this once.

        Args:
            seconds: duration of the late copies.
            error: the error of a failed copy; None if all copies succeeded.
        """
        save_id = self.header.save_id
        try:
            self._check_copies(error)
            self._mark_staged()
            record = self.recorder.record(self.recorder.age_s, self.plan, _LOOP_S)
            self.client.staged(self.slot.index, *record)
            self.saves.handed_over(save_id)
            hit("stage.rung")
            logger.debug(
                "rank %d: staged iteration %d, %d bytes in %.3f s",
                *(self.rank, self.header.iteration, self.header.data_nbytes, seconds),
            )
        except AgentRefusedError as failure:
            self.slot.set_state(SlotState.FAILED)
            self.saves.copies_failed(save_id, failure)
        except AgentError as failure:
            # The slot is staged all the same: the next agent adopts it.
            self.saves.agent_failed(self.client, failure)
            self.saves.handed_over(save_id)
        except FlashCkptError as failure:
            self.saves.copies_failed(save_id, failure)
        except Exception as failure:
            # No agent may adopt a save that is reported as failed to all ranks.
            self.slot.set_state(SlotState.FAILED)
            # Every failure needs an outcome, because the drain at exit waits for one.
            reason = f"not handed to the agent ({type(failure).__name__}: {failure})"
            self.saves.copies_failed(save_id, SaveFailedError(reason))
            raise

    def _check_copies(self, error: BaseException | None) -> None:
        if error is not None:
            raise SaveFailedError(f"copying to host memory failed: {error}") from error
        hit("stage.copied")
        if self.slot.header != self.header:
            raise SaveFailedError(
                "the agent discarded the slot during the copy, because this rank had disconnected"
            )

    def _mark_staged(self) -> None:
        """Write the header last: its state promises the agent that all other bytes are complete."""
        state = SlotState.KEPT if self.memory_only else SlotState.STAGED
        self.slot.set_header(msgspec.structs.replace(self.header, state=state))
        hit("stage.staged")
