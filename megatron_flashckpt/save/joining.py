"""The lines that rank 0 prints about the agent that it has joined, and about what ends it."""

from __future__ import annotations

import time

from megatron_flashckpt.agent.life import AgentFacts, EnclosingUnit, own_unit
from megatron_flashckpt.save.save_reports import say

#: Pid and start time of the announced agents. Megatron's last save joins an agent a second time.
_announced: set[tuple[int, float]] = set()
_COMMAND = "flashckpt agent --save {} --foreground"
_REMEDIES = {
    "Slurm step": "a later step finds the memory if 'srun --overlap " + _COMMAND + "' runs in a "
    "step of its own",
    "container": "a later container finds the memory if '" + _COMMAND + "' runs in a container of "
    "its own on this node (a sidecar)",
    "systemd unit": "a later start finds the memory if '" + _COMMAND + "' runs in a unit of its "
    "own",
}


def announce(pid: int, facts: AgentFacts, root: str) -> None:
    """Print the age and contents of the agent that this rank has joined, once per agent."""
    if (pid, facts.started_at) in _announced:
        return
    _announced.add((pid, facts.started_at))
    for line in lines(pid, facts, own_unit(), root):
        say(0, line)


def lines(pid: int, facts: AgentFacts, own: EnclosingUnit, root: str) -> list[str]:
    """Return the lines; the second line only if the agent ends together with the ranks.

    Args:
        own: the container, unit or job step that ends this rank's process.
    """
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts.started_at))
    plural = "s" if len(facts.iterations) > 1 else ""
    numbers = ", ".join(map(str, facts.iterations))
    held = f"iteration{plural} {numbers}" if facts.iterations else "no checkpoint"
    place = ""
    if facts.foreground:
        place = f", a foreground one{f' in {facts.life}' if facts.life.kind else ''},"
    printed = [f"agent {pid} of this node{place} has run since {since}; its memory holds {held}"]
    if facts.life.kind and facts.life == own:
        remedy = _REMEDIES[facts.life.kind].format(root)
        printed.append(
            f"agent {pid} ends with the {facts.life} that this rank runs in, and its memory is "
            f"freed then: {remedy}"
        )
    return printed
