"""One rank's staging memory: a memfd, handed to the agent by file descriptor.

A memfd is not bounded by the size of /dev/shm, has no name that others could open or that could
leak, and is freed when its last holder ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os

from megatron_flashckpt.errors import CorruptCheckpointError, FlashCkptError, StorageError
from megatron_flashckpt.memory.available import available_nbytes
from megatron_flashckpt.memory.slot import PAGE, SlabGeometry, Slot, align

#: From linux/mman.h; Python's mmap module does not have it, and would hold the interpreter lock.
_MADV_POPULATE_WRITE = 23
#: Of Linux 6.1.
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_HUGE_NBYTES = 2 * 2**20


class Slab:
    """A mapped slab. Owned by the rank that made it, shared with the agent."""

    def __init__(self, fd: int, geometry: SlabGeometry) -> None:
        self.fd = fd
        self.geometry = geometry
        self.memory = mmap.mmap(fd, geometry.nbytes, mmap.MAP_SHARED)

    @classmethod
    def create(cls, slots: int, meta_nbytes: int, data_nbytes: int, name: str) -> Slab:
        """Allocate a slab whose slots take `meta_nbytes` and `data_nbytes` each.

        All pages are allocated here: `posix_fallocate` on a memfd does so at 6.8 GB/s where
        touching them one by one reached 1.4 GB/s, and a node without the memory is told now and
        not by SIGBUS in the middle of a save.

        Raises:
            StorageError: the memory is not there; names the bytes wanted.
        """
        geometry = SlabGeometry(slots, align(meta_nbytes), align(data_nbytes))
        available = available_nbytes()
        if geometry.nbytes > available:
            # Not left to posix_fallocate: it takes page after page until the kernel starts killing.
            raise StorageError(
                errno.ENOMEM,
                _refusal(geometry, name, f"{available / 2**30:.2f} GiB available"),
            )
        fd = os.memfd_create(f"flashckpt-{name}", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, geometry.nbytes)
            slab = cls(fd, geometry)
        except OSError as error:
            os.close(fd)
            raise StorageError(
                error.errno,
                _refusal(geometry, name, error.strerror),
            ) from error
        slab.memory[: len(geometry.pack())] = geometry.pack()
        return slab

    @classmethod
    def attach(cls, fd: int) -> Slab:
        """Map a slab received from another process; takes ownership of `fd` either way."""
        try:
            nbytes = os.fstat(fd).st_size
            if nbytes < PAGE:
                raise CorruptCheckpointError(f"memory of {nbytes} bytes is too small for a slab")
            with mmap.mmap(fd, PAGE, mmap.MAP_SHARED) as page:
                geometry = SlabGeometry.unpack(page[:PAGE], nbytes)
            return cls(fd, geometry)
        except OSError as error:
            os.close(fd)
            raise StorageError(error.errno, f"not a slab ({error.strerror})") from error
        except FlashCkptError:
            os.close(fd)
            raise

    def collapse(self) -> None:
        """Let the slab consist of huge pages from now on, where the kernel can do that.

        `MADV_COLLAPSE` copies to huge pages whatever the system-wide setting is, but only through a
        mapping that lies at a multiple of their size: one beside ours, for the time of the call.
        What is mapped already has to be mapped anew (`populate`). 256 MiB took 0.2 to 0.6 s of CPU
        time; to read them then took 26 ms instead of 43 to 62, and 30 with their digest.
        """
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        nbytes, private = self.geometry.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

        def mapped(address: int, length: int, flags: int, fd: int) -> int | None:
            where, size = ctypes.c_void_p(address), ctypes.c_size_t(length)
            access = mmap.PROT_READ | mmap.PROT_WRITE if fd >= 0 else 0
            found = libc.mmap(where, size, access, flags, fd, ctypes.c_long(0))
            return None if found == ctypes.c_void_p(-1).value else int(found or 0)

        reserved = mapped(0, nbytes + _HUGE_NBYTES, private, -1)
        if reserved is None:
            return
        begin = -(-reserved // _HUGE_NBYTES) * _HUGE_NBYTES
        if mapped(begin, nbytes, mmap.MAP_SHARED | _MAP_FIXED, self.fd) is not None:
            whole = nbytes // _HUGE_NBYTES * _HUGE_NBYTES
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(whole), _MADV_COLLAPSE)
        libc.munmap(ctypes.c_void_p(reserved), ctypes.c_size_t(nbytes + _HUGE_NBYTES))

    def populate(self) -> None:
        """Map all pages into this process, so that staging meets no page fault.

        At the first use of a slot the faults would come while training allocates memory too: 764 MB
        then took 2 to 4 s to stage on two busy cores, and 0.1 to 0.2 s when mapped before. The
        interpreter lock is free meanwhile. Kernels before 5.14 cannot; they fault as ever.
        """
        view = ctypes.c_char.from_buffer(self.memory)
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(ctypes.addressof(view)),
            ctypes.c_size_t(self.geometry.nbytes),
            _MADV_POPULATE_WRITE,
        )

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
        """Unmap and close; the memory lives on while another process holds it."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        # A memoryview of the mapping may live on; then the mapping goes when that does.
        with contextlib.suppress(BufferError):
            self.memory.close()


def _refusal(geometry: SlabGeometry, name: str, reason: str | None) -> str:
    return (
        f"cannot reserve {geometry.nbytes / 2**30:.2f} GiB of host memory for "
        f"{geometry.slots} checkpoint slots of rank {name} ({reason}); "
        "free memory on this node or lower 'slots'"
    )
