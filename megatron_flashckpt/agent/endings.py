"""Messages about the end of an agent, for trainers."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

#: Cause and remedy if an agent ended without logging a reason.
KILLED = (
    "it was killed: by the kernel, if the node or a control group lacked memory (see dmesg; lower "
    "'slots' or give the job more memory), or by a scheduler that ends all processes of a job"
)


def clock(after_s: float) -> str:
    """Return the local time in `after_s` seconds, with the date if that is not today."""
    now = time.time()
    then, today = time.localtime(now + after_s), time.localtime(now)
    is_today = then[:3] == today[:3]
    return time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", then)


def why_not_started(status: int, log: Path, begun: int) -> str:
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
