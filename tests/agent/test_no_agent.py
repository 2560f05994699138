"""A rank whose agent is gone and cannot be replaced: other nodes learn of its failures.

Ranks with an agent are FakeTrainers. The rank without one has the objects of a training process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.errors import AgentError, StorageError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.end import Failure, decode_failure, encode_failure
from megatron_flashckpt.file_format.run_object import RunObject, encode_run
from megatron_flashckpt.file_format.seal import seal
from megatron_flashckpt.memory.slot import Slot, SlotHeader, SlotState
from megatron_flashckpt.save import agent_connection, pending_saves
from megatron_flashckpt.save.failed_ends import FailedEnds
from megatron_flashckpt.save.node_link import NodeLink
from megatron_flashckpt.save.pending_saves import PendingSaves
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.agent.conftest import Node
from tests.support.trainer import eventually, kill_agent, new_save_id

END = f"{file_names.iteration_dir(5)}/{{}}.end"
#: The commit timeout of these agents is 60 s.
SOON_S = 15.0


def open_run_of(root: Path, save_id: str) -> None:
    run = file_names.run_of(save_id)
    encoded = encode_run(RunObject(name=run))
    PosixStore(root).put(file_names.run_file(file_names.run_number(run)), encoded)


class Rank:
    """A rank of two, with its link to the agent of `node` and its saves, but without a model."""

    def __init__(self, node: Node, root: Path, rank: int) -> None:
        self.node, self.root, self.rank = node, root, rank
        self.link = NodeLink(str(root), rank, node.config())
        self.saves = PendingSaves(str(root), rank, self.link)
        open_run_of(root, new_save_id())

    def stage(self, iteration: int, save_id: str) -> Slot:
        """Begin a save and stage its slot, without a message to the agent."""
        slab = self.link.ensure_slab(4096, 4096)
        slot = slab.slots[self.link.client().acquire(1.0)]
        self.saves.expect(save_id, memory_only=False)
        self.saves.begin(save_id, iteration)
        slot.set_header(SlotHeader(SlotState.STAGED, iteration, save_id, 0, 4096))
        return slot

    def failure(self) -> str:
        """Return the error of the only open save of this rank."""
        (outcome,) = eventually("a result of the save", lambda: self.saves.poll(0.05))
        assert outcome.failed_ranks == (self.rank,)
        return outcome.error or ""

    def kill_agent(self) -> None:
        for pid in self.node.agents():
            kill_agent(pid)

    def close(self) -> None:
        self.saves.close()
        self.link.close(leave=False)


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no rank of this process find an agent from now on."""

    def no_connection(*_: object) -> None:
        raise AgentError("no agent answered")

    monkeypatch.setattr(agent_connection, "connect", no_connection)


@pytest.mark.parametrize(("rank", "has_thread"), [(0, True), (1, True), (0, False)])
def test_other_nodes_learn_of_a_part_that_was_lost_with_its_agent(
    node: Node,
    other_node: Node,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    *,
    has_thread: bool,
) -> None:
    """No later save comes, and no other agent starts; at the exit no thread starts either."""
    lonely = Rank(node, root, rank)
    other = other_node.trainer(root, 1 - rank, 2, config=other_node.config(commit_timeout_s=60.0))
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == "flashckpt-failed-ends" and not has_thread:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    save_id = new_save_id()
    slot = lonely.stage(1, save_id)
    lonely.saves.handed_over(save_id)
    other.stage(1, save_id)
    refuse(monkeypatch)
    lonely.kill_agent()
    assert lonely.failure() == f"rank {rank}: no agent answered", "what the end says"
    error = other.outcome(SOON_S).error or ""
    assert error.startswith(f"rank {rank}: ")
    assert slot.header.state == SlotState.FAILED, "no later agent writes this slot"
    lonely.close()


def test_a_save_that_no_agent_got_is_called_off_while_an_agent_is_sought(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent that the rank has lost still runs, and a crash of training waits for nothing."""
    rank, save_id, searched = Rank(node, root, 0), new_save_id(), threading.Event()
    rank.link.ensure_slab(4096, 4096)

    def search(*_: object) -> None:
        searched.wait(SOON_S)
        raise AgentError("no agent answered")

    monkeypatch.setattr(agent_connection, "connect", search)
    rank.saves.replace_lost_agent(rank.link.current, AgentError("gone"))
    rank.saves.expect(save_id, memory_only=False)
    rank.saves.fail(5, save_id, "no memory for it")
    rank.saves.close()
    assert (root / END.format(save_id)).exists()
    assert rank.link.is_preparing
    searched.set()
    rank.link.close(leave=False)


@contextlib.contextmanager
def bare_mount_point(root: Path) -> Iterator[None]:
    """Let `root` be an empty directory in the context, as if its file system was not mounted."""
    root.rename(root.with_name("away"))
    root.mkdir()
    yield
    root.rmdir()
    root.with_name("away").rename(root)


def test_a_part_is_called_off_only_in_the_directory_of_its_run(root: Path) -> None:
    save_id = new_save_id()
    open_run_of(root, save_id)
    ends = FailedEnds(str(root), 1)
    with bare_mount_point(root):
        ends.create(1, save_id, "no memory")
        time.sleep(0.3)
        assert list(root.iterdir()) == []
    end = root / file_names.iteration_dir(1) / file_names.end_name(save_id)
    eventually("the end of the save", end.exists)
    ends.wait()
    assert decode_failure(end.read_bytes()).is_final, "no later attempt has the part"


def test_a_save_is_not_called_off_if_storage_has_the_part(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent has died; another one commits the save, whose checkpoint is soon removed."""
    rank, save_id, store = Rank(node, root, 1), new_save_id(), PosixStore(root)
    rank.stage(5, save_id)
    rank.saves.handed_over(save_id)
    record = file_names.record_name(range(2), save_id)
    store.create(f"{file_names.iteration_dir(5)}/{record}", b"")
    refuse(monkeypatch)
    monkeypatch.setattr(pending_saves, "_ASK_AGAIN_S", 0.01)
    rank.kill_agent()
    for _ in range(20):
        assert rank.saves.poll() == []
        time.sleep(0.05)
    removed = Failure(failed="no rule of 'retention' keeps it", was_removed=True)
    store.create(END.format(save_id), encode_failure(removed))
    (outcome,) = eventually("a result of the save", rank.saves.poll)
    assert (outcome.save_id, outcome.error) == (save_id, None)
    rank.close()


@pytest.fixture
def orphan(node: Node, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rank, str]]:
    """A rank whose agent has committed its save of iteration 5 and died, and the id of the save."""
    made = Rank(node, root, 0)
    save_id = new_save_id()
    made.stage(5, save_id)
    made.saves.handed_over(save_id)
    PosixStore(root).create(END.format(save_id), seal(b"{}"))
    refuse(monkeypatch)
    monkeypatch.setattr(pending_saves, "_ASK_AGAIN_S", 0.01)
    made.kill_agent()
    yield made, save_id
    made.close()


def troubled(root: Path, monkeypatch: pytest.MonkeyPatch, errors: int) -> None:
    """Let the next `errors` reads of the rank report an error that may pass."""
    storage, left = PosixStore(root), iter(range(errors))
    get = storage.get

    def answer(name: str, *where: Any) -> bytes:
        if next(left, None) is not None:
            raise StorageError(errno.ESTALE, f"{name}: {os.strerror(errno.ESTALE)}")
        return get(name, *where)

    monkeypatch.setattr(storage, "get", answer)
    monkeypatch.setattr(pending_saves, "open_store", lambda _: storage)


@pytest.mark.parametrize("trouble", ["errors that pass", "its file system is not mounted"])
def test_a_committed_save_is_no_failure_if_its_end_is_unreadable_for_a_moment(
    orphan: tuple[Rank, str], root: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    rank, save_id = orphan
    if trouble == "errors that pass":
        troubled(root, monkeypatch, errors=5)
    else:
        with bare_mount_point(root):
            for _ in range(20):
                assert rank.saves.poll() == []
                time.sleep(0.02)
    (outcome,) = eventually("a result of the save", rank.saves.poll)
    assert (outcome.save_id, outcome.error) == (save_id, None)
    assert not rank.saves


def test_an_end_that_stays_unreadable_ends_the_wait(
    orphan: tuple[Rank, str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, save_id = orphan
    troubled(root, monkeypatch, errors=10**9)
    monkeypatch.setattr(NodeLink, "commit_timeout_s", 0.3)
    error = rank.failure()
    assert error.startswith("no agent answered; it may still have been committed: ")
    assert error.endswith(f"{END.format(save_id)}: Stale file handle")
    assert not rank.saves
