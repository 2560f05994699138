"""Properties of this machine on which saves depend."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import resource
import subprocess
import threading
from pathlib import Path

import torch

from megatron_flashckpt.memory import cuda
from megatron_flashckpt.memory.host_memory import available_nbytes
from tools.gpu_check import machine
from tools.gpu_check.report import Report

LETTER = "E"
TITLE = "environment"
SECONDS = 15
GPUS = 1
SIMULATED = True
MEGATRON = False

_OF_GPU = (
    "name,driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,"
    "ecc.mode.current,memory.total,mig.mode.current,persistence_mode"
)
_FILES = {
    "transparent huge pages": "/sys/kernel/mm/transparent_hugepage/enabled",
    "transparent huge pages of shared memory": "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "vm.memfd_noexec": "/proc/sys/vm/memfd_noexec",
    "memory limit of the cgroup": "/sys/fs/cgroup/memory.max",
    "memory in use in the cgroup": "/sys/fs/cgroup/memory.current",
    "NUMA nodes": "/sys/devices/system/node/online",
}
_PACKAGES = ("megatron-core", "transformer-engine", "apex", "numpy", "msgspec", "pyzmq", "xxhash")
_RELAXED = 2


def run(report: Report) -> None:
    """Report versions, limits and memory; check that our threads do not break captures."""
    report.note("kernel", platform.release())
    report.note("Python, torch, CUDA", _versions())
    for name in _PACKAGES:
        report.note(name, _version(name))
    report.note("GPUs", _gpus())
    for what, path in _FILES.items():
        report.note(what, _contents(path))
    report.note("ulimit -l", str(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]))
    report.note("CUDA_DEVICE_MAX_CONNECTIONS", os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "-"))
    report.figure("CPUs of this process", len(os.sched_getaffinity(0)), "CPUs")
    for field in ("MemTotal", "MemAvailable"):
        report.figure(field, _meminfo(field) / 2**30, "GiB")
    report.figure("memory that a slab may take", available_nbytes() / 2**30, "GiB")
    report.figure("pages in ZONE_MOVABLE", _movable_pages(), "pages", "they move when locked")
    _check_threads(report)


def _check_threads(report: Report) -> None:
    """Check that `enter_thread` puts the calling thread into relaxed capture mode."""
    library = cuda.runtime_library()
    report.must("the CUDA runtime that torch has loaded is found", library is not None)
    if library is None:
        return
    modes: list[int] = []

    def enter() -> None:
        cuda.enter_thread(torch.cuda.current_device())
        mode = ctypes.c_int(_RELAXED)
        status = library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        modes.extend((status, mode.value))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    report.must("a thread of ours is in relaxed capture mode", modes == [0, _RELAXED], str(modes))


def _versions() -> str:
    return f"{platform.python_version()}, {torch.__version__}, {torch.version.cuda}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> str:
    if machine.simulated_node is not None:
        return "simulated"
    command = ["nvidia-smi", f"--query-gpu={_OF_GPU}", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    return (result.stdout or result.stderr).strip().replace("\n", "; ")


def _contents(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        return error.strerror or str(error)


def _meminfo(field: str) -> int:
    """Return a field of /proc/meminfo in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def _movable_pages() -> int:
    """Return the pages of all zones that the kernel reserves for movable memory."""
    pages, is_movable = 0, False
    with contextlib.suppress(OSError):
        for line in Path("/proc/zoneinfo").read_text().splitlines():
            if line.startswith("Node"):
                is_movable = line.split()[-1] == "Movable"
            elif is_movable and line.split()[0] == "managed":
                pages += int(line.split()[1])
    return pages
