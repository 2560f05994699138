"""The driver tells trainers what is known of a save, and its machine what concerns that save."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flashckpt.agent import commit_core as core
from megatron_flashckpt.agent import committer as committer_module
from megatron_flashckpt.agent import proposals
from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.agent.commit_core import CommitCore
from megatron_flashckpt.agent.committer import Committer
from megatron_flashckpt.agent.durable_commands import DurableCommands
from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.catalog.lineage import History
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.file_format.end import End, Failure, encode_failure
from megatron_flashckpt.file_format.file_names import (
    TRACKER,
    next_attempt,
    run_file,
    run_number,
    save_name,
    shard_name,
)
from megatron_flashckpt.file_format.run_object import Ancestor, RunObject, encode_run
from tests.support.checkpoints import persist
from tests.support.memory_store import MemoryStore
from tests.support.trainer import eventually, pieces_of

RUN, LATER = RunObject(name="000001-aaaa"), RunObject(name="000002-bbbb")
SAVE = save_name(RUN.name, 1)
TIMEOUT_S = 600.0


class _Rank:
    def __init__(self, run: RunObject) -> None:
        self.slots, self.run = None, run.name
        self.connection: object | None = None
        self.awaited = {SAVE}
        self.told: list[p.Outcome | p.Notice] = []
        self.report = self.told.append


def a_defect(*_: object) -> None:
    raise KeyError("a defect")


def read_only(*_: object) -> None:
    raise PermissionError("read-only")


def pending(
    world_size: int, ranks: dict[int, _Rank], run: RunObject, *, age_s: float = TIMEOUT_S + 60.0
) -> tuple[Committer, Any]:
    """Return a committer with a save that rank 0 has staged, in a node of `run`."""
    options = SimpleNamespace(
        commit_timeout_s=TIMEOUT_S, slow_save_s=2 * TIMEOUT_S, on_durable=None, history=0
    )
    node: Any = SimpleNamespace(
        changed=threading.Condition(),
        ranks=ranks,
        run=run,
        run_number=run_number(run.name),
        history=None,
        options=options,
        traces=SimpleNamespace(recording=lambda *_: contextlib.nullcontext(), write=lambda _: None),
        is_stuck=lambda: True,
    )
    janitor: Any = None
    committer = Committer(node, janitor, DurableCommands(node))
    staged_at = time.monotonic() - age_s
    machine = CommitCore("place", world_size, staged_at, TIMEOUT_S, MemoryStore.pace)
    save = PendingSave(MemoryStore(), 10, SAVE, SAVE, machine)
    meta: Any = SimpleNamespace(world_size=world_size)
    record: Any = SimpleNamespace(rank=0)
    save.metas[0] = meta
    for seen in (core.Joined(0), core.Durable(record), core.Recorded(frozenset({0}))):
        machine.note(staged_at, seen)
    committer.pending[SAVE] = save
    return committer, save


@pytest.mark.parametrize("what_follows", ["hangs", "has a defect"])
def test_a_known_end_is_told_whatever_follows_it(
    what_follows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example the tracker: loads count the checkpoint without it."""
    rank = _Rank(RUN)
    committer, save = pending(1, {0: rank}, RUN)
    save.core.note(time.monotonic(), core.Ended(End.COMMITTED, None, is_durable=True))
    if what_follows == "hangs":
        committer.watch()
        committer._conclude(save, Failure(failed="what follows it gives up"))
    else:
        monkeypatch.setattr(committer, "_finish", a_defect)
        monkeypatch.setattr(committer, "_counting_history", lambda _: None)
        committer._advance_one(save)
    assert [(each.save_id, each.error) for each in rank.told] == [(SAVE, None)]  # type: ignore[union-attr]


def test_processes_of_a_later_run_had_no_part_to_stage() -> None:
    """Ranks have moved between nodes: other nodes hold the parts of ranks 1 and 2."""
    ranks = {0: _Rank(RUN), 1: _Rank(LATER), 2: _Rank(LATER)}
    committer, save = pending(3, ranks, LATER)
    assert committer._trainers(save).gone == {0}
    ranks[1].connection = object()
    assert committer._trainers(save).connected == {1}, "its record would share a file"


@pytest.mark.parametrize(("left_at", "is_useless"), [(10, False), (5, True)])
def test_a_save_that_a_later_run_continues_is_not_overtaken(
    left_at: int, *, is_useless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run may be this job's own, not reported yet, or one whose rank 0 is on another node."""
    monkeypatch.setattr(committer_module, "_REPORT_S", 0.0)
    committer, save = pending(1, {0: _Rank(RUN)}, RUN)
    later = RunObject(name=LATER.name, ancestors=(Ancestor(RUN.name, left_at),))
    save.store.create(run_file(2), encode_run(later))
    assert (committer._overtaken(save) is not None) is is_useless
    previous, failure = committer._track(save)
    assert (previous, failure is not None) == (None, is_useless)
    assert save.store.stat(TRACKER) is None, "the agent of the later run moves it"


@pytest.mark.parametrize("interrupted", [True, False])
def test_only_a_failure_that_no_crash_of_training_explains_is_an_error(
    interrupted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Another node may hear of the crash first, and end the save for all nodes."""
    committer, save = pending(1, {0: _Rank(RUN)}, RUN)
    failure = Failure(failed="a failure", is_final=True, was_interrupted=interrupted)
    proposals.propose_failure(save.store, 10, SAVE, failure)
    ended = proposals.look(save.store, 10, SAVE)
    assert ended is not None
    with caplog.at_level(logging.INFO):
        committer._finish(save, core.Conclude(ended.end, ended.failure))
    levels = [record.levelno for record in caplog.records if "was not saved" in record.getMessage()]
    assert levels == [logging.INFO if interrupted else logging.ERROR]


def test_a_checkpoint_that_retention_removed_was_committed() -> None:
    """A trainer that asks late is not told a failure, and no attempt follows."""
    _, save = pending(1, {0: _Rank(RUN)}, RUN)
    removed = encode_failure(Failure(failed="no rule keeps it", was_removed=True))
    save.store.create(save.end, removed)
    ended = core.Ended(End.COMMITTED, None, is_durable=True)
    assert proposals.look(save.store, 10, SAVE) == ended


@pytest.mark.parametrize("end", [None, End.FAILED])
def test_only_a_known_end_costs_shards_and_the_name(end: End | None) -> None:
    """The end that a silent storage does not show may be a manifest."""
    committer, save = pending(1, {0: _Rank(RUN)}, RUN)
    shard = f"{save.directory}/{shard_name(0, SAVE)}"
    save.store.create(shard, b"shard")
    committer._finish(save, core.Conclude(end, Failure(failed="no answer")))
    assert (shard in save.store.objects) is (end is None)
    with committer._node.changed:
        assert committer.next_attempt(SAVE) == (SAVE if end is None else next_attempt(SAVE))


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_failed_save_is_held_unless_training_resumed_without_it(*, is_given_up: bool) -> None:
    """Its slot is empty then, whatever failed it."""
    rank = _Rank(RUN)
    committer, save = pending(1, {0: rank}, RUN)
    save.is_given_up = is_given_up
    committer._finish(save, core.Conclude(End.FAILED, Failure(failed="no space")))
    assert [isinstance(told, p.Outcome) and told.held for told in rank.told] == [not is_given_up]


@pytest.mark.parametrize(
    ("ranks", "left_at", "resumed", "is_given_up"),
    [
        ((0,), 10, None, False),
        ((0, 1), 10, None, True),
        ((0,), 5, None, True),
        ((0, 1), 5, SAVE, False),
    ],
    ids=["is whole", "rank 1 has no part", "another history", "training resumes from it"],
)
def test_a_new_run_gives_up_what_nobody_completes(
    ranks: tuple[int, ...], left_at: int, resumed: str | None, *, is_given_up: bool
) -> None:
    committer, save = pending(2, {rank: _Rank(LATER) for rank in ranks}, LATER)
    committer._node.history = History(LATER.name, (Ancestor(RUN.name, left_at),))
    with committer._node.changed:
        committer.run_opened(resumed)
    assert (save.is_given_up, save.core.is_over) == (is_given_up, is_given_up)


def test_a_later_run_with_another_timeout_does_not_end_a_save_early() -> None:
    """Other nodes wait for the deadline that the save began with."""
    rank = _Rank(RUN)
    committer, _ = pending(1, {0: rank}, RUN, age_s=60.0)
    vars(committer._node.options)["commit_timeout_s"] = 1.0
    committer.watch()
    assert rank.told == []


def test_a_save_whose_shards_are_gone_takes_its_end_as_soon_as_that_is_visible() -> None:
    """A janitor ended the save and removed its shard; the name of the end came late."""
    committer, save = pending(1, {0: _Rank(RUN)}, RUN)
    committer._node.trained_s = lambda _: None
    save.metas[0] = persist(save.store, 10, SAVE, 0, 1, pieces_of(0, 1, "a weight", 10))
    looked = committer._carried_out(save, core.Look(records=True))
    assert isinstance(looked, core.Looked)
    commit = core.Commit(frozenset(looked.records))
    del save.store.objects[f"{save.directory}/{shard_name(0, SAVE)}"]
    assert isinstance(committer._carried_out(save, commit), core.Unseen)
    failure = Failure(failed="a later run has started")
    save.store.create(save.end, encode_failure(failure))
    assert committer._carried_out(save, commit) == core.Ended(End.FAILED, failure)


def test_an_error_in_one_save_ends_neither_the_driver_nor_the_wait_for_the_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = _Rank(RUN)
    committer, _ = pending(1, {0: rank}, RUN)
    monkeypatch.setattr(committer, "_advance", a_defect)
    committer.start()
    eventually("the result", lambda: rank.told)
    assert "KeyError" in str(rank.told[0])
    assert committer._thread.is_alive()
    committer.close()


def test_a_tracker_that_cannot_be_written_is_told_to_no_departed_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    committer, save = pending(1, {}, RUN)
    monkeypatch.setattr(committer_module, "moved_tracker", read_only)
    assert committer._track(save) == (None, None)


@pytest.mark.parametrize(("left_at", "tracked"), [(10, b"10"), (5, None)])
def test_the_tracker_follows_the_history_of_the_run_that_this_agent_serves(
    left_at: int, tracked: bytes | None
) -> None:
    """A save of the former run is committed while the next one has begun."""
    committer, save = pending(1, {0: _Rank(RUN)}, LATER)
    committer._node.history = History(LATER.name, (Ancestor(RUN.name, left_at),))
    committer._track(save)
    assert save.store.objects.get(TRACKER) == tracked


@pytest.mark.parametrize(
    ("is_full", "has_end", "goes"),
    [(False, False, False), (True, False, True), (True, True, False)],
)
def test_a_shard_goes_before_the_end_only_if_a_full_disk_has_no_room_for_it(
    *, is_full: bool, has_end: bool, goes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another agent may have found the shard and committed the save."""
    committer, save = pending(1, {0: _Rank(RUN)}, RUN)
    store = save.store
    shard = f"{save.directory}/{shard_name(0, SAVE)}"
    store.create(shard, b"shard")
    create = store.create

    def create_if_there_is_room(name: str, data: bytes) -> None:
        if is_full and shard in store.objects:
            if has_end:
                create(name, encode_failure(Failure(failed="first")))
            raise StorageError(errno.ENOSPC, "full")
        create(name, data)

    monkeypatch.setattr(store, "create", create_if_there_is_room)
    failure = Failure(failed="first" if has_end else "ours")
    ended = committer._attempt(save, core.Fail(Failure(failed="ours"), frozenset({0})))
    assert ended == core.Ended(End.FAILED, failure, is_durable=not has_end)
    assert (shard not in store.objects) is goes


def test_a_shard_that_comes_late_goes_once_the_end_is_known() -> None:
    """Another agent may have found the shard and committed the save that this one gave up."""
    committer, save = pending(1, {0: _Rank(RUN)}, RUN)
    shard = f"{save.directory}/{shard_name(0, SAVE)}"
    save.store.create(shard, b"shard")
    for seen, stays in (
        (core.GivenUp(Failure(failed="ours")), True),
        (core.Ended(End.FAILED, Failure(failed="ours")), False),
    ):
        save.core.note(time.monotonic(), seen)
        committer.remove_late(save, 0)
        assert (shard in save.store.objects) is stays
