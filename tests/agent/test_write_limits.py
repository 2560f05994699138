"""Limits of writes to storage: the number of threads, the rate limit, and the priority."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.agent.shard_writer import slot_shard
from megatron_flashckpt.agent.write_limits import Flow
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES, chunk_digest
from megatron_flashckpt.memory.slot import Slot
from megatron_flashckpt.storage.direct_io import DirectIo
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.agent.conftest import Node
from tests.support.trainer import (
    PATIENCE_S,
    content,
    eventually,
    is_alive,
    new_save_id,
    staged_slot,
)

MIB = 2**20


def staged(chunks: int) -> AbstractContextManager[Slot]:
    """Return a slot of `chunks` chunks, the last one short."""
    return staged_slot((chunks * CHUNK_NBYTES - 5000) // 6)


@pytest.mark.parametrize("threads", [1, 4])
def test_chunks_are_written_in_any_order_and_digests_keep_chunk_order(
    root: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
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
        if late:  # the first write ends after the others have begun
            time.sleep(0.1)
        with lock:
            order.append(offset)
            at_once -= 1
        return pwrite(fd, view, offset)

    store = PosixStore(root, DirectIo("always"))
    with staged(6) as slot:
        monkeypatch.setattr(os, "pwrite", slow_at_first)
        digests = slot_shard(store, slot, slot.header, slot.meta, flow=Flow(threads)).digests
        data = content(0, 1, slot.header.data_nbytes)
    parts = [data[start : start + CHUNK_NBYTES] for start in range(0, len(data), CHUNK_NBYTES)]
    assert digests == tuple(map(chunk_digest, parts))
    (shard,) = (root / "iter_0000001").glob("*.safetensors")
    assert shard.read_bytes().endswith(data)
    assert (order == sorted(order)) == (threads == 1)
    assert most == 1 if threads == 1 else 1 < most <= threads


def test_a_failed_thread_stops_the_others_and_removes_the_file(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    offsets = []

    def fail_third(fd: int, view: Any, offset: int) -> int:
        offsets.append(offset)
        if len(offsets) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(0.05)
        return pwrite(fd, view, offset)

    store = PosixStore(root, DirectIo("always"))
    with staged(12) as slot:
        monkeypatch.setattr(os, "pwrite", fail_third)
        with pytest.raises(StorageError, match="free space there"):
            slot_shard(store, slot, slot.header, slot.meta, flow=Flow(2))
    assert len(offsets) < 6
    assert list((root / "iter_0000001").iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("write")]


def test_all_threads_together_keep_to_the_rate_limit() -> None:
    rate_limit = Flow(mib_per_s=4)
    started = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            pool.submit(rate_limit.wait, 64 * 1024)
    assert time.monotonic() - started >= 19 * 64 * 1024 / (4 * MIB)


def test_no_write_waits_without_a_rate_limit_or_after_it_is_lifted() -> None:
    Flow().wait(10**15)
    rate_limit = Flow(mib_per_s=1)
    rate_limit.wait(10**15)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rate_limit.wait, 1)
        rate_limit.lift()
        waiting.result(PATIENCE_S)


def test_an_agent_keeps_to_the_rate_limit_until_it_must_end(node: Node, root: Path) -> None:
    chunks = 12
    assert chunks * CHUNK_NBYTES / MIB > 2 * PATIENCE_S, (
        "at the rate limit, the write outlasts the patience"
    )
    trainer = node.trainer(
        root,
        config=node.config(write_mib_per_s=1.0, write_threads=2),
        numel=chunks * CHUNK_NBYTES // 6,
    )
    agent = trainer.client.agent_pid
    trainer.stage(1, new_save_id())
    # The second chunk waits four seconds for the first one, and the third one waits eight.
    assert trainer.client.poll(1.0).pending == 1
    os.kill(agent, signal.SIGTERM)
    assert trainer.outcome().error is None
    trainer.hang_up()
    eventually("the end of the agent", lambda: not is_alive(agent))
