"""Page-locks a slab for a GPU's copies, in the background and chunk by chunk.

Copies into page-locked memory are asynchronous and three to five times as fast. Locking takes 28 ms
per GiB of huge pages and 71 ms per GiB of small ones (H100). Meanwhile training cannot launch its
work, because locking holds a lock of the driver that all GPUs of the node share, and the lock of
the memory map. So a slab is locked in short calls with pauses, by one rank of a node at a time. The
pauses end when the first save begins, or when a thread waits for the slab: then locking soon makes
up for the pauses. After a restart there are none, because the load comes before the first step.

One call for a whole slab may fail: Linux 6.11 to 6.13 accept less than 2 GiB per call, driver 580
less than 512 GiB.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from megatron_flashckpt.memory import cuda
from megatron_flashckpt.memory.mapping import address_of
from megatron_flashckpt.memory.slab import Slab

logger = logging.getLogger(__name__)

#: Bytes that one call locks, which delays training by 2 ms (small pages: 7 ms).
CHUNK_NBYTES = 64 * 2**20
#: Length of a pause, as a multiple of the call before it. 240 GiB of a node are locked in 24 s
#: (small pages: 110 s).
_PAUSE_PER_CALL = 3.0
#: Seconds between two attempts of a rank to take the node's lock for its next chunk.
_TURN_S = 0.02
#: Seconds that `close` waits for the thread, which may be inside the driver.
_CLOSE_S = 1.0
#: Slabs that were closed without being unlocked. Their memory stays mapped: if other memory were
#: mapped at its address, CUDA would still copy to the old pages.
_still_locked: list[PinnedSlab] = []


def borders(begin: int, end: int) -> range:
    """Return the offsets in a slab, between `begin` and `end`, that no single copy may cross.

    CUDA does not document copies across two registrations of page-locked memory.
    """
    return range(begin // CHUNK_NBYTES * CHUNK_NBYTES + CHUNK_NBYTES, end, CHUNK_NBYTES)


def unlock_closed() -> None:
    """Unlock the slabs that this process has closed, so that the kernel can free their memory.

    Called before the process takes memory for another slab. Takes as long as locking.
    """
    while _still_locked:
        _still_locked.pop().unpin()


class PinnedSlab:
    """Locks and unlocks the pages of one slab, from its start on, in threads of its own.

    Those threads make all calls and launch no kernel. CUDA keeps the error of a failed call and
    raises it in the next kernel of the same thread.
    """

    def __init__(self, slab: Slab, device: int, lock_directory: Path | None) -> None:
        """Start locking.

        Args:
            slab: stays mapped until `unpin`, or for the life of the process.
            device: the CUDA device that copies into the slab.
            lock_directory: shared by the ranks of this node; its lock is held for each chunk and
                the pause after it. None: the rank is alone.
        """
        self.nbytes = 0
        """Bytes from the start of the slab that are locked; grows."""
        self._memory = memoryview(slab.memory)
        self._device = device
        self._lock_directory = lock_directory
        self._ended = threading.Event()
        #: Set when the rest of the slab must be locked, or locking must end, without pauses.
        self._hurried = threading.Event()
        self._stays_locked = False
        self._settled = threading.Event()
        self._thread = self._started(self._run)

    def _started(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name="flashckpt-pin", daemon=True)
        thread.start()
        return thread

    def covers(self, end: int) -> bool:
        """Return whether all bytes of the slab below `end` are locked."""
        return end <= self.nbytes

    def hurry(self) -> None:
        """Lock the rest without pauses, because a load or a save has begun, or training waits."""
        self._hurried.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """End the pauses; return True when all chunks are locked or locking has failed.

        Returns:
            False if `timeout_s` passed first.
        """
        self.hurry()
        return self._settled.wait(timeout_s)

    def unpin(self) -> None:
        """Unlock all chunks; return when they are unlocked.

        Called when no copy is running and before the slab is unmapped; otherwise the driver would
        keep its pages.
        """
        self._end()
        self._thread.join()
        if self.nbytes:
            self._started(self._unpin).join()

    def close(self) -> None:
        """Stop locking. Locked chunks stay locked until `unlock_closed`, or the process ends.

        Unlocking would take as long as locking, and the kernel unlocks the memory of a process that
        ends.
        """
        self._stays_locked = True
        self._end()
        self._thread.join(_CLOSE_S)

    def _end(self) -> None:
        self._ended.set()
        self.hurry()

    def _run(self) -> None:
        try:
            cuda.enter_thread(self._device)
            self._pin()
        except Exception as error:
            self._warn(str(error))
        self._settled.set()
        self._ended.wait()
        if self.nbytes and self._stays_locked:
            _still_locked.append(self)

    def _pin(self) -> None:
        runtime, address = torch.cuda.cudart(), address_of(self._memory)  # type: ignore[no-untyped-call]
        begun = time.monotonic()
        while not self._ended.is_set() and self.nbytes < self._memory.nbytes:
            nbytes = min(CHUNK_NBYTES, self._memory.nbytes - self.nbytes)
            with self._node_lock() as has_lock:
                if not has_lock:
                    return
                started = time.monotonic()
                status = int(runtime.cudaHostRegister(address + self.nbytes, nbytes, 0))
                if status:
                    self._warn(f"cudaHostRegister: status {status}")
                    return
                self.nbytes += nbytes
                # Also a pause for the other ranks, whose calls would delay this rank's training.
                self._hurried.wait(_PAUSE_PER_CALL * (time.monotonic() - started))
        gib = 2**30
        logger.info(
            "%.2f of %.2f GiB of this rank's checkpoint slots were page-locked in %.2f s",
            *(self.nbytes / gib, self._memory.nbytes / gib, time.monotonic() - begun),
        )

    def _unpin(self) -> None:
        pinned, self.nbytes = self.nbytes, 0
        address = address_of(self._memory)
        with contextlib.suppress(RuntimeError):  # a broken context has no registrations
            cuda.enter_thread(self._device)
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            for begin in range(0, pinned, CHUNK_NBYTES):
                runtime.cudaHostUnregister(address + begin)

    @contextlib.contextmanager
    def _node_lock(self) -> Iterator[bool]:
        """Hold the node's lock inside the context; yield False if `unpin` or `close` came first."""
        if self._lock_directory is None:
            yield True
            return
        try:
            fd = os.open(self._lock_directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # a cleaner has removed it
            yield not self._ended.is_set()
            return
        try:
            yield self._take_lock(fd)
        finally:
            # A process forked meanwhile shares the lock and would keep it.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _take_lock(self, fd: int) -> bool:
        # Polling instead of a blocking flock, so that this rank can end while another rank hangs in
        # the driver.
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._ended.wait(_TURN_S):
                    return False
            else:
                return True

    def _warn(self, reason: str) -> None:
        logger.warning(
            "%.2f of %.2f GiB of this rank's checkpoint slots are page-locked (%s), so copies into "
            "the rest are slower; usually the kernel or the GPU driver limits page-locked memory: "
            "update them, or set 'pinned: false' to page-lock nothing",
            self.nbytes / 2**30,
            self._memory.nbytes / 2**30,
            reason,
        )
