"""How bytes go to storage: several at a time, at no more than a rate, at a lower priority."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.agent.shard_writer import persist_slot
from megatron_flashckpt.agent.socket_dir import LOG
from megatron_flashckpt.agent.write_limits import Flow, Pace
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES, chunk_digest
from megatron_flashckpt.memory.slot import Slot, SlotHeader, SlotMeta, SlotState
from megatron_flashckpt.storage.direct_io import DirectIo
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.conftest import Node
from tests.agent.test_shard_writer import read_rank, stored
from tests.support.trainer import (
    PATIENCE_S,
    FakeTrainer,
    content,
    eventually,
    is_alive,
    new_save_id,
)

MIB = 2**20


def staged(node: Node, root: Path, chunks: int) -> tuple[FakeTrainer, Slot, SlotHeader, SlotMeta]:
    """Return a slot with so many chunks, the last one short, that its agent was not told of."""
    trainer = node.trainer(root, numel=(chunks * CHUNK_NBYTES - 5000) // 6)
    slot = trainer.begin(1, new_save_id())
    assert slot is not None
    trainer.fill(slot, content(0, 1, trainer.layout.nbytes))
    slot.set_state(SlotState.STAGED)
    return trainer, slot, slot.header, slot.meta


@pytest.mark.parametrize("threads", [1, 4])
def test_chunks_are_written_in_any_order_and_their_digests_returned_in_theirs(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    _, slot, header, meta = staged(node, root, 6)
    pwrite = os.pwrite
    order, at_once, most = [], 0, 0
    lock = threading.Lock()

    def slow_at_first(fd: int, view: Any, offset: int) -> int:
        nonlocal at_once, most
        if len(view) < CHUNK_NBYTES:
            return pwrite(fd, view, offset)
        with lock:
            at_once += 1
            most = max(most, at_once)
            late = at_once == 1
        if late:  # the first one ends after the others have begun
            time.sleep(0.1)
        with lock:
            order.append(offset)
            at_once -= 1
        return pwrite(fd, view, offset)

    monkeypatch.setattr(os, "pwrite", slow_at_first)
    storage = PosixStorage(root, DirectIo("always"))
    digests = persist_slot(storage, slot, header, meta, flow=Flow(threads))
    data = content(0, 1, header.data_nbytes)
    parts = [data[start : start + CHUNK_NBYTES] for start in range(0, len(data), CHUNK_NBYTES)]
    assert digests == tuple(map(chunk_digest, parts))
    (shard,) = (root / "iter_0000001").glob("*.safetensors")
    assert shard.read_bytes().endswith(data)
    assert (order == sorted(order)) == (threads == 1)
    assert most == 1 if threads == 1 else 1 < most <= threads


def test_when_one_thread_fails_the_others_stop_and_nothing_is_left(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, slot, header, meta = staged(node, root, 12)
    pwrite = os.pwrite
    offsets = []

    def fail_third(fd: int, view: Any, offset: int) -> int:
        offsets.append(offset)
        if len(offsets) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(0.05)
        return pwrite(fd, view, offset)

    monkeypatch.setattr(os, "pwrite", fail_third)
    with pytest.raises(StorageError, match="free space there"):
        persist_slot(PosixStorage(root, DirectIo("always")), slot, header, meta, flow=Flow(2))
    assert len(offsets) < 6
    assert list((root / "iter_0000001").iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("write")]


def test_an_agent_finds_out_what_the_file_system_can_and_its_checkpoints_are_whole(
    node: Node, root: Path
) -> None:
    config = node.config(write_threads=1)  # of several at a time only one is looked at
    trainer = node.trainer(root, config=config, numel=16 * CHUNK_NBYTES // 6)
    for iteration in (1, 2):
        assert trainer.save(iteration).error is None
        data = content(0, iteration, trainer.layout.nbytes)
        assert read_rank(stored(root, iteration), trainer) == data
    log = (node.directory(root) / LOG).read_text()
    assert log.count("refuses O_DIRECT") + log.count("MiB/s with O_DIRECT") == 1


def test_all_threads_together_keep_to_the_pace() -> None:
    pace = Pace(mib_per_s=4)
    started = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            pool.submit(pace.wait, 64 * 1024)
    assert time.monotonic() - started >= 19 * 64 * 1024 / (4 * MIB)


def test_without_a_rate_nothing_waits_and_a_lifted_one_lets_go() -> None:
    Pace().wait(10**15)
    pace = Pace(mib_per_s=1)
    pace.wait(10**15)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pace.wait, 1)
        pace.lift()
        waiting.result(PATIENCE_S)


def test_an_agent_keeps_to_the_pace_until_it_is_told_to_end(node: Node, root: Path) -> None:
    chunks = 12
    assert chunks * CHUNK_NBYTES / MIB > 2 * PATIENCE_S, "or it might just have been quick"
    trainer = node.trainer(
        root,
        config=node.config(write_mib_per_s=1.0, write_threads=2),
        numel=chunks * CHUNK_NBYTES // 6,
    )
    agent = trainer.client.agent_pid
    trainer.stage(1, new_save_id())
    started = time.monotonic()
    # The second chunk waits for the first one's four seconds, the third one for eight.
    assert trainer.client.poll(1.0).pending == 1
    os.kill(agent, signal.SIGTERM)
    assert trainer.outcome().error is None
    print(f"committed {time.monotonic() - started:.1f} s after it was staged")
    trainer.hang_up()
    eventually("the end of the agent", lambda: not is_alive(agent))


@pytest.mark.parametrize("nice", [0, 7])
def test_threads_that_write_give_way_to_training(node: Node, root: Path, nice: int) -> None:
    trainer = node.trainer(root, config=node.config(writer_nice=nice))
    agent = trainer.client.agent_pid
    assert trainer.save(1).error is None
    tasks = [int(task.name) for task in Path(f"/proc/{agent}/task").iterdir()]
    found = {task: os.getpriority(os.PRIO_PROCESS, task) for task in tasks}
    own = found.pop(agent)
    assert min(found.values()) == own
    assert max(found.values()) == min(19, own + nice)
