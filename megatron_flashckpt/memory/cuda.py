"""Prepares each thread of this package for CUDA calls, or for ROCm's, which torch calls CUDA too.

CUDA keeps two settings per thread, and both start wrong in a new thread. The current device is 0,
and the thread's calls may invalidate a graph capture of another thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

#: `cudaStreamCaptureModeRelaxed` of the CUDA runtime.
_RELAXED = 2
#: A wheel adds a digest to the names of its bundled libraries. HIP is ROCm's runtime.
_NAME = re.compile(r"lib(cudart|amdhip64)(-[0-9a-f]+)?\.so[.0-9]*")
#: HIP's functions differ from CUDA's in the prefix only, and its relaxed mode is 2, too.
_PREFIX = "hip" if torch.version.hip else "cuda"
#: The library, set when it is first found.
_runtime: Any = None


def current_device() -> int | None:
    """Return the CUDA device of the calling thread; None if tensors cannot be on a device.

    Called on the training thread, because only that thread has set its device.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return None
    device = torch.cuda.current_device()
    # CPU ranks run Megatron with stand-ins of torch.cuda, which put such a tensor on the host.
    return device if torch.empty(0, device=f"cuda:{device}").is_cuda else None


def is_error(error: RuntimeError) -> bool:
    """Return whether CUDA has raised `error`.

    Older releases of torch have no `AcceleratorError`; they raise a RuntimeError with this text.
    """
    out_of_memory = torch.cuda.OutOfMemoryError
    classes = (out_of_memory, getattr(torch, "AcceleratorError", out_of_memory))
    return isinstance(error, classes) or str(error).startswith(("CUDA error", "HIP error"))


@contextlib.contextmanager
def cache_kept() -> Iterator[None]:
    """Make `torch.cuda.empty_cache` do nothing inside the context, for the calling thread."""
    empty_cache, thread = torch.cuda.empty_cache, threading.get_ident()

    @functools.wraps(empty_cache)
    def empty_cache_elsewhere() -> None:
        if threading.get_ident() != thread:
            empty_cache()

    torch.cuda.empty_cache = empty_cache_elsewhere
    try:
        yield
    finally:
        torch.cuda.empty_cache = empty_cache


def enter_thread(device: int | None) -> None:
    """Prepare the calling thread for CUDA calls on `device`; does nothing for None.

    Raises:
        RuntimeError: CUDA refuses the device, as every call after an illegal access.
    """
    if device is None:
        return
    torch.cuda.set_device(device)
    _leave_captures_alone()


def _leave_captures_alone() -> None:
    """Keep this thread's calls from invalidating graph captures of other threads.

    While a thread captures in global mode, other threads must be in relaxed mode. Otherwise their
    waits for events and their page-locking fail and invalidate the capture. PyTorch does the same
    for NCCL's watchdog (pytorch/pytorch#148594).
    """
    name = f"{_PREFIX}ThreadExchangeStreamCaptureMode"
    exchange = getattr(runtime_library(), name, None)
    if exchange is None:
        logger.debug("%s was not found: graph captures may fail during saves", name)
        return
    status = exchange(ctypes.byref(ctypes.c_int(_RELAXED)))
    if status:
        logger.debug("%s: status %d", name, status)


def runtime_library() -> Any:
    """Return the CUDA runtime that torch has loaded, for ctypes; None if it is not found."""
    global _runtime
    if _runtime is None:  # reading the maps of a large process takes milliseconds
        _runtime = _find_library(Path("/proc/self/maps"), ctypes.CDLL)
    return _runtime


def _find_library(maps: Path, load: Callable[[str], Any]) -> Any:
    # A second copy of the library would have thread settings of its own, so only the one that
    # is mapped will do. A file that was replaced has another name in the maps.
    for line in maps.read_text(errors="surrogateescape").splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        if _NAME.fullmatch(path.rpartition("/")[2]):
            with contextlib.suppress(OSError):
                return load(path)
    return None
