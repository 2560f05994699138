"""A rank's connection to its node's agent, and the state that a replacement agent is sent."""

from __future__ import annotations

import contextlib
import logging
import os
import threading

from megatron_flashckpt.agent.client import AgentClient
from megatron_flashckpt.agent.connecting import connect, refuse_closed
from megatron_flashckpt.agent.place import place_of
from megatron_flashckpt.agent.protocol import JoinPeers, OpenPeers, PeersOpened
from megatron_flashckpt.agent.run_messages import BeginRun, describe_slabs
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.file_format.run_object import RunObject
from megatron_flashckpt.save import joining

logger = logging.getLogger(__name__)


class AgentConnection:
    """Connects on first use, and again after the agent was lost.

    A replacement agent gets what the lost agent knew: the run, the run's ranks on this node, and
    the agents of other nodes. Used by one thread at a time; see `NodeLink`.
    """

    def __init__(self, root: str, rank: int, config: Config) -> None:
        self._root = root
        self._rank = rank
        self._config = config
        self.current: AgentClient | None = None
        """The open connection, or None."""
        self._has_lost_one = False
        self._closed = threading.Event()
        self._run: RunObject | None = None
        self._begun: BeginRun | None = None
        self._opened: PeersOpened | None = None
        self._peers: JoinPeers | None = None

    def client(self) -> AgentClient:
        """Return the connection; open it, and start the agent, if necessary.

        Raises:
            AgentError: there is no agent, and none can be started; or the connection was closed.
        """
        if self.current is None:
            refuse_closed(self._root, self._rank, self._closed.is_set())
            # The rank that first notices a lost agent starts the next one. Local rank 0 may notice
            # later, because it waits for this rank in training.
            local_rank = 0 if self._has_lost_one else int(os.environ.get("LOCAL_RANK", "0"))
            self.current = connect(self._root, self._rank, local_rank, self._config, self._closed)
            self._send_run(self.current)
        return self.current

    def _send_run(self, client: AgentClient) -> None:
        """Send a new agent all that the run has sent its agents so far."""
        if self._run is not None:
            client.open_run(self._run)
        if self._rank == 0:
            joining.announce(client.agent_pid, client.facts, self._root)
        if self._config.redundancy == "none":
            client.end_peers()
        else:
            self._join_again(client)
        if self._begun is not None:
            client.begin_run(self._begun)

    def has_living_agent(self) -> bool:
        """Return whether this node has an agent, though this rank may not be connected to it."""
        try:
            return place_of(self._root, self._config.runtime_dir).listener() is not None
        except OSError:  # an AgentError is one
            return True

    def open_run(self, run: RunObject) -> None:
        """Tell the agent, and every replacement, which run this rank belongs to.

        Raises:
            AgentError: there is no agent, or it is gone.
        """
        self._run = run
        if self.current is None:
            self.client()  # sends the run
        else:
            self.current.open_run(run)

    def begin_run(self, run: BeginRun) -> None:
        """Tell the agent, and every later one, which ranks the run has on this node."""
        self._begun = run
        if self.current is not None:
            with contextlib.suppress(AgentError):  # the replacement gets this message
                self.current.begin_run(run)

    def open_peers(self, host: str) -> PeersOpened:
        """Have the agent listen on `host` for the agents of other nodes.

        Returns:
            The address, port and keys that other nodes need.

        Raises:
            AgentError: the agent cannot listen there.
        """
        request = OpenPeers(host, self._config.agent.peer_threads)
        self._opened = self.client().open_peers(request)
        return self._opened

    def join_peers(self, plan: JoinPeers) -> None:
        """Introduce the job's agents to this node's agent, and to every replacement."""
        self._peers = plan
        self.client().join_peers(plan)

    def _join_again(self, client: AgentClient) -> None:
        """Give a replacement agent the lost agent's keys and port, which other nodes know."""
        opened, plan = self._opened, self._peers
        if opened is None or plan is None:
            return
        threads = self._config.agent.peer_threads
        try:
            client.open_peers(OpenPeers(opened.host, threads, opened.identity, opened.port))
            client.join_peers(plan)
        except AgentError as error:
            logger.warning(
                "rank %d: other nodes hold no copies of this rank's saves until the job restarts: "
                "%s",
                self._rank,
                error,
            )

    def held_memory(self, wait_s: float) -> str:
        """Return how much memory this node's agent holds, and for which ranks; empty if none.

        Never starts an agent. Waits up to `wait_s` until the agent has freed the memory of ranks
        that the run does not have.
        """
        try:
            if self.current is None and not self.has_living_agent():
                return ""
            client = self.client()
            slabs = client.held(wait_s)
        except OSError:  # includes AgentError; the caller must reach its next collective
            return ""
        return f"agent {client.agent_pid} holds {describe_slabs(slabs)}" if slabs else ""

    def note_lost(self) -> None:
        """Close the connection to a lost agent; this rank may start the next one."""
        self._has_lost_one = True
        self.disconnect()

    def leave(self) -> bool:
        """Have the agent free this rank's memory; return whether there is an agent."""
        if self.current is None:
            return False
        try:
            self.current.leave()
        except AgentError as error:
            logger.warning("rank %d: %s", self._rank, error)
            return False
        return True

    def close(self) -> None:
        """Disconnect for good. Without a prior `leave`, the agent keeps the slots for a restart."""
        self._closed.set()
        self.disconnect()

    def disconnect(self) -> None:
        """Close the connection, if there is one; `client` opens another."""
        if self.current is not None:
            self.current.close()
            self.current = None
