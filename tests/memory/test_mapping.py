"""Requests to the kernel for the memory of a memfd."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.memory import mapping
from megatron_flashckpt.memory import slab as slab_module
from megatron_flashckpt.memory.mapping import HUGE_NBYTES, create_memory
from megatron_flashckpt.memory.slab import Slab

#: Constants of linux/memfd.h and linux/fcntl.h that Python's modules lack.
MFD_NOEXEC_SEAL = 0x8
F_SEAL_EXEC = 0x20

real_memfd_create = os.memfd_create


def kernel_knows_the_seal() -> bool:
    try:
        os.close(real_memfd_create("probe", MFD_NOEXEC_SEAL))
    except OSError:
        return False
    return True


def test_a_slab_can_never_be_executed() -> None:
    """Systems with vm.memfd_noexec=2 refuse a memfd without this flag."""
    if not kernel_knows_the_seal():
        pytest.skip("this kernel does not know MFD_NOEXEC_SEAL (Linux 6.3)")
    slab = Slab.create(1, 0, 1, "0")
    assert fcntl.fcntl(slab.fd, fcntl.F_GET_SEALS) & F_SEAL_EXEC
    assert not os.fstat(slab.fd).st_mode & 0o111
    slab.close()


def test_an_older_kernel_gets_no_seal_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requested: list[int] = []

    def memfd_create(name: str, flags: int) -> int:
        requested.append(flags)
        if flags & MFD_NOEXEC_SEAL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_memfd_create(name, flags)

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    os.close(create_memory("0"))
    always = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    assert requested == [always | MFD_NOEXEC_SEAL, always]


def of_smaps(name: str, field: str) -> str:
    """Return a field of the mapping of memfd `name`."""
    text = Path("/proc/self/smaps").read_text()
    entry = text[text.index(f"/memfd:flashckpt-{name} ") :].splitlines()
    return next(line for line in entry if line.startswith(f"{field}:")).partition(":")[2]


def smaps(name: str, field: str) -> int:
    return int(of_smaps(name, field).split()[0]) * 1024


def test_core_dumps_leave_slabs_out() -> None:
    slab = Slab.create(1, 0, 1, "dumped")
    assert "dd" in of_smaps("dumped", "VmFlags").split()
    slab.close()


def kernel_collapses() -> bool:
    """Return whether the kernel makes huge pages now; independent of the code under test."""
    fd = create_memory("probe")
    os.ftruncate(fd, HUGE_NBYTES)
    os.pwrite(fd, b"1", 0)
    probe = mapping.map_shared(fd, HUGE_NBYTES)
    os.close(fd)
    madvise, address = ctypes.CDLL(None).madvise, ctypes.c_void_p(mapping.address_of(probe))
    return madvise(address, ctypes.c_size_t(HUGE_NBYTES), 25) == 0


def require_huge_pages() -> None:
    if not kernel_collapses():
        pytest.skip("this kernel does not collapse pages (Linux 6.1), or has no huge page left")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The calls of `madvise`: address, bytes and advice. The first one fails."""
    made: list[tuple[int, int, int]] = []

    class Library:
        @staticmethod
        def madvise(*call: int) -> int:
            made.append(call)
            return -1 if len(made) == 1 else 0

    monkeypatch.setattr(mapping, "_libc", Library)
    return made


def test_pages_are_collapsed_and_mapped_by_short_calls(
    calls: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one call for all, a failure early in the slab left the rest in pages of 4 KiB.

    Each call holds the kernel's lock of the memory map; other threads allocate between calls.
    """
    monkeypatch.setattr(mapping, "cpus_of_rank", lambda: 1)
    mib = 2**20
    memory = memoryview(bytearray(70 * mib + 5))
    assert mapping.populate(memory, huge_pages=True) == 38 * mib
    begin = mapping.address_of(memory)
    collapsed, mapped = (
        [(at - begin, nbytes) for at, nbytes, its in calls if its == advice]
        for advice in (mapping._MADV_COLLAPSE, mapping._MADV_POPULATE_WRITE)
    )
    assert collapsed == [(0, 32 * mib), (32 * mib, 32 * mib), (64 * mib, 6 * mib)]
    assert mapped[-2:] == [(64 * mib, 4 * mib), (68 * mib, 2 * mib + 5)]
    assert {nbytes for _, nbytes in mapped[:-1]} == {4 * mib}
    assert sum(nbytes for _, nbytes in mapped) == memory.nbytes


def test_a_process_that_may_start_no_thread_allocates_and_maps_a_slab(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(mapping, "cpus_of_rank", lambda: 4)
    slab = Slab.create(1, 0, 70 * 2**20, "0")
    slab.populate(huge_pages=True)
    assert os.fstat(slab.fd).st_blocks * 512 >= slab.geometry.nbytes
    slab.close()


def test_threads_end_before_an_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller closes the memory then, and its descriptor's number may be used again."""
    monkeypatch.setattr(mapping, "cpus_of_rank", lambda: 2)
    failed, works = threading.Event(), []

    def work(begin: int, _: int) -> int:
        if begin:
            failed.set()
            raise OSError(errno.ENOMEM, "no memory")
        works.append("begun")
        assert failed.wait(20.0)
        time.sleep(0.1)
        works.append("ended")
        return 0

    with pytest.raises(OSError, match="no memory"):
        mapping._in_stretches(256 * 2**20, work)
    assert works == ["begun", "ended"]


def test_an_interrupted_slab_frees_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def interrupt(fd: int, *_: Any, **__: Any) -> None:
        made.append(fd)
        raise KeyboardInterrupt

    monkeypatch.setattr(slab_module, "allocate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Slab.create(1, 0, 1, "interrupted")
    assert not any(
        "flashckpt-interrupted" in os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{name}")
    )


@pytest.mark.parametrize(("ranks", "cpus"), [("2", 4), ("", 8), ("0", 8), ("many", 8), ("99", 1)])
def test_the_ranks_of_a_node_share_its_cpus(
    monkeypatch: pytest.MonkeyPatch, ranks: str, cpus: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert mapping.cpus_of_rank() == cpus


def test_a_rank_with_two_cpus_maps_a_slab_in_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first save soon after the start waits for its pages: one thread took 5 s for 34 GiB."""
    both = threading.Barrier(2, timeout=20)

    class Library:
        @staticmethod
        def madvise(*_: int) -> int:
            both.wait()
            return 0

    monkeypatch.setattr(mapping, "_libc", Library)
    monkeypatch.setattr(mapping, "cpus_of_rank", lambda: 2)
    assert mapping.populate(memoryview(bytearray(64 * 2**20)), huge_pages=True) == 64 * 2**20
