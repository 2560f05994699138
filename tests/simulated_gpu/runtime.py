"""Calls of the CUDA runtime that the package makes below torch: page-locking and capture mode.

Rules (CUDA Runtime API, `cudaHostRegister`, `cudaThreadExchangeStreamCaptureMode`,
`cudaGetLastError`): a range is registered once and unregistered by its beginning. A call that fails
returns its status and keeps it in the calling thread; torch's next kernel launch there reports it.
The simulation refuses a copy from memory of two registrations, blocking or not; so does an H100
("invalid argument", driver 580).
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import Any

import torch

from tests.simulated_gpu.node import UNKNOWN, Node, accelerator_error

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713

_MODES = ("global", "thread_local", "relaxed")


class Runtime:
    """Replacement of `torch.cuda.cudart()`, and of the library that ctypes finds."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.locked: dict[int, int] = {}
        """Page-locked bytes, by address."""
        self.registered_by: list[tuple[int, str, int]] = []
        """Bytes, thread and device of every successful registration."""
        self.kept: list[torch.Tensor] = []
        """Page-locked tensors, kept because torch's host allocator does not free memory."""
        self.most_nbytes: int | None = None
        """Size limit: page-locking of more bytes fails, for existing and for new memory."""
        self.failing_call: int | None = None
        """Number of the registration that fails, counted from 0."""
        self._registrations = itertools.count()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if status := self._refused("cudaHostRegister", unsafe=True):
            return status
        if nbytes <= 0:
            return self._failed(INVALID_VALUE, "invalid argument")
        number = next(self._registrations)
        if number == self.failing_call or nbytes > (self.most_nbytes or nbytes):
            return self._failed(OUT_OF_MEMORY, "out of memory")
        if any(address < at + size and at < address + nbytes for at, size in self._ranges()):
            return self._failed(ALREADY_REGISTERED, "part or all is already mapped")
        self.locked[address] = nbytes
        thread = threading.current_thread().name
        self.registered_by.append((nbytes, thread, self._node.here.device))
        return SUCCESS

    def cudaHostUnregister(self, address: int) -> int:
        if status := self._refused("cudaHostUnregister", unsafe=True):
            return status
        if self.locked.pop(address, None) is None:
            return self._failed(NOT_REGISTERED, "pointer does not correspond to a registration")
        return SUCCESS

    def cudaThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        if status := self._refused("cudaThreadExchangeStreamCaptureMode"):
            return status
        given: ctypes.c_int = mode._obj
        if given.value not in range(len(_MODES)):
            return self._failed(INVALID_VALUE, "invalid argument")
        former = self._node.here.capture_mode
        self._node.here.capture_mode = _MODES[given.value]
        given.value = _MODES.index(former)
        return SUCCESS

    def lock_new(self, made: torch.Tensor) -> None:
        self._node.call("cudaHostAlloc", unsafe=True)
        if made.nbytes > (self.most_nbytes or made.nbytes):
            raise accelerator_error("out of memory", OUT_OF_MEMORY)
        self.locked[made.data_ptr()] = made.nbytes
        self.kept.append(made)

    def _refused(self, name: str, *, unsafe: bool = False) -> int:
        # Functions of the runtime return a status and never raise, even if the device is broken.
        try:
            self._node.call(name, unsafe=unsafe)
        except torch.AcceleratorError as error:
            status = getattr(error, "error_code", UNKNOWN)
            return self._failed(status, str(error).removeprefix("CUDA error: "))
        return SUCCESS

    def _failed(self, status: int, reason: str) -> int:
        self._node.here.latched = reason
        return status

    def _ranges(self) -> list[tuple[int, int]]:
        return list(self.locked.items())  # another thread may be registering

    def is_locked(self, tensor: torch.Tensor) -> bool:
        """Return whether one registration page-locks the whole host tensor."""
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        for at, size in self._ranges():
            if at <= begin and end <= at + size:
                return True
            if begin < at + size and at < end:
                raise accelerator_error("invalid argument")
        return False
