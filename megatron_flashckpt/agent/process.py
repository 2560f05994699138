"""The agent's process: inherited settings that it keeps, and those that it resets.

A launcher binds each rank to some cores and to the memory next to them, and sets variables for its
GPU. The agent serves all ranks of the node and survives them, so it resets these bindings.
Otherwise its threads would share the cores of one rank and make that rank the job's straggler.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

import megatron_flashckpt
from megatron_flashckpt import cpu_list
from megatron_flashckpt.agent.place import Place
from megatron_flashckpt.agent.settings import AgentSettings, settings_of
from megatron_flashckpt.config import Config

logger = logging.getLogger(__name__)

#: Credentials and endpoints of object stores.
_OF_STORES = ("AWS_*", "GOOGLE_*", "AZURE_*", "MSC_*")
#: Environment variables that an agent inherits; `agent.environment` adds others. Paths of Python
#: packages include those of EasyBuild, Guix, Nix and conda. The job ids are for batch systems that
#: find the processes of a job by them.
_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "TMPDIR", "TMP", "TEMP", "XDG_*"),
    *("LANG", "LANGUAGE", "LC_*", "TZ", "TZDIR", "LOCPATH", "KRB5*", "FLASHCKPT_*"),
    *("LD_LIBRARY_PATH", "PYTHON*", "VIRTUAL_ENV", "CONDA_*", "GUIX_*", "NIX_*"),
    *("EBPYTHON*", "EBROOTPYTHON", "EBVERSIONPYTHON"),
    *("SLURM_*", "PBS_JOBID", "LSB_JOBID"),
    *_OF_STORES,
)
_SELF = Path("/proc/self")
_ALL_CPUS = Path("/sys/devices/system/cpu")
#: Value of the agent's `oom_score_adj` (range -1000 to 1000). The agent is spared while its slots
#: take less than half of the memory. The slots are shared with the trainers: killing the agent
#: would free nothing.
_OOM_SCORE_ADJ = -500
#: From linux/mempolicy.h, and the numbers of a system call that the C library does not wrap.
_MPOL_DEFAULT = 0
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
#: Unprivileged processes together may change such a priority once in 0.1 s.
_AUTOGROUP_ATTEMPTS = 10
_AUTOGROUP_S = 0.05


def environment(environ: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment for a new agent.

    Variables for GPUs, NCCL or OpenMP, of torchrun and of profilers are dropped: tools that hook
    workers must not load torch into the agent.

    Args:
        environ: environment of the process that starts the agent.
        more: names of further variables to pass on; `*` matches any characters.
    """
    kept = _matching(environ, (*_VARIABLES, *more))
    package_parent = str(Path(megatron_flashckpt.__file__).parents[1])
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (package_parent, environ.get("PYTHONPATH"))))
    return kept


def of_stores(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that say how to reach object stores."""
    return _matching(environ, _OF_STORES)


def replace_of_stores(new: Mapping[str, str]) -> bool:
    """Put `new` in the place of this process's `of_stores`; return whether that is a change."""
    former = of_stores(os.environ)
    for name in former.keys() - new.keys():
        del os.environ[name]
    os.environ.update(new)
    return former != new


def _matching(environ: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def command(place: Place, root: str, config: Config) -> list[str]:
    """Return the command that starts an agent with the settings of `config`."""
    return [
        *(sys.executable, "-m", "megatron_flashckpt.agent"),
        *("--key", place.key, "--root", root),
        *(("--runtime-dir", place.runtime_dir) if place.runtime_dir else ()),
        *("--settings", msgspec.json.encode(settings_of(config)).decode()),
    ]


class AgentProcess:
    """The agent's own process. Created before the process starts a thread or forks."""

    def __init__(self, settings: AgentSettings) -> None:
        """Reset inherited priority, memory policy and OOM score, then apply `settings`."""
        self._inherited = os.sched_getaffinity(0)
        #: True if the session was made for the agent; only then the agent may change its priority.
        self._has_session = os.getsid(0) == os.getpid()
        self._leave_real_time()
        _reset_memory_policy()
        self._oom_score_adj = _spare_from_oom(_SELF / "oom_score_adj")
        self._cpus, self._session_nice = "inherit", 0
        self.apply(settings)

    def apply(self, settings: AgentSettings) -> None:
        """Apply CPUs and priority from the settings of a run."""
        cpus = str(settings.cpus)
        if cpus != self._cpus:
            self._cpus = cpus
            self._place(cpus)
        if settings.session_nice != self._session_nice and self._has_session:
            self._session_nice = settings.session_nice
            _lower_session(settings.session_nice)

    def __str__(self) -> str:
        cpus = cpu_list.shown(os.sched_getaffinity(0))
        return (
            f"CPUs {cpus}, priority {os.getpriority(os.PRIO_PROCESS, 0)}, oom_score_adj "
            f"{self._oom_score_adj}"
        )

    @staticmethod
    def _leave_real_time() -> None:
        """Drop a raised or real-time priority that the starting rank has given itself."""
        if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        if os.getpriority(os.PRIO_PROCESS, 0) < 0:
            os.setpriority(os.PRIO_PROCESS, 0, 0)

    def _place(self, cpus: str) -> None:
        if cpus == "inherit":
            _move(self._inherited)
            return
        wanted = _machine() if cpus == "all" else cpu_list.parse(cpus)
        try:
            allowed = _move(wanted)
        except OSError as error:
            logger.warning(
                "agent.cpus %s: this process may run on none of these CPUs (%s); it stays on %s; "
                "name CPUs of the job",
                *(cpus, error.strerror, cpu_list.shown(os.sched_getaffinity(0))),
            )
            return
        if cpus != "all":
            if left_out := wanted - allowed:
                logger.warning(
                    "agent.cpus %s: this process may not run on %s; it runs on %s",
                    *(cpus, cpu_list.shown(left_out), cpu_list.shown(allowed)),
                )
            return
        own = _allotted(os.environ)
        if own is not None and own < len(allowed) and allowed != self._inherited:
            # No cpuset restricts the job to its CPUs; the remaining ones belong to other jobs.
            _move(self._inherited)
            logger.warning(
                "Slurm gave this job %d CPUs of this node and no cpuset; the agent may use %d and "
                "stays on those of the process that started it (%s); set 'agent.cpus' to the CPUs "
                "of the job",
                *(own, len(allowed), cpu_list.shown(self._inherited)),
            )


def _move(cpus: Iterable[int]) -> set[int]:
    """Run all threads on `cpus`, as far as the cpuset allows; return the allowed CPUs.

    Raises:
        OSError: the cpuset allows none of them.
    """
    os.sched_setaffinity(0, cpus)
    for task in (_SELF / "task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread has just ended
            os.sched_setaffinity(int(task.name), cpus)
    return os.sched_getaffinity(0)


def _machine() -> frozenset[int]:
    """Return all CPUs of the machine, except isolated ones."""
    possible = _listed(_ALL_CPUS / "possible") or frozenset(range(os.cpu_count() or 1))
    return possible - _listed(_ALL_CPUS / "isolated") or possible


def _listed(file: Path) -> frozenset[int]:
    try:
        return cpu_list.parse(file.read_text().strip())
    except (OSError, ValueError):  # also an empty list
        return frozenset()


def _allotted(environ: Mapping[str, str]) -> int | None:
    """Return the fewest CPUs that Slurm gave the job on one node; None without Slurm.

    The variable looks like `72(x2),36`.
    """
    counts = re.findall(r"(?:^|,)(\d+)", environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return min(map(int, counts), default=None)


def _lower_session(nice: int) -> None:
    """Lower the priority of all threads of this session against those of other sessions.

    Where the kernel groups processes by session (`kernel.sched_autogroup_enabled`), it shares CPUs
    between sessions first. Priorities of threads then count only within one session.
    """
    for _ in range(_AUTOGROUP_ATTEMPTS):
        try:
            (_SELF / "autogroup").write_text(f"{min(nice, 19)}")
        except BlockingIOError:
            time.sleep(_AUTOGROUP_S)
        except OSError:
            return  # no such groups: the priorities of threads count
        else:
            return


def _reset_memory_policy() -> None:
    """Allocate memory next to the CPU that requests it, not where the rank is bound to.

    Slabs keep the NUMA node that their trainer chose, because it belongs to the memory.
    """
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is not None:
        syscall = ctypes.CDLL(None).syscall
        syscall(ctypes.c_long(number), ctypes.c_int(_MPOL_DEFAULT), None, ctypes.c_ulong(0))


def _spare_from_oom(file: Path) -> int:
    """Make the kernel kill trainers first when memory is short; return the score in force.

    Without CAP_SYS_RESOURCE, a score can only be lowered to the value that a privileged process set
    last. The kernel does not report that value, so a search finds it.
    """
    try:
        highest = int(file.read_text())
    except (OSError, ValueError):
        return 0
    lowest = _OOM_SCORE_ADJ
    attempt = lowest
    while lowest < highest:
        try:
            file.write_text(f"{attempt}")
        except OSError:
            lowest = attempt + 1
        else:
            highest = attempt
        attempt = (lowest + highest) // 2
    return highest
