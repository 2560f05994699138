"""The way of a rank to its node's agent: find the agent, wait for it, or start one."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

from megatron_flashckpt import forks
from megatron_flashckpt.agent import process
from megatron_flashckpt.agent.client import AgentClient, ClosedError, close_socket
from megatron_flashckpt.agent.held_directory import ensure, identity_of
from megatron_flashckpt.agent.place import Place, place_of
from megatron_flashckpt.agent.run_messages import describe_slabs
from megatron_flashckpt.agent.settings import settings_of
from megatron_flashckpt.agent.silent_agent import KILLED, last_copies
from megatron_flashckpt.config import Config
from megatron_flashckpt.error_classes import class_of
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.storage.opening import is_url

logger = logging.getLogger(__name__)

_RETRY_S = 0.02
#: Longest wait for an agent that moves: it looks at the directory every 2 s.
_MOVE_S = 8.0
_MOVE_PAUSE_S = 0.1


def connect(
    root: str, rank: int, local_rank: int, config: Config, closed: threading.Event
) -> AgentClient:
    """Return a connection to the node's agent for save directory `root`.

    The first rank of the node starts the agent if there is none; the other ranks wait for the
    agent.

    Args:
        closed: ends the wait; set by another thread when nobody needs the connection any more.

    Raises:
        AgentError: the agent did not answer in time, another user has taken its name, or `closed`
            was set.
    """
    start_s = config.agent.start_timeout_s
    deadline = time.monotonic() + start_s
    moves_until = time.monotonic() + _MOVE_S
    ensure(root)
    while True:
        place = place_of(root, config.runtime_dir)
        sock, began = _new_socket(), time.monotonic()
        try:
            place.connect(sock)
            client = AgentClient(sock, rank, place.log, config.agent, identity_of(root))
            of_stores = process.of_stores(os.environ) if is_url(root) else None
            client.configure(settings_of(config), of_stores)
            return client
        except (ConnectionRefusedError, ConnectionResetError, ClosedError) as error:
            # Start over, also if an agent has just left. A refusal (an agent of another release or
            # user) is final.
            close_socket(sock)
            if isinstance(error, ClosedError):
                # The wait for a silent agent, which this rank or another one has killed, does not
                # count: another agent has to be started.
                now = time.monotonic()
                deadline = now + start_s if error.was_killed else deadline + now - began
        except BaseException:
            close_socket(sock)
            raise
        if time.monotonic() > deadline:
            raise AgentError(
                f"no agent answered at {place} within {start_s:.0f} s; its log: {place.log}; if "
                "the log has no reason, the node is slow: raise 'agent.start_timeout_s'; or "
                "another process keeps that name: set 'runtime_dir' to any other directory"
            )
        pause_s = _RETRY_S
        if local_rank == 0 and _moves_here(place, root, moves_until):
            pause_s = _MOVE_PAUSE_S
        elif local_rank == 0:
            _start_agent(place, root, config)
        refuse_closed(root, rank, closed.wait(pause_s))


def refuse_closed(root: str, rank: int, is_closed: bool) -> None:
    """Raise AgentError if a rank's connection `is_closed`: no other one may follow it."""
    if is_closed:
        raise AgentError(f"rank {rank}: this checkpointer for {root} was closed; make another")


def _new_socket() -> socket.socket:
    """Return a socket that forked children close, because they must not act for this rank.

    Raises:
        AgentError: this process has no descriptor left for it.
    """
    try:
        with forks.forks_blocked():
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            forks.close_in_children(sock)
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise AgentError(
            f"no socket for the agent of this node ({error.strerror}): this process may open "
            f"{limit} files; raise its limit ('ulimit -n')"
        ) from error
    return sock


def _moves_here(place: Place, root: str, until: float) -> bool:
    """Return whether to wait `_MOVE_PAUSE_S` for an agent instead of starting another.

    That agent has last copies, and its directory had another identity: before a remount. It finds
    the object of its run in the directory and moves to where trainers look.

    Args:
        place: where this process looks for its agent.
        until: end of the wait; `time.monotonic`.
    """
    agents = [pid for pid in place.agents_elsewhere() if last_copies(pid)]
    if not agents or time.monotonic() > until:
        for pid in agents:
            logger.warning(
                "agent %d of this node holds %s of another directory that was at %s; this job does "
                "not use that memory, which the agent frees after 'agent.grace_s': end the agent "
                "to free it now",
                *(pid, describe_slabs(last_copies(pid)), root),
            )
        return False
    return True


def _start_agent(place: Place, root: str, config: Config) -> None:
    """Return when an agent listens at `place` (or another one is starting or leaving there).

    The agent has a session of its own and no parent, so it survives the trainers. Its Slurm step,
    container or systemd unit still ends it: see `agent/life.py`.

    Raises:
        AgentError: the agent could not be started; the message has its last log line.
    """
    with open(place.open_log(), "ab") as log:
        begun = log.tell()
        try:
            status = subprocess.run(
                process.command(place, root, config),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=process.environment(os.environ, config.agent.environment),
                start_new_session=True,
                cwd="/",
                check=False,
            ).returncode
        except OSError as error:
            remedy = (
                "if this node has no process left, end others, or raise its limit ('ulimit -u', or "
                "that of the control group)"
            )
            if class_of(error).kind == "scarce":
                remedy = class_of(error).remedy
            raise AgentError(
                f"the agent could not be started ({error.strerror}); {remedy}"
            ) from error
    if status:
        raise AgentError(_why_not_started(status, place.log, begun))


def _why_not_started(status: int, log: Path, begun: int) -> str:
    """Return the reason why an agent did not start.

    Args:
        status: the agent's exit status; negative: the signal that ended it.
        log: the agent's log; its own lines begin at position `begun`.
    """
    try:
        lines = log.read_bytes()[begun:].decode(errors="replace").splitlines()
    except OSError:  # removed meanwhile
        lines = []
    if status > 0 and lines:
        return f"the agent ended with status {status}: {lines[-1]}; its log: {log}"
    cause = f"status {status}"
    if status < 0:
        with contextlib.suppress(ValueError):  # a signal without a name
            cause = signal.Signals(-status).name
    return f"the agent was ended by {cause} while it started and logged nothing to {log}; {KILLED}"
