"""Starts the agent of a node, and ends one that holds the lock but does not answer."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from pathlib import Path

from megatron_flashckpt.agent import process
from megatron_flashckpt.agent.endings import why_not_started
from megatron_flashckpt.agent.run_messages import describe_slabs
from megatron_flashckpt.agent.silent_agent import last_copies, loss_with
from megatron_flashckpt.agent.socket_dir import LOCK, LOG, holder, open_log
from megatron_flashckpt.config import Config
from megatron_flashckpt.error_classes import class_of
from megatron_flashckpt.errors import AgentError

logger = logging.getLogger(__name__)

#: Seconds between two checks of the lock's holder.
_PROBE_S = 0.5
#: Longest wait for an agent that moves: its looks at the directory and at its own files.
_MOVE_S = 8.0
_MOVE_PAUSE_S = 0.1
_PROC = Path("/proc")


class SilentHolder:
    """Ends an agent that holds the lock of its directory but has no reachable socket.

    An agent restores its socket within a second or two. An agent that does not is stopped or hangs.
    """

    def __init__(self, patience_s: float, last_copies_s: float) -> None:
        """Wait `patience_s`, and `last_copies_s` more if memory would be lost with the agent."""
        self._patience_s = patience_s
        self._last_copies_s = last_copies_s
        self.holds_last_copies = False
        """True while an agent is spared because only it holds memory of dead ranks."""
        self._pid: int | None = None
        self._since = 0.0
        self._looked_at = -_PROBE_S

    def may_start(self, directory: Path) -> bool:
        """Return whether an agent can be started; kill a holder that has been silent for long."""
        now = time.monotonic()
        if now - self._looked_at < _PROBE_S:
            return self._pid is None
        self._looked_at = now  # rarely, because a check blocks the lock for a moment
        pid = holder(directory)
        if pid is None or pid != self._pid:
            self._pid, self._since, self.holds_last_copies = pid, now, False
        elif now - self._since > self._patience_s:
            self._since = now
            held = f"{directory / LOCK}: is held by process {pid or '?'}, which has no socket there"
            if not pid or not _is_agent_of(pid, directory):
                logger.error("%s and is not visible here; end it on this node", held)
                return False
            slabs = () if self.holds_last_copies else last_copies(pid)
            if slabs:
                self.holds_last_copies = True
                self._since = now + self._last_copies_s - self._patience_s
                logger.warning(
                    "%s; it gets %g s more, because only it holds %s",
                    *(held, self._last_copies_s, describe_slabs(slabs)),
                )
                return False
            self.holds_last_copies = False
            logger.error("%s: killed%s", held, loss_with(pid))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return self._pid is None


class MovingAgent:
    """Waits for an agent with last copies whose directory had another identity: before a remount.

    Such an agent finds its claim in the directory and moves to where trainers look.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._until = time.monotonic() + _MOVE_S

    def is_expected(self, directory: Path) -> bool:
        """Return whether to wait for such an agent, after a pause, instead of starting another.

        Args:
            directory: where this process looks for its agent.
        """
        agents = [pid for pid in _agents_at(self._root, directory.parent) if last_copies(pid)]
        if not agents or time.monotonic() > self._until:
            for pid in agents:
                logger.warning(
                    "agent %d of this node holds %s of another directory that was at %s; this job "
                    "does not use that memory, which the agent frees after 'agent.grace_s': end "
                    "the agent to free it now",
                    *(pid, describe_slabs(last_copies(pid)), self._root),
                )
            return False
        time.sleep(_MOVE_PAUSE_S)
        return True


def _agents_at(root: str, base: Path) -> list[int]:
    """Return the agents below `base` that serve, or served, a save directory at `root`."""
    commands = {int(entry.name): _command(int(entry.name)) for entry in _PROC.glob("[0-9]*")}
    return [
        pid
        for pid, words in commands.items()
        if _is_agent(words)
        and os.fsencode(root) in words
        and any(word.startswith(os.fsencode(base) + b"/") for word in words)
    ]


def _command(pid: int) -> list[bytes]:
    """Return the command line of a process; empty if it has ended."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _is_agent(command: list[bytes]) -> bool:
    return b"megatron_flashckpt.agent" in command


def _is_agent_of(pid: int, directory: Path) -> bool:
    words = _command(pid)
    # An agent may have moved, but the name of its directory stays the same.
    of_directory = any(word.endswith(b"/" + os.fsencode(directory.name)) for word in words)
    return _is_agent(words) and of_directory


def start_agent(directory: Path, root: str, config: Config) -> None:
    """Return when an agent listens in `directory` (or another one is starting or leaving there).

    The agent has a session of its own and no parent, so it survives the trainers. Its Slurm step,
    container or systemd unit still ends it: see `agent/life.py`.

    Raises:
        AgentError: the agent could not be started; the message has its last log line.
    """
    try:
        fd = open_log(directory)
    except FileNotFoundError:
        return  # an agent has just left and removed the directory: the caller tries again
    with open(fd, "ab") as log:
        begun = log.tell()
        try:
            status = subprocess.run(
                process.command(directory, root, config),
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
        raise AgentError(why_not_started(status, directory / LOG, begun))
