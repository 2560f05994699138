"""Lifetime of an agent: its Slurm step, container or systemd unit ends it.

An agent that a trainer started runs in the trainer's step, container or unit. A session of its own
does not protect it, because steps and units are ended by control group.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

#: PROC_PID_INIT_INO of Linux: the machine's own pid namespace.
_PIDS_OF_MACHINE = 0xEFFFFFFC
#: Paths of slurmstepd: `proctrack/cgroup` ends a step by its freezer (version 1), or by its only
#: cgroup (version 2). Other plugins of Slurm use the other controllers and end no processes.
_STEP = re.compile(r"/job_(\d+)/step_(\w+)")
_CONTAINER = re.compile(r"/(docker|libpod|crio|cri-containerd|containerd|kubepods|lxc|ecs)\b")
_UNIT = re.compile(r"/([^/]+\.service)(?:/|$)")
#: slurmd's unit has KillMode=process: stopping the unit does not end the processes of jobs.
_SPARING = {"slurmd.service"}


class EnclosingUnit(msgspec.Struct, frozen=True):
    """The smallest unit whose end also ends this process."""

    kind: str = ""
    """`Slurm step`, `container` or `systemd unit`; empty: only a signal ends the process."""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class AgentFacts(msgspec.Struct, frozen=True):
    """Facts about an agent that it reports to trainers when they connect."""

    started_at: float
    """Seconds since 1970."""
    foreground: bool
    """True: `flashckpt agent --foreground`; False: a trainer started the agent."""
    life: EnclosingUnit
    iterations: tuple[int, ...] = ()
    """Iterations of the complete checkpoints in its memory, oldest first."""
    run_number: int = 0
    """The highest number of a run that it knows, by its trainers or from its memory; 0: none."""


def own_unit() -> EnclosingUnit:
    """Return the unit that ends this process."""
    try:
        cgroups = Path("/proc/self/cgroup").read_text(errors="surrogateescape")
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return EnclosingUnit()
    return unit_of(cgroups, namespace, os.environ)


def unit_of(cgroups: str, pid_namespace: int, environ: Mapping[str, str]) -> EnclosingUnit:
    """Return the unit that ends a process.

    Args:
        cgroups: text of its `/proc/PID/cgroup`.
        pid_namespace: inode of its pid namespace, which ends with its first process.
        environ: its environment.
    """
    paths: dict[str, str] = {}
    for line in cgroups.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        paths.update(dict.fromkeys(controllers.split(","), path))
    for path in (paths.get("freezer", ""), paths.get("", "")):
        if step := _STEP.search(path):
            return EnclosingUnit("Slurm step", f"{step[1]}.{step[2]}")
    if pid_namespace != _PIDS_OF_MACHINE:
        return EnclosingUnit("container", environ.get("HOSTNAME") or f"pid:[{pid_namespace}]")
    for path in paths.values():
        if _CONTAINER.search(path):
            return EnclosingUnit("container", path.rpartition("/")[2][:80])
    for path in (paths.get("name=systemd", ""), paths.get("", "")):
        units = [unit for unit in _UNIT.findall(path) if unit not in _SPARING]
        if units:
            return EnclosingUnit("systemd unit", units[-1])
    return EnclosingUnit()


def clock(after_s: float) -> str:
    """Return the local time in `after_s` seconds, with the date if that is not today."""
    now = time.time()
    then, today = time.localtime(now + after_s), time.localtime(now)
    is_today = then[:3] == today[:3]
    return time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", then)
