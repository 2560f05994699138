"""A start on a claimed directory: it refuses, waits, or takes the place of the claiming run."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flashckpt.agent import claim as claims
from megatron_flashckpt.agent.claim import ENDED, FINISHING, IDLE, TRAINING, Claim, RunKey
from megatron_flashckpt.agent.incarnations import process_with
from megatron_flashckpt.agent.takeover import is_live, take
from megatron_flashckpt.errors import OtherWriterError, StorageError
from megatron_flashckpt.failpoints import VARIABLE
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.save import claiming
from megatron_flashckpt.storage import patient
from megatron_flashckpt.storage.patient import RetryingStorage
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.conftest import Node
from tests.agent.test_commit import iterations_in
from tests.agent.test_fence import OLD, claim_of, wake
from tests.support.trainer import eventually, is_alive, new_save_id, remove_tree


@pytest.fixture
def storage(root: Path) -> PosixStorage:
    return PosixStorage(root)


@pytest.fixture
def renewing(storage: PosixStorage) -> Iterator[Callable[[Claim], None]]:
    """Return a function that lets a writer elsewhere renew a claim until the claim is replaced."""
    done = threading.Event()
    writers = []

    def renew(claim: Claim) -> None:
        former = claim
        for number in itertools.count():
            renewed = claim_of(claim.key, state=claim.state, renewed_at=float(number))
            if done.wait(0.02) or not claims.renew(storage, former, renewed):
                return
            former = renewed

    def begin(claim: Claim) -> None:
        claims.put(storage, claim)
        writers.append(threading.Thread(target=renew, args=(claim,)))
        writers[-1].start()

    yield begin
    done.set()
    for writer in writers:
        writer.join()


def epoch_in(storage: PosixStorage) -> int:
    claim = claims.read(storage)
    assert claim is not None
    return claim.epoch


def test_a_refused_start_names_the_writer_and_changes_nothing(
    node: Node, other_node: Node, root: Path
) -> None:
    first = node.trainer(root)
    run = first.claim().run_id
    assert first.save(1).error is None
    eventually("the removal of commit records", lambda: not list(root.rglob("*.commit")))
    later = other_node.trainer(root)

    def listing() -> set[Path]:
        return set(root.rglob("*"))

    before = listing()
    with pytest.raises(OtherWriterError) as caught:
        later.claim()
    (agent,) = node.agents()
    message = str(caught.value)
    for words in (run, f"agent {agent} on {os.uname().nodename}", time.strftime("%Y-%m-%d")):
        assert words in message
    assert listing() == before
    assert first.save(2).error is None, "the first run continues undisturbed"


def test_a_restart_on_the_same_node_does_not_wait(node: Node, root: Path) -> None:
    first = node.trainer(root)
    keys = [first.claim()]
    assert first.save(1).error is None
    for iteration in (2, 3):
        first.hang_up()
        first = node.trainer(root)
        keys.append(first.claim())
        assert first.save(iteration).error is None
    assert [key.epoch for key in keys] == [1, 2, 3]
    assert iterations_in(root) == [1, 2, 3]


def test_slots_staged_before_a_restart_are_committed_after_it(
    node: Node, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent is committing a save of the former run when the next run claims the directory."""
    monkeypatch.setenv(VARIABLE, f"agent:commit.ready:1:STOP:{tmp_path / 'reached'}")
    config = node.config(answer_timeout_s=600.0)
    first = node.trainer(root, config=config)
    first.claim()
    asking = threading.Thread(target=first.stage, args=(1, new_save_id()))
    asking.start()
    eventually("the agent is stopped", (tmp_path / "reached").exists)
    agent = first.client.agent_pid
    waking = threading.Timer(0.5, lambda: eventually("the agent is stopped", lambda: wake(agent)))
    waking.start()
    second = node.trainer(root, config=config)
    second.claim()
    eventually("a commit", (root / file_names.iteration_dir(1) / file_names.MANIFEST).exists)
    asking.join()
    waking.join()


@pytest.mark.parametrize("state", [IDLE, ENDED])
def test_a_start_does_not_wait_for_a_finished_run(
    node: Node, root: Path, storage: PosixStorage, state: int
) -> None:
    claims.put(storage, claim_of(OLD, state=state))
    assert node.trainer(root).claim().epoch == OLD.epoch + 1


def test_a_start_takes_a_claim_that_no_agent_renews(
    node: Node, root: Path, storage: PosixStorage
) -> None:
    """The times in the claim have no effect, because clocks of hosts are not compared."""
    claims.put(storage, claim_of(OLD, renewed_at=time.time() + 3600.0))
    assert node.trainer(root).claim().epoch == OLD.epoch + 1


def test_a_start_does_not_wait_for_an_ended_process_of_this_machine(
    node: Node, root: Path, storage: PosixStorage
) -> None:
    me = process_with(os.getpid())
    assert me is not None
    own_claim = claim_of(OLD, machine=claims.this_host(), started=me.started)
    gone = claim_of(OLD, machine=claims.this_host(), started=me.started - 1, interval_s=1e3)
    assert not own_claim.is_of_dead_process
    assert gone.is_of_dead_process
    claims.put(storage, gone)
    assert node.trainer(root).claim().epoch == OLD.epoch + 1


def test_a_start_waits_for_a_run_to_end(
    node: Node, root: Path, storage: PosixStorage, renewing: Callable[[Claim], None]
) -> None:
    renewing(claim_of(OLD))
    trainer = node.trainer(root)
    with pytest.raises(OtherWriterError):
        trainer.claim()
    ending = threading.Timer(0.3, lambda: claims.put(storage, claim_of(OLD, state=ENDED)))
    ending.start()
    assert trainer.claim(wait_s=60.0).epoch == OLD.epoch + 1
    ending.join()


def test_a_start_waits_a_bounded_time_for_the_staged_saves_of_another_agent(
    node: Node, root: Path, renewing: Callable[[Claim], None]
) -> None:
    renewing(claim_of(OLD, state=FINISHING))
    assert node.trainer(root).claim(wait_s=0.2).epoch == OLD.epoch + 1


def test_a_start_waits_for_another_agent_that_commits_staged_saves(
    node: Node, other_node: Node, root: Path, storage: PosixStorage, tmp_path: Path
) -> None:
    third = Node(tmp_path / "run3")
    try:
        first = node.trainer(root, 0, 2)
        key = first.claim()
        slow = third.trainer(root, 1, 2)
        slow.client.hold(key)
        first.stage(1, save_id := new_save_id())
        first.hang_up()

        def is_finishing() -> bool:
            claim = claims.read(storage)
            return claim is not None and claim.state == FINISHING

        eventually("the agent waits for rank 1", is_finishing)
        staging = threading.Timer(0.5, lambda: slow.stage(1, save_id))
        staging.start()
        other_node.trainer(root).claim(wait_s=60.0)
        assert (root / file_names.iteration_dir(1) / file_names.MANIFEST).exists()
        assert (root / file_names.TRACKER).read_text() == "1"
        staging.join()
    finally:
        third.close()


def test_an_agent_that_has_joined_the_new_run_does_not_block_its_start(
    node: Node, other_node: Node, root: Path
) -> None:
    """A requeue reassigns ranks, so the agent that renews the claim has rank 1 of the next run."""
    first = node.trainer(root)
    first.claim()
    assert first.save(1).error is None
    first.hang_up()
    moved = node.trainer(root, 1, 2)
    later = other_node.trainer(root, 0, 2)
    key = later.claim()
    moved.client.hold(key)
    save_id = new_save_id()
    moved.stage(2, save_id)
    later.stage(2, save_id)
    assert later.outcome().error is None
    assert moved.outcome().error is None


@pytest.mark.parametrize(
    ("epoch", "from_memory"),
    [(3, False), (3, True), (2, False)],
    ids=["a run missed", "from memory", "no run missed"],
)
def test_a_node_that_missed_a_run_gives_up_saves_without_a_committing_agent(
    node: Node, root: Path, storage: PosixStorage, epoch: int, from_memory: bool
) -> None:
    """Rank 1 was on another node meanwhile, and the agent of rank 0 gave the save up or is gone.

    A save that the agent of rank 0 may still commit is kept.
    """
    first, later = RunKey(1, "aaaaaaaa"), RunKey(epoch, "cccccccc")
    claims.put(storage, claim_of(first))
    hung = node.trainer(root, 1, 2)
    hung.client.hold(first)
    hung.stage(4, stale := new_save_id())
    record = root / file_names.iteration_dir(4) / file_names.record_name(1, stale)
    eventually("the commit record", record.exists)
    resumed_from = new_save_id()
    if from_memory:
        assert hung.keep(5, resumed_from).error is None
    hung.hang_up()
    claims.put(storage, claim_of(later))
    back = node.trainer(root, 1, 2)
    back.client.hold(later)
    back.take()
    back.client.resume_from(resumed_from, 6)
    if epoch == 3 and not from_memory:
        eventually("the removal of the save that was given up", lambda: not record.parent.exists())
        back.hang_up(leave=True)
        eventually("the end of the agent", lambda: not node.agents())
    else:
        assert back.client.poll(1.0).pending == 1
        assert record.exists()


def test_two_simultaneous_starts_leave_one_writer(node: Node, other_node: Node, root: Path) -> None:
    """Both runs may have claimed the directory, but only one of them can save."""
    starts = [node.trainer(root), other_node.trainer(root)]
    errors: list[BaseException | None] = [None, None]

    def start(number: int) -> None:
        try:
            starts[number].claim()
        except OtherWriterError as error:
            errors[number] = error

    threads = [threading.Thread(target=start, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    saved = [
        error is None and trainer.save(1).error is None
        for trainer, error in zip(starts, errors, strict=True)
    ]
    assert saved.count(True) == 1


class _BusyOnceStorage(PosixStorage):
    """Storage that refuses the first put, and calls `meanwhile` before the second one."""

    meanwhile: Callable[[], object] | None = None

    def put(self, name: str, *args: Any, **named: Any) -> None:
        if self.meanwhile is not None:
            self.meanwhile()
            self.meanwhile = None
            raise StorageError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        super().put(name, *args, **named)


def test_a_retried_claim_does_not_replace_a_claim_put_meanwhile(
    node: Node, other_node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patient, "RETRIES_S", (0.001,))
    first, other = node.trainer(root), other_node.trainer(root)
    storage = _BusyOnceStorage(root)
    storage.meanwhile = other.claim
    with pytest.raises(OtherWriterError, match="trains and saves there"):
        take(RetryingStorage(storage), "aaaaaaaa", lambda: first.client, "refuse", 0.0)
    assert other.save(1).error is None


def test_a_run_keeps_a_recreated_directory_that_it_claimed(
    node: Node, other_node: Node, root: Path, storage: PosixStorage
) -> None:
    """The epoch of its claim is lower than that of the former run, whose agent still runs."""
    first = node.trainer(root)
    for _ in range(3):
        first.claim()
    assert first.save(1).error is None
    remove_tree(root)
    later = other_node.trainer(root)
    assert later.claim("take_over").epoch == 1
    assert "has taken over" in str(first.save(2).error)
    assert later.save(2).error is None
    assert epoch_in(storage) == 1


def test_an_invalid_claim_is_replaced(node: Node, root: Path, storage: PosixStorage) -> None:
    storage.put(file_names.CLAIM, b"garbage")
    trainer = node.trainer(root)
    assert trainer.claim().epoch == 1
    assert trainer.save(1).error is None


def test_the_claim_shows_whether_a_job_is_live(
    storage: PosixStorage, renewing: Callable[[Claim], None]
) -> None:
    assert is_live(storage) is None
    claims.put(storage, claim_of(OLD))
    assert is_live(storage) is None, "no agent renews the claim"
    renewing(claim_of(RunKey(2, "cccccccc"), state=TRAINING))
    claim = is_live(storage)
    assert claim is not None
    assert claim.run_id == "cccccccc"


class _AwayStorage(PosixStorage):
    """Storage that answers the second read late, with what it held before."""

    reads = 0
    away_s = 0.0
    back: Callable[[], object]

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        held = super().read(name, offset, nbytes)
        self.reads += 1
        if self.reads == 2:
            time.sleep(self.away_s)
            self.back()
        return held


def test_a_writer_without_storage_is_not_taken_for_dead(
    node: Node, root: Path, renewing: Callable[[Claim], None]
) -> None:
    """Storage was away for both jobs; before, the second one then replaced the first."""
    claim = claim_of(OLD, interval_s=0.5)
    storage = _AwayStorage(root)
    storage.back = lambda: renewing(claim)
    storage.away_s = 1.1 * claim.patience_s
    claims.put(storage, claim)
    trainer = node.trainer(root)
    with pytest.raises(OtherWriterError, match="trains and saves there"):
        take(storage, "aaaaaaaa", lambda: trainer.client, "refuse", 0.0)
    assert storage.reads > 2


def test_the_next_agent_of_a_run_renews_its_claim(
    node: Node, root: Path, storage: PosixStorage
) -> None:
    trainer = node.trainer(root)
    key = trainer.claim()
    (agent,) = node.agents()
    os.kill(agent, 9)
    eventually("the end of the agent", lambda: not is_alive(agent))
    trainer.find_agent()
    trainer.client.hold(key)
    (successor,) = node.agents()

    def renewed() -> bool:
        claim = claims.read(storage)
        assert claim is not None
        assert claim.key == key
        return claim.pid == successor

    eventually("a renewal", renewed)


def test_a_start_retries_transient_errors_of_storage(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = node.trainer(root)
    link: Any = SimpleNamespace(client=lambda: trainer.client, agent=trainer.client)
    opened, refused = os.open, []

    def refuse_once(path: Any, *args: Any, **named: Any) -> int:
        if path == root and not refused:
            refused.append(path)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return opened(path, *args, **named)

    replaced, not_put = os.replace, []

    def replace_and_report_an_error(path: Any, to: Any) -> None:
        replaced(path, to)
        if Path(to).name == claims.CLAIM and not not_put:
            not_put.append(to)
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    monkeypatch.setattr(patient, "RETRIES_S", (0.001,))
    monkeypatch.setattr(os, "open", refuse_once)
    monkeypatch.setattr(os, "replace", replace_and_report_an_error)
    made = claiming.begin(link, str(root), node.config(), None)
    assert refused == [root]
    assert not_put == [root / claims.CLAIM]
    claim = claims.read(PosixStorage(root))
    assert claim is not None
    assert claim.run_id == made
