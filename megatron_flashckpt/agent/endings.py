"""Why an agent is gone, as far as a trainer can tell."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

#: The cause and the remedy where an agent had no time to give a reason.
KILLED = (
    "somebody killed it: the kernel, if the node or a control group lacked memory (dmesg tells; "
    "lower 'slots' or give the job more memory), or a scheduler that ends all processes of a job"
)


def why_not_started(status: int, log: Path, begun: int) -> str:
    """Return why an agent did not start.

    Args:
        status: that it ended with; negative: the signal that ended it.
        log: what it has written into, from position `begun` on.
    """
    try:
        lines = log.read_bytes()[begun:].decode(errors="replace").splitlines()
    except OSError:  # removed meanwhile
        lines = []
    if status > 0 and lines:
        return f"the agent ended with status {status}: {lines[-1]}; its log: {log}"
    how = f"status {status}"
    if status < 0:
        with contextlib.suppress(ValueError):  # a signal without a name
            how = signal.Signals(-status).name
    return f"the agent was ended by {how} while it started, without a word in {log}; {KILLED}"
