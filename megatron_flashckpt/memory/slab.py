"""Staging memory of one rank: a memfd, handed to the agent by file descriptor.

A memfd is independent of the size of /dev/shm and is freed when its last holder ends. It has no
name that other processes could open or that could leak.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os

from megatron_flashckpt import forks
from megatron_flashckpt.errors import CorruptCheckpointError, StorageError
from megatron_flashckpt.memory.host_memory import available_nbytes, process_limits, shown
from megatron_flashckpt.memory.mapping import (
    allocate,
    create_memory,
    map_shared,
    populate,
    prefer_node,
    seal_size,
)
from megatron_flashckpt.memory.reservations import announced
from megatron_flashckpt.memory.slot import PAGE, SlabGeometry, Slot, align

#: Offset of the signals: behind `SlabGeometry`, in a cache line of their own.
_SIGNALS_AT = 64


class Signals(ctypes.Structure):
    """Numbers in a slab's first page, which the agent and its trainer read in every round and step.

    A request to the agent takes 344 us, and 9 to 18 ms while the agent waits for a core. So the
    trainer compares the agent's counters with their former values, and asks only if one of them
    requires a request. The agent holds its lock around its changes.

    ctypes reads and writes each aligned number with one machine instruction, so the other process
    never sees half of a change. `struct` does not.
    """

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("news", "beats", "save_at", "trained"))
    news: int
    """Number of changes of what the agent would report to the trainer."""
    beats: int
    """Number of rounds of the agent's main loop; constant while the agent is stopped."""
    save_at: int
    """Iteration after which a save is requested; 0: none. Set by the agent."""
    trained: int
    """The last iteration that the trainer has completed; 0: unknown. Set by the trainer."""


class Slab:
    """A mapped slab. Owned by the rank that made it, shared with the agent."""

    def __init__(self, fd: int, geometry: SlabGeometry) -> None:
        """Map the memfd `fd`. The caller made `fd` in the same `forks_blocked` context."""
        self.fd = fd
        self.geometry = geometry
        self.memory = map_shared(fd, geometry.nbytes)
        self.signals = Signals.from_buffer(self.memory, _SIGNALS_AT)
        #: True while another process may write to slots without a complete checkpoint; this process
        #: must not save into the slab then.
        self.read_only = False
        #: Those other processes, as the agent names them.
        self.formers: tuple[tuple[int, int], ...] = ()
        #: Bytes in pages of 2 MiB, as far as `populate` knows; the rest is in pages of 4 KiB.
        self.huge_nbytes = 0
        forks.close_in_children(self)

    @classmethod
    def create(
        cls,
        slots: int,
        meta_nbytes: int,
        data_nbytes: int,
        name: str,
        *,
        huge_pages: bool = True,
        numa_node: int | None = None,
        held_share: float = 0.0,
    ) -> Slab:
        """Allocate a slab whose slots take `meta_nbytes` and `data_nbytes` each.

        All pages are allocated here, because allocation on first touch took five times as long. If
        the node is short of memory, this call fails; on first touch a save would be killed by
        SIGBUS.

        Args:
            numa_node: preferred for the pages; None: the kernel chooses.
            held_share: bytes that this node is to hold for other nodes per byte of the slab.

        Raises:
            StorageError: the memory is not available; the message names the bytes wanted.
        """
        geometry = SlabGeometry(slots, align(meta_nbytes), align(data_nbytes))
        held_nbytes = int(held_share * geometry.nbytes)
        _require_memory(geometry, name, held_nbytes, {})
        slab: Slab | None = None
        try:
            with forks.forks_blocked():
                fd = create_memory(f"flashckpt-{name}")
                try:
                    os.ftruncate(fd, geometry.nbytes)
                    # Count other slabs' missing pages before the available memory is read: a page
                    # allocated in between then counts twice, instead of not at all.
                    _require_memory(geometry, name, held_nbytes, announced(fd))
                    slab = cls(fd, geometry)
                except OSError:
                    os.close(fd)
                    raise
            if numa_node is not None:
                prefer_node(slab.memory, numa_node)
            allocate(fd, slab.memory, huge_pages=huge_pages)
            seal_size(fd)
        except BaseException as error:
            if slab is not None:
                slab.close()
            if not isinstance(error, OSError) or isinstance(error, StorageError):
                raise
            refusal = _refusal(geometry, name, error.strerror, error.errno)
            raise StorageError(error.errno, refusal) from error
        slab.memory[: len(geometry.pack())] = geometry.pack()
        return slab

    @classmethod
    def attach(cls, fd: int) -> Slab:
        """Map a slab received from another process; owns `fd` even if the call fails."""
        try:
            with forks.forks_blocked():
                seal_size(fd)  # before its size is read
                nbytes = os.fstat(fd).st_size
                if nbytes < PAGE:
                    raise CorruptCheckpointError(
                        f"memory of {nbytes} bytes is too small for a slab"
                    )
                with mmap.mmap(fd, PAGE, mmap.MAP_SHARED) as page:
                    geometry = SlabGeometry.unpack(page[:PAGE], nbytes)
                return cls(fd, geometry)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise StorageError(error.errno, f"not a slab ({error.strerror})") from error
            raise

    def populate(self, *, huge_pages: bool = False) -> None:
        """Map all pages into this process, so that staging causes no page fault.

        Page faults at the first use of a slot compete with training's own allocations. With mapped
        pages, staging 764 MB takes 0.1 to 0.2 s on two busy cores, instead of 2 to 4 s.

        Args:
            huge_pages: collapse pages that are still small, and note the bytes of huge pages.
        """
        self.huge_nbytes = populate(self.memory, huge_pages=huge_pages)

    def fits(self, meta_nbytes: int, data_nbytes: int, slots: int) -> bool:
        """Return whether a checkpoint of that size fits, in this number of slots."""
        return (
            slots == self.geometry.slots
            and meta_nbytes <= self.geometry.meta_capacity
            and data_nbytes <= self.geometry.data_capacity
        )

    def is_same(self, other: Slab) -> bool:
        """Return whether both are mappings of one memory."""
        return os.path.samestat(os.fstat(self.fd), os.fstat(other.fd))

    @property
    def slots(self) -> list[Slot]:
        return [Slot(self.memory, self.geometry, i) for i in range(self.geometry.slots)]

    def close(self) -> None:
        """Unmap and close; the memory is freed when no other process holds it."""
        with forks.forks_blocked():  # a child might keep the descriptor, or close a reused number
            if self.fd < 0:
                return
            os.close(self.fd)
            self.fd = -1
        del self.signals  # a view of the mapping
        # If a view of the mapping exists, the mapping ends with that view.
        with contextlib.suppress(BufferError):
            self.memory.release()


def _require_memory(
    geometry: SlabGeometry, name: str, held_nbytes: int, others: dict[str, int]
) -> None:
    """Raise StorageError if the node lacks the memory for this slab and the `others` being made.

    The kernel does not check this: it allocates page after page until it starts killing.
    """
    available = available_nbytes()
    if geometry.nbytes + held_nbytes + sum(others.values()) <= available:
        return
    reason = f"{shown(available)} available"
    if others:
        takes = [f"rank {rank} is taking {shown(nbytes)}" for rank, nbytes in others.items()]
        reason += f", of which {', '.join(takes)}"
    if held_nbytes:
        reason += f"; in addition, the node is to hold {shown(held_nbytes)} for other nodes"
    raise StorageError(errno.ENOMEM, _refusal(geometry, name, reason, errno.ENOMEM))


def _refusal(geometry: SlabGeometry, name: str, reason: str | None, code: int | None) -> str:
    remedy = "free memory on this node or lower 'slots'"
    if geometry.slots == 1:
        remedy = "free memory on this node or use more nodes"
    bounds = [limit for limit in process_limits() if limit.left_nbytes < geometry.nbytes]
    if bounds or code == errno.EFBIG:
        names = " and the ".join(limit.name for limit in bounds) or "largest size of files"
        otherwise = "lower 'slots'" if geometry.slots > 1 else "use more ranks"
        remedy = f"raise the {names} where the job is started, or {otherwise}"
    elif code in (errno.EMFILE, errno.ENFILE):
        remedy = "raise the limit on open files (ulimit -n) where the job is started"
    return (
        f"cannot reserve {shown(geometry.nbytes)} of host memory for "
        f"{geometry.slots} checkpoint slot{'s' if geometry.slots > 1 else ''} of rank {name} "
        f"({reason}); {remedy}"
    )
