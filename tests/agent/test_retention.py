"""Retention: the rules that keep checkpoints, the limits of a removal, and removals cut short."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flashckpt import report_metric
from megatron_flashckpt.agent.commit import commit
from megatron_flashckpt.catalog.retention import (
    committed,
    finish,
    removable,
    retire,
    why_kept,
)
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.config import Best, Retention
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.manifest import CommitFacts
from megatron_flashckpt.metrics import Metrics, reported
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.conftest import Node
from tests.agent.test_commit import iterations_in
from tests.agent.test_failures import assert_intact
from tests.agent.test_shard_writer import read_rank, stored
from tests.support.persisting import persisted
from tests.support.trainer import FakeTrainer, blocked_open, content, eventually, new_save_id

LOSS = "lm loss validation"
HOUR = 3600.0


def kept_by(rules: Retention, losses: dict[int, float | None], **more: object) -> list[int]:
    """Return the kept checkpoints of these losses; their commits are one hour apart."""
    count = len(losses)
    commits = [
        CommitFacts(
            iteration=iteration,
            save_id=f"{iteration:08x}",
            committed_at=HOUR * n,
            metrics={} if loss is None else {LOSS: loss},
        )
        for n, (iteration, loss) in enumerate(sorted(losses.items()))
    ]
    situation = {"retain_interval": None, "tracked": max(losses), "previous": None, **more}
    reasons = why_kept(commits, rules, **{"now": HOUR * (count - 1), **situation})
    return sorted(iteration for iteration, why in reasons.items() if why)


TEN = dict.fromkeys(range(10, 110, 10))
MEASURED = {10: 3.0, 20: 1.0, 30: 2.0, 40: None, 50: 1.0, 60: 9.0}


@pytest.mark.parametrize(
    ("rules", "losses", "kept"),
    [
        (Retention(), TEN, list(TEN)),
        (Retention(latest=1), TEN, [100]),
        (Retention(latest=3), TEN, [80, 90, 100]),
        (Retention(latest=99), TEN, list(TEN)),
        (Retention(every=30), TEN, [30, 60, 90, 100]),
        (Retention(every=30, latest=2), TEN, [30, 60, 90, 100]),
        (Retention(every=50, latest=2), TEN, [50, 90, 100]),
        (Retention(max_age_hours=2.5), TEN, [80, 90, 100]),
        (Retention(max_age_hours=0), TEN, [100]),
        (Retention(max_age_hours=2.5, every=40), TEN, [40, 80, 90, 100]),
        # The newest of equal losses is kept.
        (Retention(best=Best(metric=LOSS)), MEASURED, [50, 60]),
        (Retention(best=Best(metric=LOSS, keep=3)), MEASURED, [20, 30, 50, 60]),
        (Retention(best=Best(metric=LOSS, keep=2, mode="max")), MEASURED, [10, 60]),
        (Retention(best=Best(metric=LOSS), latest=2, every=10), MEASURED, list(MEASURED)),
        (Retention(best=Best(metric="never reported")), MEASURED, list(MEASURED)),
    ],
)
def test_a_checkpoint_stays_if_any_rule_keeps_it(
    rules: Retention, losses: dict[int, float | None], kept: list[int]
) -> None:
    assert kept_by(rules, losses) == kept


def test_without_rules_megatrons_interval_removes_only_the_previous_checkpoint() -> None:
    assert kept_by(Retention(), TEN, retain_interval=20, previous=90) == sorted({*TEN} - {90})
    assert kept_by(Retention(), TEN, retain_interval=30, previous=90) == list(TEN)
    assert kept_by(Retention(latest=1), TEN, retain_interval=40, previous=90) == [40, 80, 100]


def test_a_checkpoint_of_unknown_age_never_counts_as_too_old() -> None:
    commit = CommitFacts(iteration=1, save_id="a" * 8)
    last = CommitFacts(iteration=2, save_id="b" * 8, committed_at=HOUR)
    reasons = why_kept(
        [commit, last],
        Retention(max_age_hours=1),
        retain_interval=None,
        tracked=2,
        previous=1,
        now=HOUR * 1000,
    )
    assert all(reasons.values())


RULES = st.builds(
    Retention,
    latest=st.none() | st.integers(1, 5),
    every=st.none() | st.integers(1, 5),
    best=st.none()
    | st.builds(
        Best,
        metric=st.sampled_from([LOSS, "other"]),
        keep=st.integers(1, 3),
        mode=st.sampled_from(["min", "max"]),
    ),
    max_age_hours=st.none() | st.floats(0, 20),
)


@settings(max_examples=300, deadline=None)
@given(
    rules=RULES,
    losses=st.dictionaries(st.integers(0, 30), st.none() | st.floats(-5, 5), min_size=1),
    tracked=st.integers(0, 30),
    retain_interval=st.none() | st.integers(1, 6),
    data=st.data(),
)
def test_no_rule_removes_a_checkpoint_newer_than_the_last_durable_one(
    rules: Retention,
    losses: dict[int, float | None],
    tracked: int,
    retain_interval: int | None,
    data: st.DataObject,
) -> None:
    previous = data.draw(st.none() | st.sampled_from(sorted(losses)))
    situation = {"tracked": tracked, "retain_interval": retain_interval, "previous": previous}
    kept = kept_by(rules, losses, **situation)
    gone = set(losses) - set(kept)
    assert all(iteration < tracked for iteration in gone)
    if rules == Retention():
        assert gone <= (set() if retain_interval is None else {previous})
    if rules.latest is not None:
        newest = sorted(number for number in losses if number <= tracked)[-rules.latest :]
        assert set(newest) <= set(kept)
    for interval in filter(None, (rules.every, retain_interval)):
        assert all(iteration % interval for iteration in gone)
    # A combination keeps every checkpoint that one of its rules keeps.
    for field in ("latest", "every", "best", "max_age_hours"):
        alone = Retention(**{field: getattr(rules, field)})
        if alone != Retention():
            assert set(kept_by(alone, losses, **situation)) <= set(kept)


# ---------------------------------------------------------------------- through the agent


def save_all(trainer: FakeTrainer, losses: dict[int, float | None]) -> None:
    for iteration, loss in losses.items():
        trainer.metrics = {} if loss is None else {LOSS: loss}
        outcome = trainer.save(iteration)
        assert outcome.error is None


def assert_these_are_left_whole(root: Path, trainer: FakeTrainer, iterations: list[int]) -> None:
    eventually(
        "the removal of the other checkpoints",
        lambda: (
            iterations_in(root) == iterations
            and not [path for path in root.iterdir() if path.name.endswith(".removed")]
        ),
    )
    for iteration in iterations:
        expected = content(trainer.rank, iteration, trainer.layout.nbytes)
        assert read_rank(stored(root, iteration), trainer) == expected


def test_rules_hold_over_restarts_of_trainer_and_agent(node: Node, root: Path) -> None:
    """The best checkpoint was saved three agents ago, so only the commit log names it."""
    rules = Retention(latest=2, best=Best(metric=LOSS, keep=1))
    losses = {10: 5.0, 20: 1.0, 30: 4.0, 40: 3.0, 50: None, 60: 2.0}
    for iteration, loss in losses.items():
        trainer = node.trainer(root, retention=rules)
        save_all(trainer, {iteration: loss})
        eventually(
            "the removal of checkpoints without a rule", lambda: len(iterations_in(root)) <= 3
        )
        trainer.hang_up()
        for pid in node.agents():
            os.kill(pid, signal.SIGKILL)
    trainer = node.trainer(root, retention=rules)
    assert_these_are_left_whole(root, trainer, [20, 50, 60])
    facts = committed(PosixStorage(root), os.listdir(root))
    assert {entry.iteration: entry.metrics for entry in facts} == {
        20: {LOSS: 1.0},
        50: {},
        60: {LOSS: 2.0},
    }
    assert all(abs(time.time() - (entry.committed_at or 0)) < HOUR for entry in facts)


def test_the_lowest_metric_of_all_ranks_counts(node: Node, root: Path) -> None:
    trainers = [node.trainer(root, rank, 3) for rank in range(3)]
    save_id = new_save_id()
    for trainer, metrics in zip(trainers, ({}, {"a": 1.0}, {"a": 2.0, "b": 3.0}), strict=True):
        trainer.metrics = metrics
        trainer.stage(1, save_id)
    assert [trainer.outcome().error for trainer in trainers] == [None] * 3
    assert stored(root, 1).manifest.metrics == {"a": 1.0, "b": 3.0}


def test_a_metric_that_no_checkpoint_has_removes_none_and_is_logged(node: Node, root: Path) -> None:
    trainer = node.trainer(root, retention=Retention(best=Best(metric="los")))
    save_all(trainer, {10: 1.0, 20: 2.0})
    log = node.log(root)
    message = "no checkpoint has the metric 'los'"
    eventually("the log lines of both saves", lambda: log.read_text().count(message) == 2)
    assert_these_are_left_whole(root, trainer, [10, 20])


def test_new_rules_apply_to_existing_checkpoints(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    save_all(trainer, dict.fromkeys(range(1, 8)))
    trainer.retention = Retention(every=3)
    save_all(trainer, {8: None})
    assert_these_are_left_whole(root, trainer, [3, 6, 8])


def test_retention_handles_an_older_save_that_commits_last(node: Node, root: Path) -> None:
    """Two saves are in flight; the older one counts for retention only after its commit."""
    trainer = node.trainer(root, retention=Retention(latest=2))
    save_all(trainer, {1: None, 2: None})
    earlier = new_save_id()
    with blocked_open(
        root / file_names.iteration_dir(10) / file_names.shard_name(0, earlier)
    ) as unblock:
        trainer.stage(10, earlier)
        trainer.stage(20, new_save_id())
        assert trainer.outcome().iteration == 20
        assert (root / file_names.iteration_dir(2)).exists(), (
            "10 is not durable, so 2 and 20 are the newest"
        )
        unblock()
        assert trainer.outcome().iteration == 10
    assert_these_are_left_whole(root, trainer, [10, 20])
    assert_intact(root, 20, [trainer])


def test_retention_spares_newer_uncommitted_linked_foreign_and_megatron_files(
    node: Node, root: Path, tmp_path: Path
) -> None:
    trainer = node.trainer(root)
    save_all(trainer, dict.fromkeys((5, 10, 20, 30, 99)))
    trainer.hang_up()
    trainer = node.trainer(root, retention=Retention(latest=1))
    trainer.client.resume_from(None, 35)  # training resumes from before 99
    elsewhere = tmp_path / "elsewhere"
    (root / file_names.iteration_dir(10)).rename(elsewhere)
    (root / file_names.iteration_dir(10)).symlink_to(elsewhere)
    others = {
        # These are Megatron's own format, a manual copy, and a damaged manifest.
        "iter_0000001/.metadata": b"torch_dist",
        "iter_0000002/mp_rank_00/model_optim_rng.pt": b"torch",
        "iter_0000004/manifest.json": (
            root / file_names.iteration_dir(30) / file_names.MANIFEST
        ).read_bytes(),
        "iter_0000006/manifest.json": b"{}",
        "release/mp_rank_00/model_optim_rng.pt": b"release",
        "iter_20/manifest.json": b"not a name of Megatron's",
        "tensorboard/events": b"events",
        # These files lie in a checkpoint that is removed.
        "iter_0000020/notes.txt": b"mine",
    }
    for name, data in others.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    before = sorted(elsewhere.iterdir())
    shard = next((root / file_names.iteration_dir(5)).glob("*.safetensors"))
    shard.rename(tmp_path / "moved")
    shard.symlink_to(tmp_path / "moved")
    save_all(trainer, {40: None})
    log = node.log(root)
    ends = [f"the checkpoint of iteration {gone} (" for gone in (5, 20, 30)]
    eventually("all removals", lambda: all(end in log.read_text() for end in ends))
    assert {name: (root / name).read_bytes() for name in others} == others
    assert sorted(elsewhere.iterdir()) == before
    assert (root / file_names.iteration_dir(10)).is_symlink()
    assert os.listdir(root / file_names.iteration_dir(5)) == [shard.name], (
        "retention keeps the link"
    )
    assert (tmp_path / "moved").exists()
    assert not list((root / file_names.iteration_dir(20)).glob("*.json")), (
        "the rest is no checkpoint"
    )
    assert not (root / file_names.iteration_dir(30)).exists()
    assert read_rank(stored(root, 99), trainer) == content(0, 99, trainer.layout.nbytes)
    assert_intact(root, 40, [trainer])
    assert (
        f"{root}/iter_0000020: the checkpoint was removed, but the directory stays"
        in log.read_text()
    )
    assert "notes.txt" in log.read_text()


def test_a_failed_removal_does_not_fail_the_save(node: Node, root: Path) -> None:
    trainer = node.trainer(root, retention=Retention(latest=1))
    save_all(trainer, {1: None})
    manifest = stored(root, 1).manifest
    (root / file_names.removal_name(1, manifest.save_id)).mkdir()  # blocks the first step
    save_all(trainer, {2: None})
    log = node.log(root)
    eventually(
        "the log line of the failed removal",
        lambda: "cannot remove the checkpoint of" in log.read_text(),
    )
    assert read_rank(stored(root, 1), trainer) == content(0, 1, trainer.layout.nbytes)
    assert_intact(root, 2, [trainer])


# ---------------------------------------------------------------------- cut short


class _KilledStorage(PosixStorage):
    """Real storage of a process that is killed before its n-th change."""

    def __init__(self, root: Path, changes: int) -> None:
        super().__init__(root)
        self._left = changes
        self._counting = threading.Lock()

    def _count(self) -> None:
        with self._counting:
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1

    def move(self, name: str, to: str) -> None:
        self._count()
        super().move(name, to)

    def delete(self, name: str) -> None:
        self._count()
        super().delete(name)

    def delete_directory(self, name: str) -> None:
        self._count()
        super().delete_directory(name)


def in_a_process_that_may_die(work: Callable[[], None]) -> bool:
    """Run `work` in a child; return whether the child survived."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or not os.WEXITSTATUS(status), (
        "the child failed instead of being killed"
    )
    return not os.WIFSIGNALED(status)


@contextlib.contextmanager
def paused(pids: list[int]) -> Iterator[None]:
    """Stop processes, because an agent that tidies late would complete an unfinished removal."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_a_removal_killed_at_any_change_leaves_whole_checkpoints_only(
    node: Node, root: Path
) -> None:
    """Two checkpoints are removed, with a SIGKILL before each change in turn."""
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]

    def save(iteration: int) -> None:
        save_id = new_save_id()
        for trainer in trainers:
            trainer.stage(iteration, save_id)
        assert [trainer.outcome().error for trainer in trainers] == [None, None]
        # Otherwise the agent may carry out changes that the test has to count.
        eventually("the removal of commit records", lambda: not list(root.rglob("*.commit")))

    def remove(changes: int, tracked: int) -> None:
        rules = Retention(latest=1)
        retire(
            _KilledStorage(root, changes),
            rules,
            retain_interval=None,
            tracked=tracked,
            previous=None,
        )

    iteration, changes, died = 1, 0, True
    save(iteration)
    while died:
        for _ in range(2):
            iteration += 1
            save(iteration)
        with paused(node.agents()):
            died = not in_a_process_that_may_die(functools.partial(remove, changes, iteration))
        assert_intact(root, iteration, trainers)
        # An offered checkpoint is complete; a checkpoint with a begun removal is not offered.
        for facts in committed(PosixStorage(root), os.listdir(root)):
            for trainer in trainers:
                expected = content(trainer.rank, facts.iteration, trainer.layout.nbytes)
                assert read_rank(stored(root, facts.iteration), trainer) == expected
        for trainer in trainers:
            trainer.retention = Retention(latest=1)
        iteration += 1
        save(iteration)
        assert_these_are_left_whole(root, trainers[0], [iteration])
        for trainer in trainers:
            trainer.retention = Retention()
        changes += 1
    # Each of two removals changes manifest, two shards, common state, directory, moved manifest.
    assert changes - 1 == 2 * 6


def test_a_checkpoint_saved_again_survives_its_former_unfinished_removal(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root)
    save_all(trainer, {1: None, 2: None})

    def remove() -> None:
        rules = Retention(latest=1)
        retire(_KilledStorage(root, 2), rules, retain_interval=None, tracked=2, previous=None)

    assert not in_a_process_that_may_die(remove)
    assert not (root / file_names.iteration_dir(1) / file_names.MANIFEST).exists()
    (root / file_names.TRACKER).unlink()
    trainer.client.resume_from(None, 0)  # training starts from scratch
    save_all(trainer, {1: None, 2: None})
    assert_these_are_left_whole(root, trainer, [1, 2])


def test_a_checkpoint_that_a_user_put_back_stays(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The user has copied the moved manifest, because the removal was interrupted."""
    storage = PosixStorage(root)
    commit(persisted(storage, "a" * 12))
    manifest = root / file_names.iteration_dir(5) / file_names.MANIFEST
    moved = root / file_names.removal_name(5, "a" * 12)
    moved.write_bytes(manifest.read_bytes())
    finish(storage)
    assert verify(stored(root, 5)) == []
    assert not moved.exists()
    assert "iter_0000005: stays, because its manifest was put back" in caplog.text


def test_a_removal_waits_while_a_manifest_that_was_put_back_cannot_be_read(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit(persisted(PosixStorage(root), "a" * 12))
    directory = root / file_names.iteration_dir(5)
    moved = root / file_names.removal_name(5, "a" * 12)
    moved.write_bytes((directory / file_names.MANIFEST).read_bytes())
    read = PosixStorage.read

    def fail(self: PosixStorage, name: str, *rest: int) -> bytes:
        if name.endswith(file_names.MANIFEST):
            raise StorageError(errno.EIO, f"{name}: Input/output error")
        return read(self, name, *rest)

    monkeypatch.setattr(PosixStorage, "read", fail)
    finish(PosixStorage(root))
    assert "cannot remove the checkpoint of iteration 5" in caplog.text
    monkeypatch.undo()
    assert moved.exists()
    finish(PosixStorage(root))
    assert verify(stored(root, 5)) == []
    assert not moved.exists()


# ---------------------------------------------------------------------- what is reported


def test_a_metric_counts_for_one_checkpoint_and_must_be_a_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = Metrics()
    metrics.report("loss", msgspec.json.decode("2.5"))
    metrics.report("accuracy", 1)
    metrics.report("loss", float("nan"))
    assert metrics.current() == {"accuracy": 1.0}
    assert "'loss' is nan" in caplog.text
    metrics.clear()
    assert metrics.current() == {}


def test_the_public_function_reports_to_the_saves_of_this_process() -> None:
    report_metric("a metric of a test", 0.25)
    try:
        assert reported.current()["a metric of a test"] == 0.25
    finally:
        reported.clear()


def test_a_clock_set_forward_makes_no_checkpoint_old(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = node.trainer(root)
    for iteration in (1, 2, 3):
        assert trainer.save(iteration).error is None
    storage, rules = PosixStorage(root), Retention(max_age_hours=1)

    def gone() -> list[int]:
        facts = removable(storage, rules, retain_interval=None, tracked=3, previous=2)
        return [commit.iteration for commit in facts]

    now, steady = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(time, "time", lambda: now + 1000 * HOUR)
    assert gone() == []
    monkeypatch.setattr(time, "clock_gettime", lambda _: steady + 1000 * HOUR)
    assert gone() == [1, 2], "both checkpoints are too old"
    monkeypatch.setattr(time, "time", lambda: now - 1000 * HOUR)
    assert gone() == [], "the clock was set back"
