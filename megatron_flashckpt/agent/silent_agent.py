"""An agent that does not answer: how long it gets, and what is lost with it.

The slab of a living rank survives its agent: the rank hands it to the next one. The slabs of dead
ranks are in the agent only. A node that thrashes after an out-of-memory kill may keep its agent
from answering for a minute. So an agent that holds the last copy of a checkpoint gets more time.
The kernel shows who holds which memory without an answer of the agent.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import signal
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_flashckpt.agent import frames
from megatron_flashckpt.agent.run_messages import HeldSlab, describe_slabs
from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.memory.reservations import slab_descriptors
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import COMPLETE, SlotState

logger = logging.getLogger(__name__)

#: Wait for an agent with the last copy of a checkpoint, in units of `agent.start_timeout_s`.
LAST_COPIES_FACTOR = 10
#: Parts into which a wait for an answer is divided; see `_answers_within`.
_PATIENCE_PARTS = 10
#: Cause and remedy if an agent ended without logging a reason.
KILLED = (
    "it was killed: by the kernel, if the node or a control group lacked memory (see dmesg; lower "
    "'slots' or give the job more memory), or by a scheduler that ends all processes of a job"
)


def last_copies(pid: int) -> tuple[HeldSlab, ...]:
    """Return the slabs with a checkpoint that only process `pid` holds, in order of ranks.

    Takes a look at the descriptors of all processes of this user. Never raises.
    """
    holders = collections.defaultdict[tuple[int, int], dict[int, tuple[str, str]]](dict)
    for slab in slab_descriptors():
        holders[slab.identity][slab.pid] = (slab.path, slab.rank)
    last = [by_pid[pid] for by_pid in holders.values() if by_pid.keys() == {pid}]
    return tuple(sorted(_with_checkpoint(last), key=lambda slab: slab.rank))


def _with_checkpoint(slabs: Iterable[tuple[str, str]]) -> Iterator[HeldSlab]:
    """Return the slabs, by path in /proc and rank, that hold a checkpoint."""
    for path, rank in slabs:
        try:
            slab = Slab.attach(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except (OSError, FlashCkptError):  # closed meanwhile, or no slab yet
            continue
        headers = [slot.header for slot in slab.slots if slot.header.state in COMPLETE]
        slab.close()
        newest = max(headers, key=lambda header: header.iteration, default=None)
        # Storage has a durable checkpoint, so it is not lost with the agent.
        if newest is not None and newest.state != SlotState.DURABLE and rank.isdigit():
            yield HeldSlab(
                int(rank),
                slab.geometry.nbytes,
                newest.iteration,
                durable=False,
                departed=False,
                in_use=False,
            )


def await_answer(sock: socket.socket, wait_s: float, last_copies_s: float) -> None:
    """Return when an answer of an agent begins to arrive.

    Args:
        wait_s: longest wait.
        last_copies_s: further wait for an agent with the last copy of a checkpoint.

    Raises:
        TimeoutError: there is no answer in time.
    """
    if _answers_within(sock, wait_s):
        return
    pid = frames.peer(sock).pid
    if slabs := last_copies(pid):
        logger.warning(
            "agent %d has not answered for %g s; it gets %g s more, because only it holds %s",
            *(pid, wait_s, last_copies_s, describe_slabs(slabs)),
        )
        if _answers_within(sock, last_copies_s):
            return
    raise TimeoutError


def _answers_within(sock: socket.socket, wait_s: float) -> bool:
    """Return whether an answer begins to arrive in time.

    The wait is divided into small parts: a job that was suspended with its agent wakes up with its
    time spent, and the agent needs time to answer then.
    """
    poll = select.poll()  # `select` is limited to descriptors below 1024
    poll.register(sock, select.POLLIN)
    return any(poll.poll(1000 * wait_s / _PATIENCE_PARTS) for _ in range(_PATIENCE_PARTS))


def runs(pid: int) -> bool:
    """Return whether a process runs; one that is exiting has no command line any more."""
    try:
        return pid > 0 and bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def end_agent(sock: socket.socket, answer_s: float) -> None:
    """Kill the agent, which did not answer within `answer_s`."""
    pid = frames.peer(sock).pid
    if pid > 0:  # 0: the agent runs in a pid namespace that is not visible here
        slabs = last_copies(pid)
        loss = f"; lost with it: {describe_slabs(slabs)}" if slabs else ""
        logger.error("agent %d did not answer within %g s: killed%s", pid, answer_s, loss)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
