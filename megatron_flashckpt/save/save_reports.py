"""Reports of a rank on the saves to one directory, and how the last save failed.

Rank 0 reports for the job, and the first rank whose part failed reports the failure. Other ranks
log at debug level, because a job of 1,024 ranks would fill its log with copies of one line.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Hashable, Sequence

from megatron_flashckpt.agent.life import EnclosingUnit, clock
from megatron_flashckpt.agent.place import place_of
from megatron_flashckpt.agent.protocol import Outcome
from megatron_flashckpt.agent_config import AgentConfig
from megatron_flashckpt.errors import first_few

logger = logging.getLogger(__name__)

#: Failed saves in a row from which on each report also says what is at risk.
_ESCALATE = 2


def say(rank: int, line: str) -> None:
    """Print a line of the job's log, on rank 0 only.

    The line is one write, because other threads and ranks write to the same log.
    """
    if rank == 0:
        print(f"  flashckpt: {line}\n", end="", flush=True)


class SaveReports:
    """Reports on the saves of this process to `root`, over all its checkpointers."""

    def __init__(self, root: str, rank: int) -> None:
        self._root = root
        #: Host and path of the log of this node's agent; empty if unknown.
        self._agent_log = ""
        self.rank = rank
        self.has_agent = True
        """True if there was an agent when the checkpointer was closed."""
        self.unit = EnclosingUnit()
        """The unit whose end also ends that agent."""
        self.failures_in_a_row = 0
        """Saves to storage that have failed since the last durable one."""
        self.is_held = False
        """True if the last save to storage has failed, and host memory still holds it."""
        #: Newest durable iteration in `root` that this rank knows of.
        self._durable: int | None = None
        self.has_committed = False
        """True once a save of this process is durable."""
        self.last_requested: int | None = None
        """Iteration of the last save to storage; None if there was none."""
        #: Iteration of the last save to storage; None if that save is durable, or there was none.
        self._open: int | None = None
        #: The reason why that save failed; None while its outcome is unknown.
        self._reason: str | None = None

    def note_durable(self, iteration: int | None) -> None:
        """Note the newest durable checkpoint that earlier processes left in `root`."""
        self._durable = iteration

    def note_agent_log(self, runtime_dir: str | None) -> None:
        """Note where the agent logs; called while storage answers, as it may hang in a failure.

        Args:
            runtime_dir: the setting.
        """
        if not self._agent_log:
            self._agent_log = f"{platform.node()}:{place_of(self._root, runtime_dir).log}"

    def requested(self, iteration: int) -> None:
        """Note that training requested a save to storage."""
        self.last_requested = self._open = iteration
        self._reason, self.is_held = None, False

    def committed(self, outcome: Outcome) -> None:
        """Report a durable checkpoint."""
        self.has_committed, self.failures_in_a_row = True, 0
        self._durable = max(outcome.iteration, self._durable or 0)
        if self._open == outcome.iteration:
            self._open = None
        say(self.rank, f"iteration {outcome.iteration} durable after {outcome.seconds:.3f} s")

    def kept(self, outcome: Outcome) -> None:
        """Report a checkpoint that was saved to host memory only."""
        say(
            self.rank,
            f"iteration {outcome.iteration} kept in host memory, not in storage, after "
            f"{outcome.seconds:.3f} s",
        )

    def failed(self, outcome: Outcome) -> None:
        """Report a failed save, on rank 0 and on the first rank whose part failed."""
        assert outcome.error is not None
        self.failures_in_a_row += 1
        if self._open == outcome.iteration:
            self._reason, self.is_held = outcome.error, outcome.held
        is_reporter = self.rank == 0 or self.rank == min(outcome.failed_ranks, default=-1)
        logger.log(
            logging.ERROR if is_reporter else logging.DEBUG,
            "rank %d: iteration %d was not saved: %s%s%s%s",
            self.rank,
            outcome.iteration,
            outcome.error,
            _and_others(outcome.failed_ranks, self.rank),
            f"; {self._newest_durable()}{self._at_risk(outcome)}" if self.rank == 0 else "",
            f"; the agent's log: {self._agent_log}" if self._agent_log else "",
        )

    def _at_risk(self, outcome: Outcome) -> str:
        """Return what repeated failures put at risk, and where the last save still is."""
        held = ""
        if outcome.held:
            held = f"; host memory holds iteration {outcome.iteration} as long as the agents run"
        if self.failures_in_a_row < _ESCALATE:
            return held
        since = outcome.iteration - (self._durable or 0)
        return f"{held}; {self.failures_in_a_row} saves in a row, {since} iterations at risk"

    def skipped(self, iteration: int, refusal: str) -> None:
        """Report a save that all ranks skipped (`busy: skip`)."""
        if self._open == iteration:
            self._reason = f"it was skipped: {refusal}"
        level = logging.WARNING if self.rank == 0 else logging.DEBUG
        logger.log(level, "iteration %d is not saved: %s", iteration, refusal)

    def last_failure(self) -> str | None:
        """Return how the last save failed, or None if it did not fail."""
        if self._open is None or self._reason is None:
            return None
        return f"the last save, iteration {self._open}, is not durable: {self._reason}; " + (
            self._newest_durable()
        )

    def where_held(self, agent: AgentConfig, nodes: int | None) -> str:
        """Return where a last save that failed still is, for how long, and what helps.

        Args:
            nodes: of the job, if their number is known.
        """
        if not (self.has_agent and agent.persist_on_leave):
            return ""
        if not (self.is_held and agent.keep_unwritten_s):
            return "; if all ranks have staged it, the agents try to write it after this exit"
        until = clock(agent.keep_unwritten_s)
        places = "" if nodes is None else f" of {nodes} node{'s' if nodes > 1 else ''}"
        sooner = f", or until the {self.unit} ends" if self.unit.kind else ""
        return (
            f"; host memory{places} holds iteration {self.last_requested} until {until}{sooner}: "
            "the agents try every minute to write it; remove the cause, and start the job again if "
            "it is to continue from there"
        )

    def _newest_durable(self) -> str:
        if self._durable is None:
            return f"there is no durable checkpoint in {self._root}"
        return f"the newest durable checkpoint in {self._root} is iteration {self._durable}"


def node_count(nodes: Sequence[Hashable] | None) -> int | None:
    """Return the number of the job's nodes, if it is known without a collective."""
    if nodes is not None:
        return len(set(nodes))
    try:
        ranks, per_node = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    except (KeyError, ValueError):  # not started by torchrun
        return None
    return -(-ranks // max(1, per_node))


def _and_others(failed_ranks: tuple[int, ...], rank: int) -> str:
    others = [other for other in failed_ranks if other != rank]
    return f" (likewise rank {first_few(others)})" if others else ""
