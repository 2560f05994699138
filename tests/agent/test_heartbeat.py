"""The agent of a run's rank 0 shows that the run trains, and takes the sign away in time."""

from __future__ import annotations

import concurrent.futures
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flashckpt.agent import alive
from megatron_flashckpt.agent.heartbeat import Heartbeat
from megatron_flashckpt.agent.own_files import OwnFiles
from megatron_flashckpt.catalog import directory, lineage
from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.catalog.listing import committed_iterations
from megatron_flashckpt.errors import OtherWriterError, StorageError
from megatron_flashckpt.file_format.file_names import (
    ALIVE,
    HISTORY,
    OWN,
    TRACKED,
    alive_file,
    run_file,
    save_name,
)
from megatron_flashckpt.file_format.run_object import RunObject
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.agent.conftest import ALSO_IN_A_BUCKET, Node
from tests.support.memory_store import MemoryStore
from tests.support.stored import names_in
from tests.support.trainer import (
    FakeTrainer,
    blocked_shard,
    eventually,
    kill_agent,
    remove_tree,
)

RUN, LATER = RunObject(name="000001-aaaa"), RunObject(name="000002-bbbb")


class _Agent:
    """The parts of an agent that the heartbeat looks at."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.node: Any = SimpleNamespace(
            changed=threading.Condition(),
            run=None,
            leads=False,
            ranks={},
            store=self.store,
            save_at=0,
        )
        self.committer: Any = SimpleNamespace(pending={})
        self.heartbeat = Heartbeat(self.node, self.committer)

    def change(self, **changes: Any) -> None:
        with self.node.changed:
            for name, value in changes.items():
                setattr(self.committer if name == "pending" else self.node, name, value)
            self.node.changed.notify_all()

    def shows(self) -> list[tuple[str, str]]:
        """Return run and state in all objects."""
        found = [alive.decode(self.store.get(name), name) for name in self.signs()]
        return [(each.run, each.state) for each in found]

    def signs(self) -> list[str]:
        with self.store.lock:
            return [name for name in self.store.objects if name.startswith(ALIVE)]


@pytest.fixture
def agent() -> Iterator[_Agent]:
    made = _Agent()
    made.heartbeat.start()
    yield made
    made.heartbeat.close()
    assert not made.signs(), "an agent that ends leaves no sign of life"


def trainer(run: str, *, is_connected: bool = True) -> Any:
    connection = object() if is_connected else None
    process = SimpleNamespace(served=None)
    return SimpleNamespace(
        run=run, connection=connection, slots=None, left=False, incarnations=process
    )


def test_a_run_is_shown_as_long_as_it_trains_or_writes(agent: _Agent) -> None:
    def becomes(*shown: tuple[str, str], **changes: Any) -> None:
        agent.change(**changes)
        eventually(f"{shown} after {changes}", lambda: agent.shows() == [*shown])

    connected, later = {0: trainer(RUN.name)}, {0: trainer(LATER.name)}
    gone = {0: trainer(RUN.name, is_connected=False)}
    becomes((RUN.name, "training"), run=RUN, leads=True, ranks=connected)
    becomes((RUN.name, "finishing"), ranks=gone, pending={"a save": object()})
    becomes(pending={})  # only memory is kept
    becomes((RUN.name, "training"), ranks=connected)
    becomes((LATER.name, "training"), run=LATER, ranks=later)
    becomes(leads=False)  # rank 0 has moved to another node


def test_the_sign_of_a_run_that_left_before_its_first_renewal_is_deleted() -> None:
    """A start has put it before the agent hears of the run, and the agent may end at once."""
    agent = _Agent()
    alive.put(agent.store, alive.sign_of_life(RUN.name, "training", os.getpid()))
    agent.change(run=RUN, leads=True, ranks={0: trainer(RUN.name, is_connected=False)})
    agent.heartbeat.start()
    agent.heartbeat.close()
    assert not agent.signs()


def test_the_deletion_is_tried_again_when_an_agent_leaves(
    agent: _Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next start would wait until the run counts as silent."""
    delete, refused = agent.store.delete, []

    def refuse_once(names: Any) -> None:
        if not refused:
            refused.append(names)
            raise StorageError(errno.ESTALE, os.strerror(errno.ESTALE))
        delete(names)

    agent.change(run=RUN, leads=True, ranks={0: trainer(RUN.name)})
    eventually("training", agent.shows)
    monkeypatch.setattr(agent.store, "delete", refuse_once)
    agent.heartbeat.close()
    assert refused
    assert not agent.signs()


def test_files_that_come_into_view_late_were_not_removed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    store.create(run_file(1), b"the run")
    monkeypatch.setattr(store, "stat", lambda _: None)
    OwnFiles().keep(store, RUN)
    assert store.get(run_file(1)) == b"the run"
    assert not caplog.records


# ---------------------------------------------------------------------- with real agents


def renewed(root: Path | str, run: str) -> alive.Alive | None:
    found = alive.read(open_store(root), run)
    return found if found is not None and found.renewed else None


@ALSO_IN_A_BUCKET
def test_a_second_job_is_refused_and_a_restart_is_not(
    node: Node, other_node: Node, root: Path | str
) -> None:
    first = node.trainer(root)
    run = first.open_run()
    assert first.save(1, save_name(run.name, 1)).error is None
    eventually("a renewal", lambda: renewed(root, run.name))
    eventually("the removal of commit records", lambda: ".record" not in str(names_in(root)))
    eventually("the history of the save", lambda: HISTORY in str(names_in(root)))
    eventually("complete files", lambda: ".tmp" not in str(names_in(root)))
    before = names_in(root)
    with pytest.raises(OtherWriterError, match=run.name):
        other_node.trainer(root).open_run()
    assert names_in(root) == before
    first.hang_up()
    again = node.trainer(root)
    assert again.open_run().name.startswith("000002-")
    again.hang_up(leave=True)
    eventually("the end of the agent", lambda: not node.agents())
    assert not [name for name in names_in(root) if name.startswith(ALIVE)]


@pytest.mark.second_tier
def test_of_two_starts_at_one_moment_one_goes_on_and_the_other_leaves_nothing(
    node: Node, other_node: Node, root: Path
) -> None:
    begin = threading.Barrier(2)

    def start(trainer: FakeTrainer) -> RunObject | OtherWriterError:
        begin.wait()
        try:
            return trainer.open_run()
        except OtherWriterError as error:
            return error

    trainers = [place.trainer(root) for place in (node, other_node)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        run, error = sorted(pool.map(start, trainers), key=lambda it: isinstance(it, Exception))
    assert isinstance(run, RunObject)
    assert isinstance(error, OtherWriterError)
    assert run.name in str(error)
    own = sorted([run_file(1), alive_file(run.name)])
    eventually("nothing else", lambda: names_in(root) == own)
    (first,) = (trainer for trainer in trainers if trainer.run == run)
    assert first.save(1).error is None


@pytest.mark.second_tier
def test_a_restart_on_another_node_waits_for_the_staged_save_of_the_former_run(
    node: Node, other_node: Node, root: Path
) -> None:
    first = node.trainer(root)
    first.open_run()
    save_id = first.new_save_id()
    with blocked_shard(root, 2, 0, save_id) as unblock:
        first.stage(2, save_id)
        first.hang_up()
        later = other_node.trainer(root)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            starting = pool.submit(later.open_run, wait_s=60.0)
            time.sleep(1.5 * alive.INTERVAL_S)
            assert not starting.done()
            unblock()
            starting.result(60.0)
    assert committed_iterations(PosixStore(root)) == [2]


def test_the_next_agent_of_a_run_renews_its_sign_of_life(node: Node, root: Path) -> None:
    first = node.trainer(root)
    run = first.open_run()
    kill_agent(first.client.agent_pid)
    first.find_agent()
    successor = first.client.agent_pid

    def is_renewed() -> bool:
        found = renewed(root, run.name)
        return found is not None and found.pid == successor

    eventually("a renewal", is_renewed)


def test_memory_counts_though_our_directory_was_removed_while_the_run_trained(
    node: Node, root: Path
) -> None:
    """Alone, a tracker would be a person's wish, which excludes newer checkpoints in memory."""
    first = node.trainer(root)
    run = first.open_run()
    assert first.save(2).error is None
    kept = first.keep(4)
    eventually("a renewal", lambda: renewed(root, run.name))
    own = root / OWN
    before = {name: (root / name).read_bytes() for name in (TRACKED, run_file(1))}
    time.sleep(alive.INTERVAL_S)  # the agent has seen the twin of this commit
    remove_tree(own)
    eventually("the same files", lambda: (root / run_file(1)).exists())
    assert {name: (root / name).read_bytes() for name in before} == before
    log = node.log(root)
    eventually("a line", lambda: "removed while run 000001-" in log.read_text())
    first.hang_up()
    held = {Save(4, kept.save_id): run.ancestors}
    facts = directory.read_facts(PosixStore(root), held)
    assert lineage.choose(facts).candidates[0] == (Save(4, kept.save_id), True)


def test_a_removed_directory_of_a_job_at_rest_stays_removed(node: Node, root: Path) -> None:
    """A person may remove it to let the tracker lead, which no agent may prevent."""
    first = node.trainer(root)
    first.open_run()
    assert first.save(2).error is None
    first.hang_up()
    eventually("the end of the sign of life", lambda: not list((root / OWN / "alive").glob("*")))
    remove_tree(root / OWN)
    node.trainer(root).open_run()
    time.sleep(1.2 * alive.INTERVAL_S)
    assert not (root / TRACKED).exists()
