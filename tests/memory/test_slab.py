"""Slabs: reserved in full or refused, shared by descriptor, freed with the last holder."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from subprocess import PIPE

import pytest
import torch

from megatron_flashckpt.errors import FlashCkptError, StorageError
from megatron_flashckpt.memory import reservations
from megatron_flashckpt.memory import slab as slab_module
from megatron_flashckpt.memory.mapping import HUGE_NBYTES
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import PAGE, SlabGeometry, SlotHeader, SlotState
from tests.memory.test_mapping import require_huge_pages, smaps
from tests.support.processes import nothing_left_open


@pytest.fixture(autouse=True, scope="module")
def own_garbage() -> Iterator[None]:
    """Keep the collector from the objects of other modules, which take it 0.3 s at each call."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("huge_pages", [True, False])
def test_a_slab_attached_by_descriptor_is_the_same_memory(huge_pages: bool) -> None:
    content = os.urandom(5 * 2**20)
    made = Slab.create(2, 100, len(content), "7", huge_pages=huge_pages)
    attached = Slab.attach(os.dup(made.fd))
    assert attached.geometry == made.geometry
    header = SlotHeader(SlotState.STAGED, 3, "abcd", 10, len(content))
    made.slots[1].set_header(header)
    with made.slots[1].data() as data:
        data[:] = content
    assert attached.slots[1].header == header
    made.close()
    with attached.slots[1].data() as data:
        assert bytes(data) == content, "the other holder keeps the slab"
    attached.slots[0].set_header(header)
    attached.close()


def test_capacities_are_rounded_up_to_pages() -> None:
    slab = Slab.create(3, 1, PAGE + 1, "0")
    assert (slab.geometry.meta_capacity, slab.geometry.data_capacity) == (PAGE, 2 * PAGE)
    assert len(slab.memory) == slab.geometry.nbytes
    assert [slot.index for slot in slab.slots] == [0, 1, 2]
    slab.close()


def test_all_pages_of_a_slab_are_allocated_at_its_creation() -> None:
    slab = Slab.create(2, 0, 10_000_000, "0")
    assert os.fstat(slab.fd).st_blocks * 512 >= slab.geometry.nbytes
    slab.close()


@nothing_left_open()
def test_a_slab_s_descriptor_is_named_by_rank_and_closed_once() -> None:
    slab = Slab.create(1, 0, 1, "17")
    assert not os.get_inheritable(slab.fd)
    assert "flashckpt-17" in os.readlink(f"/proc/self/fd/{slab.fd}")
    slab.close()
    slab.close()
    assert slab.fd == -1


def test_a_slab_fits_slots_of_equal_number_and_no_larger_size() -> None:
    slab = Slab.create(2, PAGE, 2 * PAGE, "0")
    assert slab.fits(PAGE, 2 * PAGE, 2)
    assert slab.fits(0, 0, 2)
    for larger in ((PAGE + 1, 1, 2), (1, 2 * PAGE + 1, 2), (1, 1, 3), (1, 1, 1)):
        assert not slab.fits(*larger)
    slab.close()


@pytest.mark.parametrize("data_nbytes", [1 << 45, 1 << 61, 1 << 70])
@nothing_left_open()
def test_an_error_names_the_missing_memory_before_any_is_allocated(
    data_nbytes: int,
) -> None:
    with pytest.raises(StorageError, match="cannot reserve") as raised:
        Slab.create(2, 0, data_nbytes, "5")
    assert raised.value.errno == errno.ENOMEM
    assert f"{2 * data_nbytes / 2**30:.1f} GiB" in str(raised.value)
    assert "2 checkpoint slots of rank 5" in str(raised.value)
    assert "free memory on this node or lower 'slots'" in str(raised.value)


ANNOUNCED = """
import os
fd = os.memfd_create("flashckpt-7")
os.ftruncate(fd, 40 << 20)
print("there", flush=True)
input()
os.posix_fallocate(fd, 0, 30 << 20)
print("allocated", flush=True)
input()
"""


@nothing_left_open()
def test_slabs_that_other_processes_are_allocating_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's figures do not include memory that another process has not yet allocated."""
    mib = 2**20
    monkeypatch.setattr(slab_module, "available_nbytes", lambda: 100 * mib)
    ours = reservations.announced

    def of_rank_7(fd: int) -> dict[str, int]:
        return {rank: nbytes for rank, nbytes in ours(fd).items() if rank == "7"}

    monkeypatch.setattr(slab_module, "announced", of_rank_7)
    with subprocess.Popen(
        [sys.executable, "-c", ANNOUNCED], stdin=PIPE, stdout=PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "there\n"
        with pytest.raises(StorageError) as raised:
            Slab.create(2, 0, 31 * mib, "3")
        assert raised.value.errno == errno.ENOMEM
        expected = r"\(100\.0 MiB available, of which rank 7 is taking 40\.0 MiB\)"
        assert re.search(expected, str(raised.value))
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "allocated\n"
        assert of_rank_7(0) == {"7": 10 * mib}
        Slab.create(2, 0, 31 * mib, "3").close()
    assert of_rank_7(0) == {}, "the other process has ended"
    slab = Slab.create(2, 0, 3 * mib, "of-this-test")
    assert "of-this-test" not in ours(0), "a complete slab is no longer announced"
    slab.close()


@nothing_left_open()
def test_a_refused_reservation_leaves_nothing_open() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"cannot reserve \d+\.\d MiB") as raised:
            Slab.create(2, 0, 5 << 20, "5")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.errno == errno.EFBIG
    assert "raise the file size limit (ulimit -f) where the job is started" in str(raised.value)
    assert "free memory" not in str(raised.value)


def _memfd(contents: bytes) -> int:
    fd = os.memfd_create("other")
    os.write(fd, contents)
    return fd


@pytest.mark.parametrize(
    "open_it",
    [
        lambda: _memfd(b""),
        lambda: _memfd(b"x" * 10),
        lambda: _memfd(b"x" * PAGE),
        lambda: _memfd(bytes(3 * PAGE)),
        lambda: os.open(os.devnull, os.O_RDWR),
        lambda: os.open("/", os.O_RDONLY),
    ],
    ids=["empty", "short", "one page", "zeros", "device", "directory"],
)
@nothing_left_open()
def test_attaching_another_file_is_refused_and_closes_it(open_it: Callable[[], int]) -> None:
    fd = open_it()
    with pytest.raises(FlashCkptError, match="slab"):
        Slab.attach(fd)


def _copy(slab: Slab, flags: int = os.MFD_ALLOW_SEALING) -> int:
    fd = os.memfd_create("copy", flags)
    os.write(fd, slab.memory)
    return fd


def test_no_holder_of_a_slab_can_change_its_size() -> None:
    """A slab that is not sealed yet is sealed when it is attached."""
    slab = Slab.create(2, 0, 10 * PAGE, "0")
    seals = fcntl.fcntl(slab.fd, fcntl.F_GET_SEALS)
    for seal in (fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL):
        assert seals & seal
    others = [Slab.attach(os.dup(slab.fd)), Slab.attach(_copy(slab))]
    for fd in (slab.fd, *(other.fd for other in others)):
        for nbytes in (0, slab.geometry.nbytes - PAGE, slab.geometry.nbytes + PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, nbytes)
        with pytest.raises(PermissionError):
            os.posix_fallocate(fd, 0, slab.geometry.nbytes + PAGE)
    with open(f"/proc/self/fd/{slab.fd}", "r+b") as file, pytest.raises(PermissionError):
        file.truncate(0)
    for holder in (slab, *others):
        holder.close()


def test_a_slab_that_cannot_be_sealed_is_refused() -> None:
    slab = Slab.create(2, 0, 10 * PAGE, "0")
    with nothing_left_open(), tempfile.TemporaryFile() as file:
        file.write(slab.memory)
        file.flush()
        for fd in (_copy(slab, 0), os.dup(file.fileno())):
            with pytest.raises(StorageError, match="not a slab"):
                Slab.attach(fd)
    slab.close()


@nothing_left_open()
def test_a_closed_slab_is_freed_with_its_last_tensor() -> None:
    slab = Slab.create(1, 0, PAGE, "0")
    tensor = torch.frombuffer(memoryview(slab.memory), dtype=torch.uint8)
    tensor[-1] = 9
    slab.close()
    assert tensor[-1] == 9, "the slab stays mapped under a living tensor"
    del tensor, slab
    gc.collect()


def test_staging_into_a_populated_slab_causes_no_page_faults() -> None:
    """`populate` maps every page before the first write and changes no byte."""
    nbytes = 64 * PAGE
    for populated in (False, True):
        slab = Slab.create(2, PAGE, nbytes, "populate")
        try:
            if populated:
                slab.populate()
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            start = slab.geometry.data_offset(1)
            for page in range(0, nbytes, PAGE):
                slab.memory[start + page] = 1
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
            assert (faults < 8) == populated
            assert SlabGeometry.unpack(slab.memory[:PAGE], slab.geometry.nbytes) == slab.geometry
        finally:
            slab.close()


@pytest.mark.parametrize("huge_pages", [True, False])
def test_a_slab_consists_of_huge_pages_if_requested_and_knows_how_many(huge_pages: bool) -> None:
    require_huge_pages()
    made = Slab.create(2, 100, 9 * HUGE_NBYTES, "huge", huge_pages=huge_pages)
    expected = made.geometry.nbytes // HUGE_NBYTES * HUGE_NBYTES if huge_pages else 0
    for _ in range(2):  # also in another process, which has not allocated it
        made.populate(huge_pages=huge_pages)
        assert made.huge_nbytes == smaps("huge", "ShmemPmdMapped") == expected
        fd = os.dup(made.fd)
        made.close()
        made = Slab.attach(fd)
    assert os.fstat(made.fd).st_blocks * 512 >= made.geometry.nbytes, (
        "all other pages are allocated too"
    )
    begin = made.geometry.slot_offset(0)
    assert not any(bytes(made.memory[begin:])), "a slab begins with zeros"
    made.close()


def test_a_refused_memfd_is_a_storage_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(StorageError, match=r"slots of rank 5 \(Too many open files\)") as raised:
        Slab.create(2, 0, PAGE, "5")
    assert raised.value.errno == errno.EMFILE
