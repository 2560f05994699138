"""One rank's pending saves, and the sources of their outcomes.

The agent reports the outcome of a save. This rank itself concludes a save if planning,
the slot or a copy failed. If no agent will report an outcome, for example because the agent's
successor has not got the slot, this rank proposes that the save failed, and reads its end.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from typing import NamedTuple

import msgspec

from megatron_flashckpt.agent.client import AgentClient
from megatron_flashckpt.agent.protocol import Outcome, Outcomes
from megatron_flashckpt.catalog import history
from megatron_flashckpt.catalog.directory import check_run_is_known
from megatron_flashckpt.error_classes import may_pass
from megatron_flashckpt.errors import AgentError, AgentRefusedError, FlashCkptError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format.end import FAILED_NBYTES, End, decode_failure, kind_of
from megatron_flashckpt.file_format.file_names import end_name, iteration_dir
from megatron_flashckpt.save.agent_watch import AgentWatch
from megatron_flashckpt.save.failed_ends import FailedEnds
from megatron_flashckpt.save.node_link import NodeLink
from megatron_flashckpt.storage.opening import open_store

logger = logging.getLogger(__name__)

#: Seconds between the first two attempts to read the end of a save, in one poll each; later pauses
#: are a tenth of the past wait longer, because training waits for each attempt.
_ASK_AGAIN_S = 1.0


class _Unanswered(NamedTuple):
    """A save whose end decides, and storage has not told it yet."""

    otherwise: str
    """Error of the save if it was not committed."""
    since: float
    """Time of the first attempt; `time.monotonic`."""
    again_at: float


class PendingSaves:
    """One rank's saves without an outcome.

    Used by the training thread; the copy thread calls `handed_over`, `copies_failed` and
    `agent_failed`.
    """

    def __init__(self, root: str, rank: int, link: NodeLink) -> None:
        self._root = root
        self._rank = rank
        self._link = link
        self._watch = AgentWatch()
        #: Iterations of pending saves, by save id.
        self._open: dict[str, int] = {}
        #: Saves that this rank does not call off: no other node waits for its part, or an agent
        #: that serves a later process of this rank has it.
        self._not_called_off: set[str] = set()
        #: Saves that were handed to an agent.
        self._handed_over: set[str] = set()
        self._unreported: list[Outcome] = []
        #: Saves whose agent is gone, and the error; the successor may have adopted them.
        self._orphaned: dict[str, int] = {}
        self._loss = ""
        #: Saves whose end storage has not told yet.
        self._unanswered: dict[str, _Unanswered] = {}
        self._ends = FailedEnds(root, rank)
        self._failed_copies: queue.SimpleQueue[tuple[str, FlashCkptError]] = queue.SimpleQueue()
        self._agent_failures: queue.SimpleQueue[tuple[AgentClient, AgentError]] = (
            queue.SimpleQueue()
        )

    def __bool__(self) -> bool:
        """Return True while a save has no outcome."""
        return bool(self._open)

    def expect(self, save_id: str, *, memory_only: bool) -> None:
        """Note the kind of a save that begins, before the save can fail."""
        self._not_called_off &= self._open.keys()
        self._handed_over &= self._open.keys()
        if memory_only:
            self._not_called_off.add(save_id)

    def begin(self, save_id: str, iteration: int) -> None:
        """Note a save that has a slot, and will therefore have an outcome."""
        self._open[save_id] = iteration

    def handed_over(self, save_id: str) -> None:
        """Note that an agent owes the outcome of a save. Called by the copy thread."""
        self._handed_over.add(save_id)

    def fail(self, iteration: int, save_id: str, reason: str) -> None:
        """Conclude a save that no agent has got, here and for the other ranks."""
        self._open.pop(save_id, None)
        failed = (self._rank,)
        self._unreported.append(Outcome(iteration, save_id, reason, 0.0, failed_ranks=failed))
        if save_id not in self._not_called_off:
            self._ends.create(iteration, save_id, reason)

    def call_off(self, iteration: int, save_id: str, reason: str) -> None:
        """Fail a save of the other ranks, because this rank raises an error, which may end it."""
        self._ends.create(iteration, save_id, reason)
        self._ends.wait()

    def copies_failed(self, save_id: str, failure: FlashCkptError) -> None:
        """Note that a save failed. Called by the copy thread."""
        self._failed_copies.put((save_id, failure))

    def agent_failed(self, client: AgentClient, error: AgentError) -> None:
        """Note that the agent is gone. Called by the copy thread."""
        self._agent_failures.put((client, error))

    def replace_lost_agent(self, lost: AgentClient | None, error: AgentError) -> None:
        """Connect to a new agent in the background; it gets the slab with all staged saves."""
        if lost is not None and self._link.replace_agent(lost):
            # One line per node is enough: its ranks lose the same agent.
            logger.log(
                logging.WARNING if os.environ.get("LOCAL_RANK", "0") == "0" else logging.DEBUG,
                "rank %d: %s; a new agent adopts the saves in host memory",
                *(self._rank, error),
            )
            self._orphaned = dict(self._open)
            self._loss = str(error)

    def poll(self, wait_s: float = 0.0) -> list[Outcome]:
        """Return the outcomes since the last call, waiting up to `wait_s` for the first.

        Never raises for a failed save. A lost agent is replaced in the background, and its
        successor continues with the staged saves. Without `wait_s`, the agent is asked only if it
        has something to report.
        """
        self.process_failures()
        client = self._link.current
        # The agent owes no outcome of a save whose end this rank waits for.
        handed_over = self._handed_over & self._open.keys() - self._unanswered.keys()
        try:
            reply = self._ask_agent(0.0 if self._unreported else wait_s, len(handed_over))
        except AgentRefusedError as error:
            # The agent serves another process of this rank from now on, and goes on with its parts.
            self._not_called_off |= self._open.keys()
            for save_id in list(self._open):
                self._conclude(save_id, str(error))
        except AgentError as error:
            self.replace_lost_agent(client, error)
        else:
            if reply is not None:
                self._note(reply, handed_over)
        outcomes, self._unreported = self._unreported, []
        if self._unanswered and not outcomes and wait_s:
            self._ends.wait(wait_s)
            time.sleep(min(wait_s, _ASK_AGAIN_S))
        return outcomes

    def _ask_agent(self, wait_s: float, handed_over: int) -> Outcomes | None:
        """Return the outcomes that the agent reports; None if it has none, or is being sought.

        Without an agent, because none was needed or none can be started, no outcome is pending.

        Args:
            handed_over: number of open saves that were handed to an agent.

        Raises:
            AgentError: the agent is gone.
        """
        if not self._link.wait_prepared(wait_s):
            return None
        client = self._link.current
        if client is None:
            return Outcomes((), 0)
        if not self._watch.must_ask(self._link.shared, handed_over) and not wait_s:
            return None
        reply = client.poll(wait_s)
        self._watch.answered(reply.pending)
        for notice in reply.notices:
            logger.warning("rank %d: iteration %d: %s", self._rank, notice.iteration, notice.text)
        return reply

    def _note(self, reply: Outcomes, handed_over: set[str]) -> None:
        """Note the outcomes that the agent has reported.

        Args:
            handed_over: open saves that had been handed to an agent before the request.
        """
        if reply.finished:
            hit("save.told")
        for outcome in reply.finished:
            # After a reconnect, an agent reports all slots that it keeps once more.
            is_open = self._open.pop(outcome.save_id, None) is not None
            if is_open or not outcome.kept:
                self._unreported.append(outcome)
        if reply.pending == 0:
            self._look_up(handed_over)

    def put_back(self, outcomes: list[Outcome]) -> None:
        """Have the next `poll` return these outcomes again."""
        self._unreported = outcomes + self._unreported

    def give_up(self, waited_s: float) -> list[Outcome]:
        """Return a failure for every open save, and forget these saves."""
        open_saves, self._open = self._open, {}
        return [
            self._not_in_time(iteration, save_id, waited_s)
            for save_id, iteration in open_saves.items()
        ]

    def _not_in_time(self, iteration: int, save_id: str, waited_s: float) -> Outcome:
        if save_id in self._handed_over:
            reason = (
                f"not committed within {waited_s:.0f} s; the agent keeps trying; raise "
                "'drain_timeout_s' to wait longer"
            )
            return Outcome(iteration, save_id, reason, waited_s)
        reason = (
            f"not committed within {waited_s:.0f} s: rank {self._rank} has not copied its part to "
            "host memory; look at its GPU and its agent, or raise 'drain_timeout_s' to wait longer"
        )
        return Outcome(iteration, save_id, reason, waited_s, failed_ranks=(self._rank,))

    def process_failures(self) -> None:
        """Process failures of the copy thread, answers of storage, and a change of agents."""
        self._take_failed_copies()
        while not self._agent_failures.empty():
            self.replace_lost_agent(*self._agent_failures.get())
        for save_id, unanswered in list(self._unanswered.items()):
            if save_id not in self._open:
                del self._unanswered[save_id]
            else:
                self._conclude(save_id, unanswered.otherwise)
        if self._orphaned and (adopted := self._link.adopted_saves()) is not None:
            self._conclude_orphaned(adopted)

    def _take_failed_copies(self) -> None:
        while not self._failed_copies.empty():
            save_id, failure = self._failed_copies.get()
            if save_id in self._open:  # `give_up` may have reported the failure already
                self.fail(self._open[save_id], save_id, str(failure))

    def _conclude_orphaned(self, adopted: tuple[str, ...]) -> None:
        """Conclude the saves of a dead agent that its successor has not `adopted`."""
        orphaned, self._orphaned = self._orphaned, {}
        for save_id in orphaned.keys() & self._open.keys() - set(adopted):
            # The save may have been committed just before the agent died.
            self._conclude(save_id, self._link.refusal or self._loss)

    def _look_up(self, handed_over: set[str]) -> None:
        """Conclude handed-over saves by reading storage, because no agent owes their outcomes.

        The agent reported them to another connection of this rank, or has forgotten this rank.
        Without this, a job that ends would wait for them until `drain_timeout_s` has passed.
        """
        for save_id in handed_over & self._open.keys():
            place = f"{self._root}/{iteration_dir(self._open[save_id])}"
            self._conclude(
                save_id,
                self._link.refusal
                or f"{place}: does not hold this save, and the agent of this node does not know "
                "the save; read that agent's log",
            )

    def _conclude(self, save_id: str, otherwise: str) -> None:
        """Conclude an open save by its end or history; without both, by error `otherwise`.

        A save without an end is called off first, and the end decides. Until storage tells it, the
        save stays open, and `process_failures` asks again.
        """
        iteration, now = self._open[save_id], time.monotonic()
        former = self._unanswered.get(save_id)
        if former is not None and now < former.again_at:
            return
        asked = former or _Unanswered(otherwise, now, now)
        is_called_off = save_id not in self._not_called_off
        may_end = is_called_off
        doubt = "; another node may still commit it" if is_called_off else ""
        try:
            outcome = self._stored_outcome(iteration, save_id)
        except (FlashCkptError, OSError) as error:
            outcome, doubt = None, f"; it may still have been committed: {error}"
            may_end = may_pass(error)
            if former is None and may_end:
                logger.warning("rank %d: asking storage again: %s", self._rank, error)
        if outcome is None:
            if former is None and is_called_off:
                if self._link.current is None:
                    self._link.withdraw(save_id)
                self._ends.create(iteration, save_id, otherwise)
            waited_s = now - asked.since
            may_end &= save_id not in self._ends.untold
            if may_end and waited_s < self._link.commit_timeout_s:
                again_at = time.monotonic() + _ASK_AGAIN_S + waited_s / 10
                self._unanswered[save_id] = asked._replace(again_at=again_at)
                return
            outcome = Outcome(iteration, save_id, asked.otherwise + doubt, 0.0)
        del self._open[save_id]
        failed = (self._rank,) if outcome.error is not None else ()
        self._unreported.append(msgspec.structs.replace(outcome, failed_ranks=failed))

    def close(self) -> None:
        """Return when the other nodes can know of all failures, or after a bounded wait."""
        self._take_failed_copies()
        self._ends.wait()

    def _stored_outcome(self, iteration: int, save_id: str) -> Outcome | None:
        """Return the outcome that storage tells; None if it knows of none.

        Raises:
            FlashCkptError: storage cannot tell.
            OSError: as before.
        """
        store = open_store(self._root)
        name = f"{iteration_dir(iteration)}/{end_name(save_id)}"
        outcome = Outcome(iteration, save_id, None, 0.0)
        try:
            encoded = store.get(name, 0, FAILED_NBYTES)
            if kind_of(encoded) is End.COMMITTED:
                return outcome
            failure = decode_failure(encoded)
            reason = None if failure.was_removed else failure.failed
            return msgspec.structs.replace(outcome, error=reason)
        except FileNotFoundError:
            # A checkpoint that was removed since stands in the history.
            past = history.find(store, save_id)
            if past is not None:
                return msgspec.structs.replace(outcome, error=past.error)
            check_run_is_known(store, save_id)
            return None
