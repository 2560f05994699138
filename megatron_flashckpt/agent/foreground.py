"""`flashckpt agent --foreground`: an agent that is started on its own, without a trainer.

The agent runs as a Slurm step, a systemd unit or a sidecar container, so it survives the end of the
trainers' step, unit or container. When all trainers have ended as planned, it frees their memory
and waits for new ones.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from types import FrameType
from typing import NoReturn

from megatron_flashckpt import failpoints
from megatron_flashckpt.agent import frames, process
from megatron_flashckpt.agent.log import (
    BriefFormatter,
    ThreadedHandler,
    last_lines,
    write_to_stderr,
)
from megatron_flashckpt.agent.reception import raise_limit
from megatron_flashckpt.agent.save_directory import ensure
from megatron_flashckpt.agent.server import Agent
from megatron_flashckpt.agent.socket_dir import SOCKET, agent_directory, holder, leave, open_log
from megatron_flashckpt.agent.state import AgentOptions
from megatron_flashckpt.agent.upkeep import Upkeep
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import AgentError

logger = logging.getLogger(__name__)

_RETRY_S = 0.05
#: Attempts to enter a directory that a former agent is removing.
_ATTEMPTS = 100


def become(root: str, config: Config) -> NoReturn:
    """Turn this process into the agent for save directory `root`.

    Raises:
        AgentError: another agent serves `root` on this node, or a directory cannot be used.
    """
    root = os.path.abspath(root)
    try:
        os.makedirs(root, exist_ok=True)
    except OSError as error:
        raise AgentError(
            f"{root}: cannot be created ({error.strerror}); name the save directory of the job, "
            "as Megatron's --save"
        ) from error
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise AgentError(
            f"{root}: cannot be written by user {os.getuid()}; mount it writable, or run the "
            "agent as the user of the job"
        )
    directory = agent_directory(root, config.runtime_dir)
    if pid := holder(directory):
        raise AgentError(_refusal(pid, root))
    command = [*process.command(directory, root, config), "--foreground"]
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
        directory = agent_directory(os.path.abspath(root), config.runtime_dir)
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock,
            contextlib.suppress(OSError),
        ):
            sock.connect(str(directory / SOCKET))
            return frames.peer(sock).pid
        if time.monotonic() > deadline:
            leave(directory, config.runtime_dir)
            raise AgentError(
                f"no agent for {root} answered on this node within "
                f"{config.agent.start_timeout_s:g} s; look at the output of 'flashckpt agent "
                f"--foreground', or raise 'agent.start_timeout_s'"
            )
        time.sleep(_RETRY_S)


def serve(runtime_dir: str | None, options: AgentOptions) -> int:
    """Serve trainers until SIGTERM, Ctrl-C or the end of the grace time; return the exit status."""
    try:
        upkeep, log = _enter(options.root, runtime_dir)
    except AgentError as error:
        print(f"flashckpt: {error}", file=sys.stderr)
        return 1
    to_stderr = ThreadedHandler("stderr", write_to_stderr)
    handlers = [logging.StreamHandler(log), to_stderr]
    for handler in handlers:
        handler.setFormatter(BriefFormatter())
    logging.basicConfig(level=logging.INFO, handlers=handlers)
    for ignored in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    failpoints.set_process_name("agent")
    raise_limit()
    own = process.AgentProcess(options)
    agents = _SuccessiveAgents(upkeep, options, own)
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
    upkeep.leave(keep_log=to_stderr.error_seen)
    last_lines()
    # `os._exit` ends the threads, for which the interpreter would wait.
    os._exit(0 if clean else 1)


def _refusal(pid: int, root: str) -> str:
    return (
        f"agent {pid} serves {root} on this node already; trainers join that agent. To replace it, "
        f"end it first ('kill {pid}'): it finishes its staged saves"
    )


def _enter(root: str, runtime_dir: str | None) -> tuple[Upkeep, _Log]:
    """Return the lock of the agent's directory, and the log in it.

    Raises:
        AgentError: another agent holds the lock, or the directory cannot be used.
    """
    for _ in range(_ATTEMPTS):
        directory = agent_directory(root, runtime_dir)
        try:
            fd = open_log(directory)
        except FileNotFoundError:
            continue
        try:
            upkeep = Upkeep(directory, runtime_dir, (fd,))
            if upkeep.writes_log:
                return upkeep, _Log(fd)
            upkeep.leave(keep_log=True)
        except BlockingIOError as error:
            if pid := holder(directory):  # 0: the holder has not written its pid yet
                os.close(fd)
                raise AgentError(_refusal(pid, root)) from error
        except FileNotFoundError:
            pass  # an agent has just left and removed the directory
        os.close(fd)
        time.sleep(_RETRY_S)
    raise AgentError(
        f"{directory}: other agents start and end there all the time; end whatever starts them"
    )


class _Log:
    """Writes to a descriptor that `Upkeep` may redirect to a new file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, text: str) -> None:
        os.write(self._fd, text.encode(errors="backslashreplace"))

    def flush(self) -> None:
        """Do nothing: `write` does not buffer."""


class _SuccessiveAgents:
    """Agents one after the other: a new one when all trainers have ended as planned."""

    def __init__(self, upkeep: Upkeep, options: AgentOptions, own: process.AgentProcess) -> None:
        self._upkeep = upkeep
        self._options = options
        self._own = own
        self._is_ending = False
        self._agent = self._new()

    def _new(self) -> Agent:
        return Agent(self._upkeep, self._options, self._own, unclaimed_s=self._options.grace_s)

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
            self._agent = self._new()
            if self._is_ending:  # a signal that the former agent got
                return True
