"""What ends an agent: a Slurm step, a container or a systemd unit takes all of its processes along.

An agent that a trainer started lives in the trainer's step, container or unit. A session of its own
does not help there: those who end a step or a unit look for its processes by control group.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

#: PROC_PID_INIT_INO of Linux: the pid namespace of the machine, which is no container's.
_PIDS_OF_MACHINE = 0xEFFFFFFC
#: With the cgroup of slurmstepd: `proctrack/cgroup` ends a step by its freezer (version 1), or by
#: its only cgroup (version 2). Other plugins of Slurm use the other controllers, and end nothing.
_STEP = re.compile(r"/job_(\d+)/step_(\w+)")
_CONTAINER = re.compile(r"/(docker|libpod|crio|cri-containerd|containerd|kubepods|lxc|ecs)\b")
_UNIT = re.compile(r"/([^/]+\.service)(?:/|$)")
#: slurmd's unit has KillMode=process: stopping it does not end what its jobs started.
_SPARING = {"slurmd.service"}


class Life(msgspec.Struct, frozen=True):
    """The smallest thing that ends a process of ours when it ends itself."""

    kind: str = ""
    """`Slurm step`, `container` or `systemd unit`; empty: none, so only a signal ends it."""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class AgentFacts(msgspec.Struct, frozen=True):
    """What an agent tells of itself to those who join it."""

    started_at: float
    """Seconds since 1970."""
    foreground: bool
    """True: `flashckpt agent --foreground`; else a trainer started it."""
    life: Life
    iterations: tuple[int, ...] = ()
    """Of the complete checkpoints in its memory, oldest first."""


def own_life() -> Life:
    """Return what this process is bound to."""
    try:
        cgroups = Path("/proc/self/cgroup").read_text()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return Life()
    return life_of(cgroups, namespace, os.environ)


def life_of(cgroups: str, pid_namespace: int, environ: Mapping[str, str]) -> Life:
    """Return what a process is bound to.

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
            return Life("Slurm step", f"{step[1]}.{step[2]}")
    if pid_namespace != _PIDS_OF_MACHINE:
        return Life("container", environ.get("HOSTNAME") or f"pid:[{pid_namespace}]")
    for path in paths.values():
        if _CONTAINER.search(path):
            return Life("container", path.rpartition("/")[2][:80])
    for path in (paths.get("name=systemd", ""), paths.get("", "")):
        units = [unit for unit in _UNIT.findall(path) if unit not in _SPARING]
        if units:
            return Life("systemd unit", units[-1])
    return Life()
