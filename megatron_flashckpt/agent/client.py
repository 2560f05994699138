"""Connection of a trainer to its node's agent."""

from __future__ import annotations

import logging
import os
import resource
import select
import socket
import threading
import time
from pathlib import Path
from typing import TypeVar

from megatron_flashckpt import forks
from megatron_flashckpt.agent import frames
from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.agent.run_messages import (
    AskHeld,
    BeginRun,
    Configure,
    Configured,
    Held,
    HeldSlab,
)
from megatron_flashckpt.agent.settings import AgentSettings
from megatron_flashckpt.agent.silent_agent import (
    KILLED,
    LAST_COPIES_FACTOR,
    await_answer,
    end_agent,
    runs,
)
from megatron_flashckpt.agent_config import AgentConfig
from megatron_flashckpt.errors import AgentError, AgentRefusedError, SaveFailedError
from megatron_flashckpt.file_format.run_object import RunObject
from megatron_flashckpt.layout.save_cost import RankCost
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.tracing import Span

logger = logging.getLogger(__name__)

_R = TypeVar("_R")
#: Longest wait for digests of the slots of an earlier incarnation: gigabytes at memory speed.
_DIGESTED_S = 120.0
_RETRY_S = 0.02
#: A long wait is requested in slices of this length, so that a hung agent is noticed.
_SLICE_S = 5.0
_TEMPLATE_SLICE_S = 1.0


class ClosedError(AgentError):
    """The agent closed the connection, had ended before, or was killed now."""

    was_killed = False


class AgentClient:
    """Connection of one rank. Safe to use from several threads, one request at a time.

    An agent that does not answer for `answer_timeout_s` (beyond a requested wait) is stopped or
    hangs, because every answer takes it at most about a second. The client kills such an agent, so
    that another one can replace it and training continues. If memory of dead ranks would be lost
    with the agent, the client first waits much longer: the node may be short of memory or CPU.
    """

    def __init__(
        self,
        sock: socket.socket,
        rank: int,
        log: Path,
        settings: AgentConfig,
        identity: str = "",
    ) -> None:
        """Send the greeting, which may be answered within `start_timeout_s`.

        Args:
            log: the agent's log.
            identity: identity of the save directory; see `save_directory.identity_of`.
        """
        self._sock = sock
        self._lock = threading.Lock()
        self.log = log
        """The agent's log, in a directory of this user on this node."""
        self._answer_s = max(settings.start_timeout_s, settings.answer_timeout_s)
        self._last_copies_s = LAST_COPIES_FACTOR * settings.start_timeout_s
        #: Reason why no request can follow: after a missing answer, the next answer would be taken
        #: for it.
        self._ended: str | None = None
        self._was_killed = False
        #: Reports only the end of the connection, which the kernel reports without being asked.
        self._hang_up = select.poll()
        self._hang_up.register(sock, 0)
        welcome = self._ask(p.Hello(rank, p.PROTOCOL_VERSION, identity), p.Welcome)[0]
        self._answer_s = settings.answer_timeout_s
        self.agent_pid = welcome.pid
        self.facts = welcome.facts
        if welcome.former_pid:
            logger.warning(
                "rank %d: process %d, an earlier one of this rank, still runs on this node and no "
                "longer saves: end it",
                rank,
                welcome.former_pid,
            )

    def _ask(
        self, request: p.Request, expected: type[_R], fd: int | None = None, wait_s: float = 0.0
    ) -> tuple[_R, int | None]:
        with self._lock:
            try:
                if self._ended is not None:
                    raise EOFError(self._ended)
                self._sock.settimeout(self._answer_s)
                frames.send(self._sock, request, fd)
                await_answer(self._sock, wait_s + self._answer_s, self._last_copies_s)
                body, received = frames.receive(self._sock)
            except (OSError, EOFError) as error:
                if isinstance(error, TimeoutError):
                    self._was_killed = True
                    end_agent(self._sock, self._answer_s)
                    self._ended = f"no answer within {self._answer_s:g} s"
                self._ended = self._ended or str(error) or "connection closed"
                raise self._closed() from error
        reply = p.decode_reply(body)
        if isinstance(reply, expected):
            return reply, received
        if received is not None:
            os.close(received)
        if isinstance(reply, p.Refused):
            raise AgentRefusedError(f"the agent refused {type(request).__name__}: {reply.reason}")
        raise AgentError(f"the agent answered {type(request).__name__} with {reply!r}")

    def _closed(self) -> ClosedError:
        """Return the error of a request that found the connection closed."""
        pid = frames.peer(self._sock).pid if self._sock.fileno() >= 0 else 0
        if runs(pid) and not self._was_killed:
            return ClosedError(
                f"agent {pid} of this node has closed the connection of this rank; its log: "
                f"{self.log}"
            )
        closed = ClosedError(
            f"the agent of this node is gone ({self._ended}); its log: {self.log}"
            + ("" if self._was_killed else f"; if the log has no reason, {KILLED}")
        )
        closed.was_killed = self._was_killed
        return closed

    def attach(self, slab: Slab) -> tuple[str, ...]:
        """Hand the agent a slab that replaces the rank's former one.

        Returns the saves that are staged in the slab: the agent persists them and reports their
        results.
        """
        return self._ask(p.AttachSlab(slab.formers), p.Attached, slab.fd)[0].taken

    def detach(self) -> None:
        """Make the agent unmap this rank's slab, so that closing the slab here frees the memory.

        Raises:
            AgentError: the slab holds a checkpoint, or the agent is gone.
        """
        self._ask(p.DetachSlab(), p.Done)

    def take(self) -> tuple[Slab | None, tuple[p.Offer, ...]]:
        """Return the slab that an earlier incarnation of this rank left, and its slots.

        Waits until the agent has digested the slots.

        Raises:
            AgentError: this process has no descriptor left for the slab, or the agent is gone.
        """
        deadline = time.monotonic() + _DIGESTED_S
        while True:
            reply, fd = self._ask(p.TakeSlab(), p.SlabOffer)
            if not reply.present:
                return None, ()
            if fd is None:
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                raise AgentError(
                    f"the slab's descriptor did not arrive: this process may open {limit} files; "
                    "raise its limit ('ulimit -n')"
                )
            if not reply.is_digesting or time.monotonic() > deadline:
                slab = Slab.attach(fd)
                slab.formers = reply.formers
                slab.read_only = bool(reply.formers)
                return slab, reply.offers
            os.close(fd)
            time.sleep(_RETRY_S)

    def lend(self, rank: int, save_id: str) -> tuple[Slab, p.Offer] | None:
        """Return the slab of another rank of this node with its offer of a save, to read it only.

        Returns None if the agent does not have that save, or this process no descriptor left.

        Raises:
            AgentError: the agent is gone.
        """
        reply, fd = self._ask(p.LendSlab(rank, save_id), p.SlabOffer)
        if fd is None:
            return None
        slab = Slab.attach(fd)
        slab.read_only = True
        return slab, reply.offers[0]

    def saves_of_node(self) -> tuple[tuple[int, str], ...]:
        """Return iteration and id of every save that any rank has in a slot on this node.

        Raises:
            AgentError: the agent is gone.
        """
        reply, fd = self._ask(p.TakeSlab(), p.SlabOffer)
        if fd is not None:
            os.close(fd)
        return reply.saves

    def open_run(self, run: RunObject) -> None:
        """Report the run that this rank belongs to; slots of other histories are emptied."""
        self._ask(p.OpenRun(run), p.Done)

    def acquire(self, wait_s: float = 0.0) -> int:
        """Return a slot to stage into, or -1 if none became free in time.

        Raises:
            SaveFailedError: storage hangs, so that no slot will become free.
        """
        granted = self._ask(p.Acquire(wait_s), p.Granted, None, wait_s)[0]
        if granted.hung_s:
            raise SaveFailedError(
                "all slots of this rank hold checkpoints that are still being written, one for "
                f"{granted.hung_s:.0f} s: the storage hangs; look at it, or save elsewhere"
            )
        return granted.slot

    def staged(self, slot: int, cost: RankCost | None = None, spans: tuple[Span, ...] = ()) -> None:
        """Send the "staged" message: the slot is complete; `cost` and `spans` are its timings."""
        self._ask(p.Staged(slot, cost, spans), p.Done)

    def fetch_template(self, fingerprint: str) -> bytes | None:
        """Return a template that another rank published; None: this rank must compute it."""
        request = p.GetTemplate(fingerprint, _TEMPLATE_SLICE_S)
        while True:
            reply = self._ask(request, p.TemplateReply, None, _TEMPLATE_SLICE_S)[0]
            if not reply.computing:
                return reply.encoded

    def publish_template(self, fingerprint: str, encoded: bytes) -> None:
        """Share a template with the other ranks of this node."""
        self._ask(p.PutTemplate(fingerprint, encoded), p.Done)

    def poll(self, wait_s: float = 0.0) -> p.Outcomes:
        """Return unreported results; with `wait_s`, wait for one while saves are pending."""
        return self._ask(p.Poll(wait_s), p.Outcomes, None, wait_s)[0]

    def has_hung_up(self) -> bool:
        """Return whether the agent has died or ended this connection; 1 us, without a request.

        Called by the training thread only.
        """
        return self._ended is not None or bool(self._hang_up.poll(0))

    def open_peers(self, request: p.OpenPeers) -> p.PeersOpened:
        """Make the agent listen for agents of other nodes; return its address and key."""
        return self._ask(request, p.PeersOpened)[0]

    def join_peers(self, plan: p.JoinPeers) -> None:
        """Send the agent the addresses of the other agents of the job."""
        self._ask(plan, p.Done)

    def end_peers(self) -> None:
        """End the agent's connections to agents of other nodes."""
        self._ask(p.EndPeers(), p.Done)

    def recover(self, saves: tuple[str, ...], *, huge_pages: bool = True) -> None:
        """Return when the agent has tried to fetch these saves of this rank from other nodes."""
        request = p.Recover(saves, _SLICE_S, huge_pages)
        while not self._ask(request, p.Recovered, None, _SLICE_S)[0].ended:
            pass

    def configure(self, settings: AgentSettings, of_stores: dict[str, str] | None = None) -> None:
        """Give the agent what this run has set; an agent of an earlier run may have others.

        Args:
            of_stores: see `Configure`.
        """
        changed = self._ask(Configure(settings, of_stores), Configured)[0].changed
        if changed:
            logger.info(
                "agent %d, which an earlier run started, changed its settings to this run's: %s",
                self.agent_pid,
                ", ".join(changed),
            )

    def begin_run(self, run: BeginRun) -> None:
        """Report the ranks of the run on this node; the agent frees the memory of other ranks."""
        self._ask(run, p.Done)

    def held(self, wait_s: float = 0.0) -> tuple[HeldSlab, ...]:
        """Return the slabs that the agent holds, after those of departed ranks are freed."""
        return self._ask(AskHeld(wait_s), Held, None, wait_s)[0].slabs

    def leave(self) -> None:
        """Report that this rank ends as planned."""
        self._ask(p.Leave(), p.Done)

    def close(self) -> None:
        """Close the connection. Without `leave` before, the agent keeps this rank's slots."""
        close_socket(self._sock)


def close_socket(sock: socket.socket) -> None:
    """Close `sock`; no child is forked meanwhile, which might close a reused number."""
    with forks.forks_blocked():
        sock.close()
