"""Starts the agent of a node."""

from __future__ import annotations

import logging
import os
import subprocess
import time

from megatron_flashckpt.agent import process
from megatron_flashckpt.agent.endings import why_not_started
from megatron_flashckpt.agent.place import Place
from megatron_flashckpt.agent.run_messages import describe_slabs
from megatron_flashckpt.agent.silent_agent import last_copies
from megatron_flashckpt.config import Config
from megatron_flashckpt.error_classes import class_of
from megatron_flashckpt.errors import AgentError

logger = logging.getLogger(__name__)

#: Longest wait for an agent that moves: it looks at the directory every 2 s.
_MOVE_S = 8.0
MOVE_PAUSE_S = 0.1


class MovingAgent:
    """Waits for an agent with last copies whose directory had another identity: before a remount.

    Such an agent finds the object of its run in the directory and moves to where trainers look.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._until = time.monotonic() + _MOVE_S

    def is_expected(self, place: Place) -> bool:
        """Return whether to wait `MOVE_PAUSE_S` for such an agent instead of starting another.

        Args:
            place: where this process looks for its agent.
        """
        agents = [pid for pid in place.agents_elsewhere() if last_copies(pid)]
        if not agents or time.monotonic() > self._until:
            for pid in agents:
                logger.warning(
                    "agent %d of this node holds %s of another directory that was at %s; this job "
                    "does not use that memory, which the agent frees after 'agent.grace_s': end "
                    "the agent to free it now",
                    *(pid, describe_slabs(last_copies(pid)), self._root),
                )
            return False
        return True


def start_agent(place: Place, root: str, config: Config) -> None:
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
        raise AgentError(why_not_started(status, place.log, begun))
