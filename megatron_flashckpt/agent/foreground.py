"""`flashckpt agent --foreground`: an agent that is started on its own, without a trainer.

The agent runs as a Slurm step, a systemd unit or a sidecar container, so it survives the end of the
trainers' step, unit or container. When all trainers have ended as planned, it frees their memory
and waits for new ones.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

from megatron_flashckpt import failpoints
from megatron_flashckpt.agent import log, process
from megatron_flashckpt.agent.held_directory import ensure, make
from megatron_flashckpt.agent.node import AgentOptions
from megatron_flashckpt.agent.place import AgentSocket, Place, PlaceTakenError, place_of
from megatron_flashckpt.agent.reception import raise_limit
from megatron_flashckpt.agent.server import Agent
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.storage.opening import absolute, is_url

logger = logging.getLogger(__name__)

_RETRY_S = 0.05
#: Attempts to take the name of an agent that ends.
_ATTEMPTS = 100


def become(root: str, config: Config) -> NoReturn:
    """Turn this process into the agent for save directory `root`.

    Raises:
        AgentError: another agent serves `root` on this node, or a directory cannot be used.
    """
    root = absolute(root)
    try:
        make(root)
    except OSError as error:
        raise AgentError(
            f"{root}: cannot be created ({error.strerror}); name the save directory of the job, "
            "as Megatron's --save"
        ) from error
    if not is_url(root) and not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise AgentError(
            f"{root}: cannot be written by user {os.getuid()}; mount it writable, or run the "
            "agent as the user of the job"
        )
    place = place_of(root, config.runtime_dir)
    place.prepare()
    if (agent := place.listener()) is not None:
        raise AgentError(_refusal(agent.pid, root))
    command = [*process.command(place, root, config), "--foreground"]
    # Leave the working directory, so that its file system can be unmounted.
    os.chdir("/")
    os.execve(command[0], command, process.environment(os.environ, config.agent.environment))


def wait_for_agent(root: str, config: Config) -> int:
    """Return the pid of this node's agent for `root`, as soon as it answers; 0 if not visible.

    Raises:
        AgentError: no agent answered within `agent.start_timeout_s`.
    """
    ensure(root)
    deadline = time.monotonic() + config.agent.start_timeout_s
    while True:
        agent = place_of(absolute(root), config.runtime_dir).listener()
        if agent is not None:
            return agent.pid
        if time.monotonic() > deadline:
            raise AgentError(
                f"no agent for {root} answered on this node within "
                f"{config.agent.start_timeout_s:g} s; look at the output of 'flashckpt agent "
                f"--foreground', or raise 'agent.start_timeout_s'"
            )
        time.sleep(_RETRY_S)


def serve(place: Place, options: AgentOptions) -> int:
    """Serve trainers until SIGTERM, Ctrl-C or the end of the grace time; return the exit status."""
    try:
        listener = _enter(place, options.root)
        file = open(place.open_log(), "a", errors="backslashreplace")  # noqa: SIM115, until the end
    except AgentError as error:
        print(f"flashckpt: {error}", file=sys.stderr)
        return 1
    to_stderr = log.ThreadedHandler("stderr", log.write_to_stderr)
    errors = log.begin(logging.StreamHandler(file), to_stderr)
    for ignored in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    failpoints.set_process_name("agent")
    raise_limit()
    own = process.AgentProcess(options)
    agents = _SuccessiveAgents(listener, options, own)
    for ending_signal in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending_signal, agents.end_soon)
    logger.info(
        "agent %d serves %s until SIGTERM, or %g s without trainers",
        os.getpid(),
        options.root,
        options.grace_s,
    )
    logger.info("this process has %s", own)
    clean = agents.serve()
    logger.info("agent %d ends%s", os.getpid(), "" if clean else ": a save is not in storage")
    listener.leave(keep_log=errors.seen)
    log.last_lines()
    # `os._exit` ends the threads, for which the interpreter would wait.
    os._exit(0 if clean else 1)


def _refusal(pid: int, root: str) -> str:
    return (
        f"agent {pid} serves {root} on this node already; trainers join that agent. To replace it, "
        f"end it first ('kill {pid}'): it finishes its staged saves"
    )


def _enter(place: Place, root: str) -> AgentSocket:
    """Take the agent's name, and listen.

    Raises:
        AgentError: another agent has the name.
    """
    for _ in range(_ATTEMPTS):
        try:
            listener = AgentSocket(place)
        except PlaceTakenError as error:
            if (agent := place.listener()) is not None:
                raise AgentError(_refusal(agent.pid, root)) from error
        else:
            listener.listen()
            return listener
        time.sleep(_RETRY_S)
    raise AgentError(
        f"{place}: another process has the name of the agent's socket and does not listen; end it, "
        "or set 'runtime_dir' to any other directory, which changes the name"
    )


class _SuccessiveAgents:
    """Agents one after the other: a new one when all trainers have ended as planned."""

    def __init__(
        self, listener: AgentSocket, options: AgentOptions, own: process.AgentProcess
    ) -> None:
        self._listener = listener
        self._options = options
        self._own = own
        self._is_ending = False
        self._agent = Agent(self._listener, self._options, self._own)

    def end_soon(self, number: int, _: FrameType | None) -> None:
        """Make `serve` return; the signal handler."""
        self._is_ending = True
        self._agent.end_soon()

    def serve(self) -> bool:
        """Serve until the agent is to end; return whether all staged saves are in storage."""
        while True:
            self._agent.serve()
            if self._is_ending or not self._agent.all_left:
                return not self._agent.unfinished
            logger.info("all trainers have left: their memory is freed; waiting for new trainers")
            self._agent = Agent(self._listener, self._options, self._own)
            if self._is_ending:  # a signal that the former agent got
                return True
