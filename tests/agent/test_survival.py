"""The agent as a separate process: it outlives the trainers, finishes their saves, and ends."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from pathlib import Path

import pytest

from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.memory.slot import SlotState
from tests.agent.conftest import Node
from tests.agent.test_shard_writer import read_rank, stored
from tests.support.trainer import blocked_open, content, eventually, is_alive, new_save_id


def test_the_agent_has_no_torch_no_numpy_and_no_gpu_library_mapped(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    assert trainer.save(1).error is None
    mapped = Path(f"/proc/{trainer.client.agent_pid}/maps").read_text()
    assert "python" in mapped
    for library in ("libtorch", "libc10", "libcuda", "numpy", "megatron/core"):
        assert library not in mapped
    assert "libtorch" in Path("/proc/self/maps").read_text(), (
        "the probe finds libtorch where it is loaded"
    )


def test_the_agent_is_an_orphan_in_a_separate_session(node: Node, root: Path) -> None:
    pid = node.trainer(root).client.agent_pid
    assert os.getsid(pid) not in (os.getsid(0), 0)
    assert os.getpgid(pid) != os.getpgid(0)
    # The process that started the agent has been reaped before `connect` returned.
    status = Path(f"/proc/{pid}/status").read_text()
    parent = next(line.split()[1] for line in status.splitlines() if line.startswith("PPid"))
    assert int(parent) != os.getpid()
    assert os.getsid(pid) != pid, "a process that leads no session cannot get a terminal"


def test_the_agent_does_not_look_like_a_torchrun_worker(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    pid = node.trainer(root).client.agent_pid
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    names = {entry.split(b"=")[0].decode() for entry in environment}
    assert not names & {"RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"}
    assert "PATH" in names


def test_a_staged_save_is_committed_even_if_all_trainers_are_killed(node: Node, root: Path) -> None:
    save_id = new_save_id()
    shard = root / file_names.iteration_dir(30) / file_names.shard_name(0, save_id)
    with blocked_open(shard) as unblock:
        ranks = [
            node.process(
                root, rank=rank, world_size=2, iterations=[30], save_id=save_id, stop="staged"
            )
            for rank in range(2)
        ]
        (agent,) = {rank.stopped() for rank in ranks}
        for rank in ranks:
            rank.kill()
        assert not (root / file_names.TRACKER).exists(), "the trainers died before the commit"
        assert is_alive(agent)
        unblock()
        eventually("the commit", (root / file_names.TRACKER).exists)
    assert (root / file_names.TRACKER).read_text() == "30"
    for rank in range(2):
        trainer = node.trainer(root, rank, 2)
        assert trainer.client.agent_pid == agent
        expected = content(rank, 30, trainer.layout.nbytes)
        assert read_rank(stored(root, 30), trainer) == expected


def test_a_restarted_rank_is_offered_its_slots_with_their_bytes(node: Node, root: Path) -> None:
    save_id = new_save_id()
    process = node.process(root, iterations=[10, 20], save_id=save_id, stop="committed")
    agent = process.stopped()
    process.kill()
    trainer = node.trainer(root)
    assert trainer.client.agent_pid == agent
    offers = trainer.take()
    assert [(offer.iteration, offer.durable) for offer in offers] == [(20, True), (10, True)]
    assert offers[0].save_id == save_id
    for offer in offers:
        expected = content(0, offer.iteration, trainer.layout.nbytes)
        assert trainer.bytes_in(offer.slot) == expected
        assert offer.digests == stored(root, offer.iteration).shard(0).digests
    # The slab stays in use: the oldest slot is overwritten, and the newest stays.
    assert trainer.save(30).error is None
    assert [offer.iteration for offer in trainer.take()] == [30, 20]


def test_a_slot_is_not_offered_if_its_trainer_died_during_the_copy(node: Node, root: Path) -> None:
    process = node.process(root, iterations=[10, 20], save_id=new_save_id(), stop="staging")
    process.stopped()
    process.kill()
    trainer = node.trainer(root)
    offers = trainer.take()
    assert [offer.iteration for offer in offers] == [10]
    assert trainer.bytes_in(offers[0].slot) == content(0, 10, trainer.layout.nbytes)
    assert trainer.slab is not None
    states = sorted(slot.header.state for slot in trainer.slab.slots)
    assert states == [SlotState.EMPTY, SlotState.DURABLE]
    # The next save reuses the torn slot.
    slot = trainer.begin(20, new_save_id())
    assert slot is not None
    assert slot.index != offers[0].slot


def test_a_rank_that_never_saved_is_offered_no_slot(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    assert trainer.client.take() == (None, ())


def test_a_staged_slot_is_offered_before_it_is_durable(node: Node, root: Path) -> None:
    save_id = new_save_id()
    with blocked_open(
        root / file_names.iteration_dir(1) / file_names.shard_name(0, save_id)
    ) as unblock:
        first = node.trainer(root)
        data = first.stage(1, save_id)
        first.hang_up()
        second = node.trainer(root)
        (offer,) = second.take()
        assert not offer.durable
        assert offer.digests is not None, "the agent digested the slot at the hang-up"
        assert second.bytes_in(offer.slot) == data
        unblock()
        eventually("the commit", (root / file_names.TRACKER).exists)
    (offer,) = eventually("a durable slot", lambda: [o for o in second.take() if o.durable])
    assert offer.digests is not None


def test_an_agent_without_trainers_ends_after_the_grace_time(node: Node, root: Path) -> None:
    config = node.config(grace_s=0.6)
    trainer = node.trainer(root, config=config)
    agent = trainer.client.agent_pid
    assert trainer.save(1).error is None
    started = time.monotonic()
    trainer.hang_up()
    eventually("the end of the agent", lambda: not is_alive(agent))
    assert time.monotonic() - started >= 0.6
    assert list(node.runtime_dir.iterdir()) == []


def test_a_trainer_that_returns_within_the_grace_time_finds_its_agent(
    node: Node, root: Path
) -> None:
    config = node.config(grace_s=1.0)
    trainer = node.trainer(root, config=config)
    agent = trainer.client.agent_pid
    assert trainer.save(1).error is None
    trainer.hang_up()
    again = node.trainer(root, config=config)
    assert again.client.agent_pid == agent
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:  # a connection keeps the agent past the grace time
        assert again.client.poll(0.1).pending == 0
        time.sleep(0.02)
    assert [offer.iteration for offer in again.take()] == [1]


def test_an_agent_ends_at_once_when_all_ranks_have_left(node: Node, root: Path) -> None:
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]
    agent = trainers[0].client.agent_pid
    save_id = new_save_id()
    for trainer in trainers:
        trainer.stage(1, save_id)
    assert [trainer.outcome().error for trainer in trainers] == [None, None]
    trainers[0].hang_up(leave=True)
    assert trainers[1].client.poll(0.0).pending == 0, "one rank is still connected"
    trainers[1].hang_up(leave=True)
    # The grace time of this test is one minute.
    eventually("the end of the agent", lambda: not is_alive(agent), within_s=5.0)
    assert list(node.runtime_dir.iterdir()) == []
    assert node.agents() == []


def test_an_agent_stays_while_a_killed_rank_may_return(node: Node, root: Path) -> None:
    config = node.config(grace_s=0.8)
    trainers = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
    agent = trainers[0].client.agent_pid
    trainers[0].hang_up(leave=True)
    started = time.monotonic()
    trainers[1].hang_up()
    eventually("the end of the agent", lambda: not is_alive(agent))
    assert time.monotonic() - started >= 0.8


def test_an_agent_finishes_pending_saves_before_it_ends(node: Node, root: Path) -> None:
    save_id = new_save_id()
    with blocked_open(
        root / file_names.iteration_dir(1) / file_names.shard_name(0, save_id)
    ) as unblock:
        trainer = node.trainer(root, config=node.config(grace_s=0.0))
        agent = trainer.client.agent_pid
        trainer.stage(1, save_id)
        trainer.hang_up(leave=True)
        deadline = time.monotonic() + 0.7  # several times as long as an exit takes
        while time.monotonic() < deadline:
            assert is_alive(agent)
            time.sleep(0.02)
        unblock()
        eventually("the end of the agent", lambda: not is_alive(agent))
    assert (root / file_names.TRACKER).read_text() == "1"
    assert list(node.runtime_dir.iterdir()) == []


def test_an_agent_with_an_error_leaves_its_log_behind(node: Node, root: Path) -> None:
    root.write_text("a file")
    trainer = node.trainer(root, config=node.config(keep_unwritten_s=0.0, grace_s=0.1))
    place, agent = node.place(root), trainer.client.agent_pid
    error = trainer.save(1).error
    assert error is not None
    trainer.hang_up(leave=True)
    eventually("the end of the agent", lambda: not is_alive(agent))
    assert place.listener() is None
    assert error in place.log.read_text()


def test_the_memory_of_a_slab_is_freed_with_its_last_holder(node: Node, root: Path) -> None:
    gc.collect()  # objects in reference cycles of earlier tests
    before = _mentions(os.getpid())
    trainer = node.trainer(root)
    assert trainer.save(1).error is None
    agent = trainer.client.agent_pid
    assert "memfd:flashckpt-0" in _open_files(agent)
    assert _mentions(os.getpid()) > before
    trainer.hang_up(leave=True)
    eventually("the end of the agent", lambda: not is_alive(agent))
    gc.collect()
    assert _mentions(os.getpid()) <= before


def _mentions(pid: int) -> int:
    """Return how many descriptors and mappings of slabs of rank 0 a process has."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return (_open_files(pid) + maps).count("memfd:flashckpt-0")


def _open_files(pid: int) -> str:
    targets = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(path))
    return "\n".join(targets)
