"""The agent: serves the node's trainers, persists what they stage, commits, and outlives them.

Threads: one accepts, one per trainer answers, a pool persists, one commits. All shared state is
behind one lock, whose condition is notified on every change; nothing slow happens while it is held.
"""

from __future__ import annotations

import logging
import time

from megatron_flashckpt.agent.commit_thread import Committer
from megatron_flashckpt.agent.conversations import Conversations
from megatron_flashckpt.agent.incarnations import SecondStarts
from megatron_flashckpt.agent.keeper import ClaimKeeper
from megatron_flashckpt.agent.pending_save import awaited_by
from megatron_flashckpt.agent.persister import Saves
from megatron_flashckpt.agent.process import AgentProcess
from megatron_flashckpt.agent.reception import Reception, Strangers
from megatron_flashckpt.agent.request_handler import RequestHandler
from megatron_flashckpt.agent.state import AgentOptions, Node
from megatron_flashckpt.agent.upkeep import Upkeep

logger = logging.getLogger(__name__)

_TICK_S = 0.2
#: Seconds for which an agent that nobody has talked to yet stays.
_UNCLAIMED_S = 60.0


class Agent:
    """One per node and save directory. `serve` runs until the agent is not needed any more."""

    def __init__(
        self,
        upkeep: Upkeep,
        options: AgentOptions,
        process: AgentProcess | None = None,
        *,
        unclaimed_s: float = _UNCLAIMED_S,
    ) -> None:
        """Listen.

        Args:
            process: this one, which takes the settings of later runs, too; None: it keeps its own.
            unclaimed_s: seconds that it waits for its first trainer.
        """
        self._upkeep = upkeep
        self._node = Node(options, process)
        self._committer = Committer(self._node)
        self._claim = ClaimKeeper(self._node, self._committer)
        self._saves = Saves(self._node, self._committer)
        strangers = Strangers()
        second_starts = SecondStarts(lambda: upkeep.directory)
        self._handler = RequestHandler(self._node, self._saves, self._committer)
        self._talks = Conversations(
            self._node, self._saves, self._handler, strangers, second_starts
        )
        self._reception = Reception(upkeep.listen(), strangers)
        self._unclaimed_s = unclaimed_s
        #: When to end, at the latest; set by a signal.
        self._deadline: float | None = None
        self.unfinished = False
        """True: when it was told to end, a save was not durable in time."""
        self.all_left = False
        """True: all trainers have ended as planned, and nothing is being written any more."""

    def serve(self) -> None:
        """Accept trainers until all have left, or none has come back for the grace time."""
        self._committer.start()
        self._claim.start()
        while not self._may_leave():
            self._committer.watch()
            self._handler.departed.release()
            listener = self._upkeep.look()
            if listener is not None:
                self._reception.listen_on(listener)
            connection = self._reception.accept(_TICK_S)
            if connection is not None:
                self._talks.begin(connection)
        with self._node.changed:
            ranks = self._node.ranks.values()
            self.all_left = bool(ranks) and all(rank.left for rank in ranks)
            self.all_left = self.all_left and not self._node.is_stuck()
        self._saves.close()
        self._committer.close()
        self._claim.close()
        if self._node.peers is not None:
            self._node.peers.close()
        self._node.give_up_slots()
        self._reception.close()

    def end_soon(self) -> None:
        """Have `serve` return when all that is staged is durable and no trainer is left.

        At the latest after `sigterm_timeout_s`; called again: at once. Takes no lock, because a
        signal handler calls it.
        """
        wait_s = 0.0 if self._deadline is not None else self._node.options.sigterm_timeout_s
        self._deadline = time.monotonic() + wait_s
        self._node.flow.pace.lift()

    def _may_leave(self) -> bool:
        with self._node.changed:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                for save in self._committer.pending.values():
                    logger.error(
                        "told to end: iteration %d is not durable: %s; it had at most %g s "
                        "('agent.sigterm_timeout_s')",
                        *(save.iteration, awaited_by(save), self._node.options.sigterm_timeout_s),
                    )
                    self.unfinished = True
                return True
            if not self._talks.connections and self._node.held.is_gone():
                logger.error(
                    "%s: was removed, or another directory is in its place: what is in memory is "
                    "given up",
                    self._node.options.root,
                )
                return True
            if self._talks.connections or (self._committer.pending and not self._talks.parting):
                self._talks.last_seen = time.monotonic()
            if self._talks.connections or self._committer.pending:
                return False
            patience = self._node.options.grace_s if self._node.ranks else self._unclaimed_s
            if (
                self._talks.parting
                or self._deadline is not None
                or (self._node.ranks and all(rank.left for rank in self._node.ranks.values()))
                or time.monotonic() - self._talks.last_seen > patience
            ):
                self._talks.parting = self._saves.persist_rest()
                return not self._talks.parting
            return False
