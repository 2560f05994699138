"""The agent's main loop: serves trainers, persists and commits their saves, and survives them.

Threads: one accepts, one per trainer answers, a pool persists, one commits. One lock guards all
shared state; its condition is notified on every change. No slow operation runs under the lock.
"""

from __future__ import annotations

import logging
import threading
import time

from megatron_flashckpt.agent.committer import Committer
from megatron_flashckpt.agent.durable_commands import DurableCommands
from megatron_flashckpt.agent.heartbeat import Heartbeat
from megatron_flashckpt.agent.janitor import Janitor
from megatron_flashckpt.agent.life import clock
from megatron_flashckpt.agent.node import AgentOptions, Node
from megatron_flashckpt.agent.place import AgentSocket
from megatron_flashckpt.agent.process import AgentProcess
from megatron_flashckpt.agent.reception import Acceptor, SilentConnections
from megatron_flashckpt.agent.request_handler import RequestHandler
from megatron_flashckpt.agent.saves import Saves
from megatron_flashckpt.agent.trainer_connections import TrainerConnections

logger = logging.getLogger(__name__)

_TICK_S = 0.2
#: Seconds between two attempts to write what only memory holds, after all trainers have ended.
_AGAIN_S = 60.0
#: Longest wait of a leaving agent for the deletion of local copies, which a disk may block.
_DELETED_S = 30.0
#: Seconds that an agent which a trainer has started waits for its first trainer.
_UNCLAIMED_S = 60.0


class Agent:
    """One agent per node and save directory. `serve` runs until the agent is no longer needed."""

    def __init__(
        self,
        listener: AgentSocket,
        options: AgentOptions,
        process: AgentProcess | None = None,
    ) -> None:
        """Prepare to serve the trainers that connect to `listener`, which listens already.

        Args:
            process: this process, to which settings of later runs are applied; None: it is
                unchanged.
        """
        self._listener = listener
        self._node = Node(options, process)
        self._commands = DurableCommands(self._node)
        self._janitor = Janitor(
            lambda: self._committer.pending_ids(),
            options.commit_timeout_s,
            commands=self._commands,
        )
        self._committer: Committer = Committer(self._node, self._janitor, self._commands)
        self._heartbeat = Heartbeat(self._node, self._committer)
        self._saves = Saves(self._node, self._committer)
        silent = SilentConnections()
        self._handler = RequestHandler(self._node, self._saves, self._committer, self._janitor)
        self._conversations = TrainerConnections(self._node, self._saves, self._handler, silent)
        self._reception = Acceptor(silent)
        #: Latest time to end, and the time of the signal that has set it.
        self._deadline: float | None = None
        self._signalled_at = 0.0
        self._has_reported_rest = False
        #: What only memory held is given up; a command may still keep this agent.
        self._has_lost_rest = False
        self.unfinished = False
        """True: a signal ended the agent, and a save was not durable in time."""
        self.all_left = False
        """True: all trainers have ended as planned, and no shard is being written."""

    def serve(self) -> None:
        """Serve until all trainers have left, or none has returned within the grace time."""
        self._committer.start()
        self._heartbeat.start()
        while not self._may_leave():
            self._node.beat()
            self._committer.watch()
            self._saves.digester.digest_settled()
            self._handler.departed.release()
            self._listener.follow(self._node.held.key)
            connection = self._reception.accept(self._listener.socket, _TICK_S)
            if connection is not None:
                self._conversations.begin(connection)
        with self._node.changed:
            self.all_left = self._have_all_left() and not self._node.is_stuck()
        is_orderly = self.all_left and not self._has_lost_rest
        delete_copies = self._node.local_copies.end() if is_orderly else None
        self._saves.close()
        if delete_copies is not None:  # after the copies that were being made
            ending = threading.Thread(target=delete_copies, daemon=True)
            ending.start()
            ending.join(_DELETED_S)
        self._commands.close()
        self._committer.close()
        self._heartbeat.close()
        self._handler.recoveries.close()
        if self._node.peers is not None:
            self._node.peers.close()
        self._node.give_up_slots()
        self._node.held.close()
        self._reception.close()

    def end_soon(self) -> None:
        """Make `serve` return when all staged saves are durable and no trainer is left.

        It returns after `sigterm_timeout_s` at the latest, and at once after a second call. A
        signal handler calls this, and a second signal may interrupt the handler. So the second call
        takes no lock.
        """
        is_first = self._deadline is None
        wait_s = self._node.options.sigterm_timeout_s if is_first else 0.0
        self._deadline = time.monotonic() + wait_s
        if is_first:
            self._signalled_at = time.monotonic()
            self._node.flow.lift()

    def _have_all_left(self) -> bool:
        ranks = self._node.ranks.values()
        return bool(ranks) and all(rank.left for rank in ranks)

    def _may_leave(self) -> bool:
        with self._node.changed:
            options = self._node.options
            if self._deadline is not None and time.monotonic() >= self._deadline:
                for save in self._committer.pending.values():
                    logger.error(
                        "ended by a signal: iteration %d is not durable: %s; the agent had at "
                        "most %g s ('agent.sigterm_timeout_s')",
                        *(save.iteration, save.core.waits_for(), options.sigterm_timeout_s),
                    )
                    self.unfinished = True
                return True
            if not self._conversations.connections:  # a directory that came back has another key
                self._node.held.look()
            if self._conversations.connections or (
                self._committer.pending and not self._conversations.parting
            ):
                self._conversations.last_seen = time.monotonic()
            if self._conversations.connections or self._committer.pending:
                return False
            is_patient = bool(self._node.ranks) or options.foreground
            patience = options.grace_s if is_patient else _UNCLAIMED_S
            if (
                self._conversations.parting
                or self._deadline is not None
                or self._have_all_left()
                or time.monotonic() - self._conversations.last_seen > patience
            ):
                self._has_lost_rest &= self._conversations.parting
                self._has_reported_rest &= self._conversations.parting
                self._conversations.parting = True
                return not self._keeps_unwritten() and not self._commands.are_due()
            return False

    def _keeps_unwritten(self) -> bool:
        """Write what only memory holds, again and again; return whether the agent stays for it.

        The caller holds the lock, and no trainer is connected.
        """
        if self._has_lost_rest:
            return False
        now, options = time.monotonic(), self._node.options
        is_ending = self._deadline is not None
        iteration = self._saves.write_rest(self._signalled_at if is_ending else now - _AGAIN_S)
        if iteration is None:
            return False
        if self._committer.pending:
            return True
        left_s = self._conversations.last_seen + options.keep_unwritten_s - now
        is_removed = self._node.held.is_removed()
        if is_ending or is_removed or left_s < 0:
            end = "by a signal" if is_ending else "after 'agent.keep_unwritten_s'"
            logger.error(
                "iteration %d is lost: only this agent's memory holds it, and the agent ends %s",
                iteration,
                f"because {options.root} was removed" if is_removed else end,
            )
            self.unfinished = is_ending
            self._has_lost_rest = True
            return False
        if not self._has_reported_rest:
            self._has_reported_rest = True
            logger.warning(
                "this node's host memory holds iteration %d until %s, because storage lacks it; "
                "the agent tries again every %g s: free space in %s or remove the cause, or start "
                "the job again, which resumes from memory; SIGTERM ends this agent after one more "
                "attempt",
                *(iteration, clock(left_s), _AGAIN_S, options.root),
            )
        return True
