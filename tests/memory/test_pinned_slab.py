"""Page-locking of a slab: chunk by chunk, by one thread, one rank of a node at a time."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron_flashckpt.memory import pinned_slab
from megatron_flashckpt.memory.mapping import address_of
from megatron_flashckpt.memory.pinned_slab import PinnedSlab, unlock_closed
from megatron_flashckpt.memory.slab import Slab
from tests.simulated_gpu import Node, simulated_gpus
from tests.support.processes import times_mapped
from tests.support.trainer import PATIENCE_S, eventually

CHUNK = 64 * 1024
THREAD = "flashckpt-pin"


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(pinned_slab, "CHUNK_NBYTES", CHUNK)
    with simulated_gpus() as node:
        yield node


def new_slab(name: str = "0") -> Slab:
    """Return a slab of five chunks, the last of them partial."""
    slab = Slab.create(1, 100, 4 * CHUNK, name, huge_pages=False)
    assert 4 * CHUNK < slab.geometry.nbytes < 5 * CHUNK
    return slab


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = new_slab()
    yield slab
    slab.close()


def chunks(slab: Slab) -> list[int]:
    return [CHUNK] * 4 + [slab.geometry.nbytes - 4 * CHUNK]


def await_end(pinned: PinnedSlab) -> None:
    pinned._thread.join(PATIENCE_S)
    assert not pinned._thread.is_alive()


class Gate:
    """A refusal that blocks calls of the runtime until `open` is called."""

    def __init__(self) -> None:
        self.waiting = 0
        """Number of threads inside the call."""
        self.most_waiting = 0
        self._lock = threading.Lock()
        self._tickets = threading.Semaphore(0)

    def __call__(self) -> None:
        with self._lock:
            self.waiting += 1
            self.most_waiting = max(self.most_waiting, self.waiting)
        assert self._tickets.acquire(timeout=PATIENCE_S)
        with self._lock:
            self.waiting -= 1

    def open(self, calls: int) -> None:
        """Let `calls` blocked calls continue."""
        self._tickets.release(calls)


def test_one_thread_locks_all_chunks_in_order_on_the_rank_s_device(node: Node, slab: Slab) -> None:
    """A thread of training that unlocks them would change its device or break a capture."""
    pinned = PinnedSlab(slab, 5, None)
    pinned.wait()
    assert pinned.covers(slab.geometry.nbytes)
    assert node.runtime.registered_by == [(nbytes, THREAD, 5) for nbytes in chunks(slab)]
    begins = [address_of(slab.memory) + CHUNK * number for number in range(5)]
    assert list(node.runtime.locked) == begins
    first = node.calls[0]
    assert (first.name, first.thread) == ("set_device", THREAD)
    assert torch.cuda.current_device() == 0, "the training thread keeps its device"
    pinned.unpin()
    await_end(pinned)
    assert not pinned.covers(1)
    assert node.runtime.locked == {}
    calls = [(c.thread, c.device) for c in node.calls if c.name == "cudaHostUnregister"]
    assert calls == [(THREAD, 5)] * 5


@pytest.fixture
def endless_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_slab, "_PAUSE_PER_CALL", 1e9)


def pausing_slab(slab: Slab, lock_directory: Path | None = None) -> PinnedSlab:
    """Return the slab in the pause after its first chunk."""
    pinned = PinnedSlab(slab, 0, lock_directory)
    eventually("the first chunk is locked", lambda: pinned.covers(CHUNK))
    assert not pinned._settled.wait(0.1)
    assert not pinned.covers(CHUNK + 1), "no chunk is locked in a pause"
    return pinned


@pytest.mark.usefixtures("endless_pauses")
@pytest.mark.parametrize("end_pauses", [PinnedSlab.hurry, PinnedSlab.wait])
def test_pauses_end_when_a_save_begins_or_a_thread_waits(
    node: Node, slab: Slab, end_pauses: Callable[[PinnedSlab], object]
) -> None:
    pinned = pausing_slab(slab)
    end_pauses(pinned)
    eventually("all is locked", lambda: pinned.covers(slab.geometry.nbytes))
    pinned.unpin()
    assert node.runtime.locked == {}


@pytest.mark.usefixtures("endless_pauses")
@pytest.mark.parametrize("leave", [PinnedSlab.close, PinnedSlab.unpin])
def test_leaving_does_not_wait_for_a_pause(
    node: Node, slab: Slab, leave: Callable[[PinnedSlab], None]
) -> None:
    pinned = pausing_slab(slab)
    leave(pinned)
    await_end(pinned)
    assert len(node.runtime.registered_by) == 1, "no further chunk is locked"


@pytest.mark.usefixtures("endless_pauses")
def test_all_ranks_of_a_node_pause_together(node: Node, slab: Slab, tmp_path: Path) -> None:
    """The driver's lock is shared, so a chunk of one rank delays the training of all."""
    first, other_slab = pausing_slab(slab, tmp_path), new_slab()
    second = PinnedSlab(other_slab, 1, tmp_path)
    eventually("the other has begun", lambda: any(call.device == 1 for call in node.calls))
    second.hurry()
    assert not second._settled.wait(0.1)
    assert not second.covers(1)
    first.hurry()
    assert first.wait(PATIENCE_S)
    assert second.wait(PATIENCE_S)
    assert second.covers(slab.geometry.nbytes)
    for pinned in (first, second):
        pinned.unpin()
    assert os.listdir(tmp_path) == []
    other_slab.close()


@pytest.mark.parametrize("failing", [0, 3])
def test_chunks_locked_before_a_failure_stay_usable(
    node: Node, slab: Slab, failing: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    node.runtime.failing_call = failing
    made = torch.full((1,), 7, dtype=torch.uint8, device="cuda")
    pinned = PinnedSlab(slab, 0, None)
    pinned.wait()
    assert pinned.covers(failing * CHUNK)
    assert not pinned.covers(failing * CHUNK + 1)
    assert len(node.runtime.registered_by) == failing
    (warning,) = caplog.messages
    total, locked = slab.geometry.nbytes / 2**30, failing * CHUNK / 2**30
    assert warning.startswith(
        f"{locked:.2f} of {total:.2f} GiB of this rank's checkpoint slots are page-locked "
        "(cudaHostRegister: status 2)"
    )
    assert "set 'pinned: false'" in warning
    made.add_(1)  # does not raise here: the error stays in the other thread
    assert made.item() == 8
    pinned.unpin()
    assert node.runtime.locked == {}


def test_unpinning_during_locking_unlocks_the_locked_chunks(node: Node, slab: Slab) -> None:
    gate = node.refusals["cudaHostRegister"] = Gate()
    pinned = PinnedSlab(slab, 0, None)
    gate.open(1)
    eventually(
        "the second chunk is being locked", lambda: pinned.nbytes == CHUNK and gate.waiting == 1
    )
    unpinning = threading.Thread(target=pinned.unpin)
    unpinning.start()
    eventually("the thread is asked to end", pinned._ended.is_set)
    gate.open(1)
    unpinning.join(PATIENCE_S)
    await_end(pinned)
    assert len(node.runtime.registered_by) == 2
    assert node.runtime.locked == {}
    assert node.here.latched is None


@pytest.mark.parametrize("has_failed", [False, True])
def test_closed_memory_stays_mapped_until_it_is_unlocked_for_another_slab(
    node: Node, has_failed: bool
) -> None:
    """CUDA still copies to the old pages, even if their addresses are mapped again."""
    slabs = [new_slab("closed") for _ in range(2)]
    for slab in slabs:
        pinned = PinnedSlab(slab, 5, None)
        pinned.wait()
        pinned.close()
        slab.close()
    del slab, slabs, pinned
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {int(line.split("-")[0], 16) for line in maps if "/memfd:flashckpt-closed " in line}
    assert mapped <= node.runtime.locked.keys()
    assert len(mapped) == 2
    if has_failed:
        node.devices[5].fail("an illegal memory access was encountered")
    unlock_closed()
    assert times_mapped("closed") == 0
    if not has_failed:
        assert node.runtime.locked == {}
        calls = {(c.thread, c.device) for c in node.calls if c.name == "cudaHostUnregister"}
        assert calls == {(THREAD, 5)}
        assert node.here.latched is None
    unlock_closed()


def test_closing_does_not_wait_for_a_hanging_driver(
    node: Node, slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_slab, "_CLOSE_S", 0.05)
    gate = node.refusals["cudaHostRegister"] = Gate()
    pinned = PinnedSlab(slab, 0, None)
    eventually("the thread is inside the driver", lambda: gate.waiting == 1)
    pinned.close()
    assert pinned._thread.is_alive()
    gate.open(1)
    await_end(pinned)
    assert len(node.runtime.registered_by) == 1, "no further chunk is locked"


def test_a_rank_that_waits_for_the_lock_can_be_closed(
    node: Node, slab: Slab, tmp_path: Path
) -> None:
    gate = node.refusals["cudaHostRegister"] = Gate()
    first = PinnedSlab(slab, 0, tmp_path)
    eventually("the first is inside the driver", lambda: gate.waiting == 1)
    for leave in (PinnedSlab.close, PinnedSlab.unpin):
        other_slab = new_slab()
        waiting = PinnedSlab(other_slab, 1, tmp_path)
        eventually("the other has begun", lambda: any(call.device == 1 for call in node.calls))
        leave(waiting)
        assert not waiting._thread.is_alive()
        waiting.wait()
        assert not waiting.covers(1)
        other_slab.close()
    assert node.runtime.registered_by == []
    gate.open(5)
    first.wait()
    assert first.covers(slab.geometry.nbytes)
    first.unpin()
    assert os.listdir(tmp_path) == []


def test_a_process_forked_while_locking_does_not_block_other_ranks(
    node: Node, slab: Slab, tmp_path: Path
) -> None:
    children = []
    ends, keeps = os.pipe()

    def fork() -> None:  # as a data loader does to start its workers
        if not children:
            child = os.fork()
            if not child:
                os.close(keeps)
                os.read(ends, 1)
                os._exit(0)
            children.append(child)

    node.refusals["cudaHostRegister"] = fork
    first = PinnedSlab(slab, 0, tmp_path)
    try:
        eventually("all is locked", lambda: first.covers(slab.geometry.nbytes))
        other_slab = new_slab()
        second = PinnedSlab(other_slab, 1, tmp_path)
        eventually("all is locked", lambda: second.covers(slab.geometry.nbytes))
        second.unpin()
        other_slab.close()
    finally:
        first.unpin()
        os.close(keeps)
        os.close(ends)
        assert [os.waitpid(child, 0)[1] for child in children] == [0]


def refuse() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("name", ["set_device", "cudaHostRegister"])
def test_if_the_runtime_raises_no_chunk_is_locked_and_unpinning_ends(
    node: Node, slab: Slab, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    node.refusals[name] = refuse
    pinned = PinnedSlab(slab, 5, None)
    pinned.wait()
    assert not pinned.covers(1)
    (warning,) = caplog.messages
    assert "CUDA error: an illegal memory access was encountered" in warning
    pinned.unpin()
    assert not pinned._thread.is_alive()
    del node.refusals[name]
    other = PinnedSlab(slab, 0, None)
    other.wait()
    node.refusals["cudaHostUnregister"] = refuse
    other.unpin()
    assert not other.covers(1)


def test_a_directory_that_is_away_does_not_end_locking(
    node: Node, slab: Slab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A cleaner of /tmp may remove the agent's directory; the agent makes another one."""
    pinned = PinnedSlab(slab, 0, tmp_path / "none")
    assert pinned.wait(PATIENCE_S)
    assert pinned.covers(slab.geometry.nbytes)
    assert caplog.records == []
    pinned.unpin()
