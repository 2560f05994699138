"""Facts about a check: the card, the versions, the commit and the machine."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import tempfile
from pathlib import Path

from tools.gpu_check.forkserver import ROOT

_OF_GPU = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current"
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex", "numpy", "msgspec", "xxhash")
_FILES = {
    "huge pages": "/sys/kernel/mm/transparent_hugepage/enabled",
    "huge pages of shared memory": "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "memory limit of the cgroup": "/sys/fs/cgroup/memory.max",
    "NUMA nodes": "/sys/devices/system/node/online",
}


def about(commit: str | None) -> dict[str, str]:
    """Return facts about this machine by their names. Starts neither torch nor CUDA.

    Args:
        commit: name of the checked commit; None: ask git.
    """
    return {
        "GPU, driver, memory, PCIe generation and lanes": _gpus(),
        "versions": ", ".join(
            (f"Python {platform.python_version()}", *filter(None, map(_version, _PACKAGES)))
        ),
        "megatron_flashckpt": f"{_version('megatron-flashckpt') or _source_version()}, "
        f"commit {commit or _commit()}",
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        "machine": f"kernel {platform.release()}, {len(os.sched_getaffinity(0))} CPUs, "
        f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB memory, "
        f"{shutil.disk_usage(tempfile.gettempdir()).free / 2**30:.0f} GiB disk free, "
        f"ulimit -l {resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]}",
        **{name: _contents(Path(path)) for name, path in _FILES.items()},
    }


def _gpus() -> str:
    command = ["nvidia-smi", f"--query-gpu={_OF_GPU}", "--format=csv,noheader"]
    return _output(command) or "none: simulated GPUs"


def _commit() -> str:
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    commit = _output([*git, "rev-parse", "--short", "HEAD"]) or "unknown"
    return commit + (" with changes" if _output([*git, "status", "--porcelain", "-uno"]) else "")


def _output(command: list[str]) -> str:
    """Return the output of a command in one line; empty if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if result.returncode else result.stdout.strip().replace("\n", "; ")


def _version(name: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{name} {importlib.metadata.version(name)}"
    return ""


def _source_version() -> str:
    import megatron_flashckpt

    return megatron_flashckpt.__version__


def _contents(path: Path) -> str:
    return path.read_text().strip() if path.exists() else "no such file"
