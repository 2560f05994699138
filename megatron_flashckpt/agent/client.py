"""A trainer's side of the conversation with its node's agent."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TypeVar

import megatron_flashckpt
from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.agent.rendezvous import LOG, SOCKET, agent_directory
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.memory.slab import Slab

_R = TypeVar("_R")
_RETRY_S = 0.02
#: An agent that takes longer than this to answer (beyond a wait that was asked for) hangs, and the
#: trainer must not hang with it. Nothing that it does for an answer takes more than a second or so.
ANSWER_S = 60.0
#: A wait for something long is asked for in slices, so that a hung agent is noticed.
_SLICE_S = 5.0


class _HungUpError(AgentError):
    """The agent ended the conversation, or was gone before it."""


class AgentClient:
    """A connection of one rank. Safe to use from several threads, one request at a time."""

    def __init__(self, sock: socket.socket, rank: int, directory: Path) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._log = directory / LOG
        welcome = self._ask(p.Hello(rank, p.PROTOCOL_VERSION), p.Welcome)[0]
        self.agent_pid = welcome.pid

    def _ask(
        self, request: p.Request, expected: type[_R], fd: int | None = None, wait_s: float = 0.0
    ) -> tuple[_R, int | None]:
        try:
            with self._lock:
                self._sock.settimeout(wait_s + ANSWER_S)
                p.send(self._sock, request, fd)
                body, received = p.receive(self._sock)
        except (OSError, EOFError) as error:
            raise _HungUpError(
                f"the agent of this node is gone ({error or 'connection closed'}); the next save "
                f"starts a new one; log of the old one: {self._log}"
            ) from error
        reply = p.decode_reply(body)
        if isinstance(reply, expected):
            return reply, received
        if received is not None:
            os.close(received)
        reason = reply.reason if isinstance(reply, p.Refused) else f"answered {reply!r}"
        raise AgentError(f"the agent refused {type(request).__name__}: {reason}")

    def attach(self, slab: Slab) -> None:
        """Hand the agent a slab in place of the rank's former one."""
        self._ask(p.AttachSlab(), p.Done, slab.fd)

    def take(self) -> tuple[Slab | None, tuple[p.Offer, ...]]:
        """Return the slab that an earlier incarnation of this rank left, and what is in it."""
        reply, fd = self._ask(p.TakeSlab(), p.SlabOffer)
        if fd is None:
            return None, ()
        return Slab.attach(fd), reply.offers

    def adopt(self, save_id: str | None, iteration: int) -> None:
        """Say which save training goes on from; newer slots of other saves are emptied."""
        self._ask(p.Adopt(save_id, iteration), p.Done)

    def acquire(self, iteration: int, save_id: str, wait_s: float) -> int:
        """Return a slot to stage into, or -1 if none became free in time."""
        return self._ask(p.Acquire(iteration, save_id, wait_s), p.Granted, None, wait_s)[0].slot

    def staged(self, slot: int) -> None:
        """Ring the doorbell: the slot is complete."""
        self._ask(p.Staged(slot), p.Done)

    def abandon(self, iteration: int, save_id: str, reason: str) -> None:
        """Let a save fail on all ranks, because this one could not stage its part."""
        self._ask(p.Abandon(iteration, save_id, reason), p.Done)

    def fetch_template(self, fingerprint: str) -> bytes | None:
        """Return a template that another rank published."""
        return self._ask(p.GetTemplate(fingerprint), p.TemplateReply)[0].encoded

    def publish_template(self, fingerprint: str, encoded: bytes) -> None:
        """Share a template with the other ranks of this node."""
        self._ask(p.PutTemplate(fingerprint, encoded), p.Done)

    def poll(self, wait_s: float = 0.0) -> p.Outcomes:
        """Return outcomes not told yet; with `wait_s`, wait for one while saves are pending."""
        return self._ask(p.Poll(wait_s), p.Outcomes, None, wait_s)[0]

    def open_peers(self, request: p.OpenPeers) -> p.PeersOpened:
        """Have the agent listen for those of other nodes; return how they reach and know it."""
        return self._ask(request, p.PeersOpened)[0]

    def join_peers(self, plan: p.JoinPeers) -> None:
        """Introduce the agents of the job."""
        self._ask(plan, p.Done)

    def recover(self, saves: tuple[str, ...]) -> None:
        """Return when the agent has tried to get these saves of this rank from other nodes."""
        while not self._ask(p.Recover(saves, _SLICE_S), p.Recovered, None, _SLICE_S)[0].ended:
            pass

    def leave(self) -> None:
        """Say that this rank ends as planned."""
        self._ask(p.Leave(), p.Done)

    def close(self) -> None:
        """Hang up. Without `leave` before, the agent keeps this rank's slots for a restart."""
        self._sock.close()


def connect(root: str, rank: int, local_rank: int, config: Config) -> AgentClient:
    """Return a connection to the node's agent for save directory `root`.

    The first rank of the node starts the agent if there is none; the others wait for it.

    Raises:
        AgentError: it did not answer in time, or the socket directory is not private.
    """
    directory = agent_directory(root, config.runtime_dir)
    deadline = time.monotonic() + config.agent.start_timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(directory / SOCKET))
            if p.peer_uid(sock) != os.getuid():
                raise AgentError(
                    f"{directory / SOCKET}: belongs to user {p.peer_uid(sock)}; "
                    "remove it or set 'runtime_dir'"
                )
            return AgentClient(sock, rank, directory)
        except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError, _HungUpError):
            # Also where an agent has just left, directory and all: start over. But a refusal (an
            # agent of another release or user) is final.
            sock.close()
        except BaseException:
            sock.close()
            raise
        if time.monotonic() > deadline:
            raise AgentError(
                f"no agent answered at {directory / SOCKET} within "
                f"{config.agent.start_timeout_s:.0f} s; its log: {directory / LOG}"
            )
        if local_rank == 0:
            _start(agent_directory(root, config.runtime_dir), root, config)
        time.sleep(_RETRY_S)


def _start(directory: Path, root: str, config: Config) -> None:
    """Return when an agent listens in `directory` (or another is about to, or leaving).

    It has a session of its own and no parent, so it survives whatever ends the trainers.

    Raises:
        AgentError: it could not be started; the message holds the last line it said.
    """
    # The variables of a torchrun worker must not make the agent look like one (and tools that
    # hook workers must not load torch into it).
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("LOCAL_RANK", "RANK") and not name.startswith("TORCHELASTIC_")
    }
    package_parent = str(Path(megatron_flashckpt.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (package_parent, os.environ.get("PYTHONPATH")))
    )
    command = [
        *(sys.executable, "-m", "megatron_flashckpt.agent"),
        *("--directory", str(directory), "--root", root),
        *("--grace-s", str(config.agent.grace_s)),
        *("--persist-threads", str(config.agent.persist_threads)),
        *("--commit-timeout-s", str(config.agent.commit_timeout_s)),
    ]
    try:
        fd = os.open(directory / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return  # an agent has just left, directory and all: the caller tries again
    with open(fd, "ab") as log:
        status = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            cwd="/",
            check=False,
        ).returncode
    if status:
        lines = (directory / LOG).read_text(errors="replace").splitlines()
        raise AgentError(
            f"the agent ended with status {status}: {lines[-1] if lines else 'no output'}; "
            f"its log: {directory / LOG}"
        )
