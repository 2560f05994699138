"""The way of a rank to its node's agent: find the agent, wait for it, or start one."""

from __future__ import annotations

import resource
import socket
import time

from megatron_flashckpt import forks
from megatron_flashckpt.agent.client import AgentClient, ClosedError, close_socket
from megatron_flashckpt.agent.launcher import MOVE_PAUSE_S, MovingAgent, start_agent
from megatron_flashckpt.agent.place import place_of
from megatron_flashckpt.agent.save_directory import ensure, identity_of
from megatron_flashckpt.agent.settings import settings_of
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import AgentError

_RETRY_S = 0.02


def connect(root: str, rank: int, local_rank: int, config: Config) -> AgentClient:
    """Return a connection to the node's agent for save directory `root`.

    The first rank of the node starts the agent if there is none; the other ranks wait for the
    agent.

    Raises:
        AgentError: the agent did not answer in time, or another user has taken its name.
    """
    start_s = config.agent.start_timeout_s
    deadline = time.monotonic() + start_s
    moving = MovingAgent(root)
    ensure(root)
    while True:
        place = place_of(root, config.runtime_dir)
        sock, began = _new_socket(), time.monotonic()
        try:
            place.connect(sock)
            client = AgentClient(sock, rank, place.log, config.agent, identity_of(root))
            client.configure(settings_of(config))
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
        if local_rank == 0 and moving.is_expected(place):
            pause_s = MOVE_PAUSE_S
        elif local_rank == 0:
            start_agent(place, root, config)
        time.sleep(pause_s)


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
