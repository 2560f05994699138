"""Memory of a memfd: allocated and mapped as huge pages where the kernel can.

Pages of 2 MiB are cheaper to allocate (512 MiB in 29 ms instead of 112), to map, and to read as a
file. Python's `mmap` leaves the address to the kernel, which does not align a memfd. An unaligned
memfd can only be mapped in pages of 4 KiB. Several threads allocate and map different stretches,
because a first save may wait for gigabytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable

from megatron_flashckpt import forks
from megatron_flashckpt.cpu_list import cpus_of_rank

logger = logging.getLogger(__name__)

HUGE_NBYTES = 2 * 2**20
#: From linux/mman.h. Python's mmap module lacks this value and would hold the interpreter lock.
_MADV_POPULATE_WRITE = 23
#: Since Linux 6.1.
_MADV_COLLAPSE = 25
_MADV_DONTFORK = 10
_MADV_DONTDUMP = 16
#: Bytes that one call maps. The kernel holds the lock of the memory map meanwhile, so another
#: thread's mmap waits. It waits 31 ms with calls of 4 MiB, instead of 5 s with one call for 3 GiB.
_POPULATE_NBYTES = 4 * 2**20
#: Bytes that one call collapses. The kernel ends a call at the first stretch of 2 MiB that fails,
#: so a failure leaves at most these bytes in pages of 4 KiB.
_COLLAPSE_NBYTES = 32 * 2**20
#: Upper bound of threads that allocate or map one slab: the memory bus serves training, too.
_MOST_THREADS = 4
_MAP_FIXED = 0x10
#: From linux/memfd.h (Linux 6.3); Python's os module does not have it.
_MFD_NOEXEC_SEAL = 0x8
#: From linux/mempolicy.h; then the numbers of a system call that the C library does not wrap.
_MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235}
_MACHINE = os.uname().machine
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_NOT_PLACED = "cannot place memory at NUMA node %d: mbind: %s"
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


def create_memory(name: str) -> int:
    """Return the descriptor of a new, empty memfd that is called `name` in /proc.

    The memfd is not executable: with `vm.memfd_noexec=2` the kernel refuses executable ones. Its
    size can be sealed.

    Raises:
        OSError: the kernel refuses.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError:  # perhaps a kernel without the flag
        return os.memfd_create(name, flags)


def seal_size(fd: int) -> None:
    """Fix the size of a memfd for all of its holders.

    A process that reads a page beyond a reduced size is killed by SIGBUS, and the agent reads all
    slabs of a node.

    Raises:
        OSError: `fd` is no memfd, or its size cannot be sealed.
    """
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )


def map_shared(fd: int, nbytes: int) -> memoryview:
    """Return the first `nbytes` bytes of `fd`, shared and writable, at a multiple of 2 MiB.

    The bytes are unmapped with the last view of them. Forked children do not inherit the mapping,
    and core dumps leave it out. Called under `forks.forks_blocked`.

    Raises:
        OSError: the kernel refuses.
    """
    reserved_nbytes = nbytes + HUGE_NBYTES
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reserved = _map(None, reserved_nbytes, 0, anonymous, -1)
    begin = -(-reserved // HUGE_NBYTES) * HUGE_NBYTES
    try:
        _map(begin, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(reserved, reserved_nbytes)
        raise
    end = begin + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if begin > reserved:
        _libc.munmap(reserved, begin - reserved)
    _libc.munmap(end, reserved + reserved_nbytes - end)
    _libc.madvise(begin, nbytes, _MADV_DONTFORK)
    _libc.madvise(begin, nbytes, _MADV_DONTDUMP)
    owner = (ctypes.c_ubyte * nbytes).from_address(begin)
    # `atexit = False`: other threads may still read at exit, and the kernel unmaps the memory of a
    # process that ends.
    weakref.finalize(owner, _unmap, begin, nbytes, forks.depth()).atexit = False
    return memoryview(owner).cast("B")


def _unmap(begin: int, nbytes: int, depth: int) -> None:
    # A forked child inherits this call without the mapping; other memory may be at the address.
    if depth == forks.depth():
        _libc.munmap(begin, nbytes)


def _map(address: int | None, nbytes: int, access: int, flags: int, fd: int) -> int:
    mapped_at = _libc.mmap(address, nbytes, access, flags, fd, 0)
    if mapped_at is None or mapped_at == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(mapped_at)


def allocate(fd: int, memory: memoryview, *, huge_pages: bool) -> None:
    """Allocate all pages of `memory`, which maps `fd` from its start.

    Raises:
        OSError: the memory is not available.
    """

    def allocate_huge(begin: int, end: int) -> int:
        # `_collapse` accepts a stretch of 2 MiB that has a page, and zeroes the other pages.
        for page in range(begin, end, HUGE_NBYTES):
            os.pwrite(fd, b"\0", page)  # an error if memory is short; the mapping would SIGBUS
        return _collapse(memory, begin, end)

    if huge_pages:
        _in_stretches(_whole_huge_pages(memory), allocate_huge)
    os.posix_fallocate(fd, 0, memory.nbytes)


def _in_stretches(nbytes: int, work: Callable[[int, int], int]) -> int:
    """Call `work(begin, end)` for all stretches of a memory; return the sum of the results.

    This thread works, too, so it needs no other one. The first error is raised when no thread works
    any more, because the caller closes the memory then.
    """
    begins = range(0, nbytes, _COLLAPSE_NBYTES)
    remaining = iter(begins)  # of a range, so several threads may call `next`
    results: list[int] = []
    errors: list[BaseException] = []

    def work_through() -> None:
        try:
            for begin in remaining:
                results.append(work(begin, min(begin + _COLLAPSE_NBYTES, nbytes)))
        except BaseException as error:
            errors.append(error)
            end()

    def end() -> None:
        for _ in remaining:
            pass

    helpers: list[threading.Thread] = []
    try:
        with contextlib.suppress(RuntimeError):  # no thread is left, or the process ends
            for _ in range(min(_MOST_THREADS, cpus_of_rank(), len(begins)) - 1):
                helper = threading.Thread(target=work_through, name="flashckpt-pages", daemon=True)
                helper.start()
                helpers.append(helper)
        work_through()
    finally:
        end()
        for helper in helpers:
            helper.join()
    if errors:
        raise errors[0]
    return sum(results)


def _collapse(memory: memoryview, begin: int, end: int) -> int:
    """Move bytes `[begin, end)` of `memory` to huge pages; return their number, 0 for a failure.

    Pages that are huge already stay. `MADV_COLLAPSE` ignores the system's settings, except `deny`.
    The interpreter lock and the lock of the memory map are free meanwhile.
    """
    failed = _libc.madvise(address_of(memory) + begin, end - begin, _MADV_COLLAPSE)
    return 0 if failed else end - begin


def _whole_huge_pages(memory: memoryview) -> int:
    return memory.nbytes // HUGE_NBYTES * HUGE_NBYTES


def prefer_node(memory: memoryview, node: int) -> None:
    """Make the kernel prefer NUMA node `node` for the pages of `memory`.

    Called before `allocate`, because existing pages stay at their node. If the kernel refuses, only
    speed is lost; the debug log has the reason.
    """
    number = _MBIND.get(_MACHINE)
    if number is None:
        logger.debug(_NOT_PLACED, node, f"unknown on {_MACHINE}")
        return
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    failed = _syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address_of(memory)),
        ctypes.c_ulong(memory.nbytes),
        ctypes.c_long(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(words * _WORD_BITS + 1),  # the kernel ignores the last bit
        ctypes.c_ulong(0),
    )
    if failed:
        logger.debug(_NOT_PLACED, node, os.strerror(ctypes.get_errno()))


def populate(memory: memoryview, *, huge_pages: bool = False) -> int:
    """Map all pages of `memory` into this process; return the bytes that are in huge pages.

    With `huge_pages`, small pages that `allocate` had to leave are collapsed now, if possible. So
    the result also holds for memory that another process allocated. A thread takes 10 ms per GiB of
    huge pages and 0.3 s per GiB of small ones. The interpreter lock is free meanwhile. Before Linux
    5.14 nothing is mapped.
    """
    whole = _whole_huge_pages(memory) if huge_pages else 0
    base = address_of(memory)

    def populate_stretch(begin: int, end: int) -> int:
        collapsed = _collapse(memory, begin, min(end, whole)) if begin < whole else 0
        for offset in range(begin, end, _POPULATE_NBYTES):
            nbytes = min(_POPULATE_NBYTES, end - offset)
            _libc.madvise(base + offset, nbytes, _MADV_POPULATE_WRITE)
        return collapsed

    return _in_stretches(memory.nbytes, populate_stretch)


def address_of(memory: memoryview) -> int:
    """Return the address of writable memory."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
