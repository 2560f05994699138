"""The janitor: nothing needed is removed, whatever happens meanwhile; the rest is gone at last."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import random
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flashckpt.agent import janitor as module
from megatron_flashckpt.agent.janitor import CommittedSave, Janitor, remove_own
from megatron_flashckpt.catalog import iteration_files, retention
from megatron_flashckpt.catalog.directory import later_run, run_numbers
from megatron_flashckpt.catalog.lineage import History, Save, descent
from megatron_flashckpt.catalog.retention import Stored
from megatron_flashckpt.config import Best, Retention
from megatron_flashckpt.errors import AlreadyExistsError, StorageError
from megatron_flashckpt.file_format.end import (
    End,
    Failure,
    decode_failure,
    encode_failure,
    kind_of,
)
from megatron_flashckpt.file_format.file_names import (
    ALIVE,
    RUNS,
    TRACKED,
    TRACKER,
    alive_file,
    common_name,
    due_name,
    end_name,
    event_name,
    iteration_dir,
    record_name,
    run_file,
    run_name,
    run_number,
    save_name,
    save_of,
    shard_name,
)
from megatron_flashckpt.file_format.run_object import Ancestors, RunObject, encode_run
from megatron_flashckpt.file_format.seal import seal
from megatron_flashckpt.storage.posix_files import parse_temporary_name, temporary_name
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.store import Entry, Store
from tests.support.memory_store import MemoryStore

DEADLINE_S = 100.0
WORLD = 2


# ---------------------------------------------------------------------- saves and stores


def run(number: int) -> str:
    return run_name(number, f"{number:04x}")


def save(number: int, iteration: int, sequence: int | None = None, attempt: int = 1) -> Save:
    """Return a save of a run; by default its sequence grows with the iteration."""
    return Save(
        iteration, save_name(run(number), iteration if sequence is None else sequence, attempt)
    )


def path(named: Save, name: str) -> str:
    return f"{iteration_dir(named.iteration)}/{name}"


def end_path(named: Save) -> str:
    return path(named, end_name(named.save_id))


def manifest(named: Save, **facts: object) -> bytes:
    shards = [{"file": shard_name(rank, named.save_id), "nbytes": 10} for rank in range(WORLD)]
    contents = {"version": 2, "iteration": named.iteration, "save_id": named.save_id}
    return seal(msgspec.json.encode(contents | {"shards": shards} | facts))


def put_bulk(store: Store, named: Save, ranks: Iterable[int] = range(WORLD)) -> None:
    for rank in ranks:
        store.put(path(named, shard_name(rank, named.save_id)), bytes(10))
    store.put(path(named, record_name(range(WORLD), named.save_id)), b"record")
    store.put(path(named, common_name(named.save_id)), b"common")


def commit(store: Store, named: Save, **facts: object) -> None:
    """Put a whole checkpoint."""
    put_bulk(store, named)
    store.put(end_path(named), manifest(named, **facts))


def fail(store: Store, named: Save) -> None:
    put_bulk(store, named)
    store.put(end_path(named), encode_failure(Failure(failed="a test")))


def track(store: Store, iteration: int) -> None:
    store.put(TRACKER, str(iteration).encode())


def open_run(store: Store, number: int, ancestors: Ancestors = ()) -> None:
    store.put(run_file(number), encode_run(RunObject(name=run(number), ancestors=ancestors)))


def end_of(store: Store, named: Save) -> End | None:
    try:
        return kind_of(store.get(end_path(named)))
    except FileNotFoundError:
        return None


def names_of(store: Store, named: Save) -> set[str]:
    listed = store.list(iteration_dir(named.iteration), sizes=False)
    return {entry.name for entry in listed if save_of(entry.name) == named.save_id}


def expected_of(store: Store, named: Save) -> set[str]:
    """Return the names that stay while the save is needed: a checkpoint needs no records."""
    names = names_of(store, named)
    if end_of(store, named) is not End.COMMITTED:
        return names
    return {name for name in names if not name.endswith(".record")}


def is_whole(store: Store, named: Save) -> bool:
    """Return whether a load could read the save; by its files, not by the code under test."""
    names = {shard_name(rank, named.save_id) for rank in range(WORLD)}
    names |= {common_name(named.save_id)}
    return end_of(store, named) is End.COMMITTED and names <= names_of(store, named)


def committed(
    store: Store,
    named: Save,
    rules: Retention = Retention(),  # noqa: B008, frozen
    ancestors: Ancestors = (),
) -> CommittedSave:
    return CommittedSave(
        store=store,
        iteration=named.iteration,
        save_id=named.save_id,
        history=History(named.run, ancestors),
        rules=rules,
        retain_interval=None,
        previous=None,
    )


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def directories(store: Store) -> list[str]:
    return [entry.name for entry in store.list("") if entry.name.startswith("iter_")]


# ---------------------------------------------------------------------- any schedule


class KilledError(BaseException):
    """The process of the janitor is killed."""


class World(MemoryStore):
    """Others act between any two calls, and the caller may be killed there."""

    before_change: Callable[[], None] = staticmethod(lambda: None)
    before_look: Callable[[], None] = staticmethod(lambda: None)
    is_acting = False

    def _let(self, act: Callable[[], None]) -> None:
        if self.is_acting:
            return
        self.is_acting = True
        try:
            act()
        finally:
            self.is_acting = False

    def create(self, name: str, data: bytes) -> None:
        self._let(self.before_change)
        super().create(name, data)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._let(self.before_change)
            super().delete([name])

    def list(self, directory: str, *, sizes: bool = True) -> list[Entry]:
        if directory == RUNS:
            self._let(self.before_look)
        return super().list(directory, sizes=sizes)


@dataclasses.dataclass
class Job:
    """A random directory of several runs, and the newest run's last commit."""

    store: World
    rng: random.Random
    ancestors: dict[str, Ancestors] = dataclasses.field(default_factory=dict)
    saves: list[Save] = dataclasses.field(default_factory=list)

    def begin(self, number: int) -> Save | None:
        """Open a run that resumes from any checkpoint, or from none; return that."""
        whole = [named for named in self.saves if is_whole(self.store, named)]
        base = self.rng.choice([None, *whole])
        ancestors = () if base is None else descent(base, self.ancestors.get(base.run, ()))
        self.ancestors[run(number)] = ancestors
        open_run(self.store, number, ancestors)
        return base

    def add(self, named: Save, kind: str) -> None:
        self.saves.append(named)
        match kind:
            case "whole":
                commit(self.store, named)
            case "failed":
                fail(self.store, named)
            case "partial":
                put_bulk(self.store, named)
            case "broken":
                put_bulk(self.store, named, [0])
                self.store.put(end_path(named), manifest(named))
            case "late end":
                self.store.put(end_path(named), manifest(named))

    def whole_of(self, history: History) -> dict[int, Save]:
        """Return by iteration the checkpoints that a load may take."""
        ascending = sorted(self.saves, key=lambda named: named.order)
        return {
            named.iteration: named
            for named in ascending
            if history.holds(named) and is_whole(self.store, named)
        }


KINDS = ("whole", "whole", "whole", "failed", "partial", "broken", "late end")


def needed(
    job: Job, last: CommittedSave, tracked: int, pending: set[str], resumed: Save | None
) -> set[Save]:
    """Return the saves of which no file may be removed, by what people and loads expect."""
    whole = job.whole_of(last.history)
    newest = max(whole, default=-1)
    past = sorted((number for number in whole if number <= tracked), reverse=True)
    kept = {whole[number] for number in past[: last.rules.latest or 1]}
    kept |= {named for number, named in whole.items() if number > tracked}
    for named in job.saves:
        iteration = named.iteration
        is_committed = end_of(job.store, named) is End.COMMITTED
        is_off = iteration not in whole and is_whole(job.store, named)
        if (
            named.save_id in pending
            or run_number(named.run) > run_number(last.history.run)
            or (is_committed and iteration > newest)
            or (is_committed and iteration == tracked and tracked not in whole)
            or (named == resumed and newest <= iteration)
            or (is_off and last.rules.every is not None and iteration % last.rules.every == 0)
        ):
            kept.add(named)
    if last.rules.every is not None:
        kept |= {named for number, named in whole.items() if number % last.rules.every == 0}
    return kept


Maker = Callable[[Callable[[], set[str]], float, Clock], Janitor]


def violations(rng: random.Random, make: Maker = Janitor) -> list[str]:
    """Let janitors work in a random directory while others act; return what went wrong."""
    store, clock = World(), Clock()
    job, bad = Job(store, rng), []
    count = rng.randrange(1, 4)
    base = None
    for number in range(1, count + 1):
        base = job.begin(number)
        first = 0 if base is None else base.iteration
        for iteration in range(first + 10, first + 10 + 10 * rng.randrange(1, 4), 10):
            if rng.random() < 0.3:
                job.add(save(number, iteration, attempt=1), "failed")
                job.add(save(number, iteration, attempt=2), rng.choice(KINDS))
            else:
                job.add(save(number, iteration), rng.choice(KINDS))
    # A further attempt follows a failed one only.
    attempts = {named.iteration: named for named in job.saves if named.run == run(count)}
    last = rng.choice(list(attempts.values()))
    if not is_whole(store, last):
        commit(store, last)
    if rng.random() < 0.2:  # a person has copied it from elsewhere
        job.add(save(9, 10 * rng.randrange(1, 7)), "whole")
    unended = [named.save_id for named in job.saves if end_of(store, named) is None]
    pending = {save_id for save_id in unended if rng.random() < 0.5}
    whole = [named for named in job.saves if is_whole(store, named)]
    tracked = rng.choice([last, last, *whole]).iteration + rng.choice([0, 0, 0, 5])
    track(store, tracked)
    rules = rng.choice([Retention(latest=rng.randrange(1, 4)), Retention(every=20)])
    done = committed(store, last, rules, job.ancestors[last.run])
    must: set[Save] = set()
    files: dict[Save, set[str]] = {}
    waiting: dict[Save, float] = {}

    def expect() -> None:
        must.clear()
        must.update(needed(job, done, tracked, pending, base))
        files.update((named, expected_of(store, named)) for named in must)

    def check(moment: str) -> None:
        for named in must:
            if not files[named] <= names_of(store, named):
                bad.append(f"{moment}: {named} is needed")
        for named, since in waiting.items():
            if end_of(store, named) is None and clock.now < since + DEADLINE_S:
                bad.append(f"{moment}: a node waits for the end of {named}, which is gone")
        for named in told:
            if end_of(store, named) is End.COMMITTED and not is_whole(store, named):
                bad.append(f"{moment}: {named} was reported committed, but lacks files")

    zombies = [named for named in job.saves if end_of(store, named) is None]
    told: list[Save] = []
    budget = rng.choice([None, rng.randrange(30)])
    later_at = rng.choice([None, rng.randrange(10)])

    def others_act() -> None:
        nonlocal budget
        if zombies and rng.random() < 0.3:
            named = zombies.pop(rng.randrange(len(zombies)))
            names = {shard_name(rank, named.save_id) for rank in range(WORLD)}
            if names <= names_of(store, named):
                with contextlib.suppress(AlreadyExistsError):
                    store.create(end_path(named), manifest(named))
                    told.append(named)
                    check("before a commit")
                    expect()
        for named in job.saves:
            # It may have staged its part now, so it waits from now on.
            if end_of(store, named) is End.FAILED:
                waiting.setdefault(named, clock.now)
        if budget is not None:
            budget -= 1
            if budget < 0:
                raise KilledError

    def later_run_starts() -> None:
        nonlocal later_at
        if later_at is None:
            return
        later_at -= 1
        if later_at == 0:
            start = job.begin(count + 1)
            must.clear()
            if start is not None:
                must.add(start)
                files[start] = expected_of(store, start)

    expect()
    store.before_change, store.before_look = others_act, later_run_starts
    for _ in range(3):
        janitor = make(lambda: pending, DEADLINE_S, clock)
        with contextlib.suppress(KilledError):
            if rng.random() < 0.3:
                resumed_id = None if base is None else base.save_id
                janitor.tidy_after_start(
                    store,
                    RunObject(
                        name=run(count),
                        ancestors=job.ancestors[run(count)],
                        save_id=resumed_id,
                        iteration=0 if base is None else base.iteration,
                    ),
                )
            for _ in range(2):
                janitor.tidy(done)
                check("after a pass")
                clock.now += rng.choice([0.0, 60.0])
        check("after a kill")
        budget = rng.choice([None, rng.randrange(30)])
        clock.now += rng.choice([0.0, 200.0])
    # All others have ended. What is not needed is gone at last.
    store.before_change = store.before_look = lambda: None
    if later_run(store, count) is not None:
        return bad
    pending = set()
    own = job.whole_of(History(last.run)).values()
    last = max(own, key=lambda named: named.order, default=last)
    done = dataclasses.replace(done, iteration=last.iteration, save_id=last.save_id)
    expect()
    janitor = make(set, DEADLINE_S, clock)
    for _ in range(4):
        janitor.tidy(done)
        check("at last")
        clock.now += DEADLINE_S
    for named in job.saves:
        is_ahead = named.run == last.run and named.order[1] > last.order[1]
        if named not in must and names_of(store, named) and not is_ahead:
            bad.append(f"{named} is left: {sorted(names_of(store, named))}")
    return bad


@settings(max_examples=400, deadline=None)
@given(st.randoms(use_true_random=False))
def test_nothing_needed_is_removed_and_the_rest_is_gone_at_last(rng: random.Random) -> None:
    assert violations(rng) == []


def without(reason: str) -> Callable[..., dict[Save, list[str]]]:
    def why(*arguments: object, **more: object) -> dict[Save, list[str]]:
        kept = retention.why_each_is_kept(*arguments, **more)
        return {
            named: [each for each in reasons if not each.startswith(reason)]
            for named, reasons in kept.items()
        }

    return why


def of_any_run(stored: Iterable[Stored], history: History) -> dict[int, Stored]:
    return {each.save.iteration: each for each in stored if each.is_whole}


def seen_but_ignored(store: Store) -> list[int]:
    run_numbers(store)
    return []


#: What is left out: the place of a rule, and what stands there instead.
LEFT_OUT: dict[str, tuple[object, str, object]] = {
    "a later run ends the work": (module, "run_numbers", seen_but_ignored),
    "a failed end comes first": (module, "_ended", lambda *_: End.FAILED),
    "only whole checkpoints count": (
        iteration_files,
        "Stored",
        lambda facts, *_, **__: Stored(facts),
    ),
    "only the lineage counts": (retention, "_counting", of_any_run),
    **{
        reason: (module, "why_each_is_kept", without(reason))
        for reason in (
            *("tracker", "newer", "newest below the tracker", "latest", "every"),
            *("not passed", "of a later run"),
        )
    },
}


@pytest.mark.parametrize("rule", [*LEFT_OUT, "pending saves stay", "the end waits"])
def test_each_rule_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(pending: Callable[[], set[str]], deadline_s: float, clock: Clock) -> Janitor:
        if rule == "pending saves stay":
            pending = set
        return Janitor(pending, 0.0 if rule == "the end waits" else deadline_s, clock)

    if rule in LEFT_OUT:
        monkeypatch.setattr(*LEFT_OUT[rule])
    assert any(violations(random.Random(seed), make=make) for seed in range(1500))


# ---------------------------------------------------------------------- unfinished saves


def test_a_save_without_an_end_gets_a_failed_one_and_its_end_goes_last(
    store: Store, clock: Clock
) -> None:
    dead, last = save(1, 10), save(2, 20)
    put_bulk(store, dead)
    commit(store, last)
    janitor = Janitor(tuple, DEADLINE_S, clock)
    janitor.tidy(committed(store, last))
    assert names_of(store, dead) == {end_name(dead.save_id)}
    assert not decode_failure(store.get(end_path(dead))).was_removed
    clock.now += DEADLINE_S - 1
    put_bulk(store, dead, [1])  # a node was late
    janitor.tidy(committed(store, last))
    assert end_of(store, dead) is End.FAILED, "a node may have staged its part just before"
    clock.now += 1
    janitor.tidy(committed(store, last))
    janitor.tidy(committed(store, last))
    assert directories(store) == [iteration_dir(20)]


@pytest.mark.parametrize("is_started", [True, False])
def test_saves_that_this_agent_or_a_later_save_may_end_are_left(
    store: Store, clock: Clock, is_started: bool
) -> None:
    pending, last, next_one = save(1, 10), save(2, 20), save(2, 30)
    put_bulk(store, pending)
    commit(store, last)
    put_bulk(store, next_one, [1])  # another node was faster
    # A person has removed 'flashckpt/' meanwhile, and with it the object of a later run.
    later, failed = save(3, 40), save(3, 50)
    put_bulk(store, later)
    fail(store, failed)
    left = {named: names_of(store, named) for named in (pending, next_one, later, failed)}
    janitor = Janitor(lambda: {pending.save_id}, 0.0, clock)
    if is_started:
        janitor.tidy_after_start(store, RunObject(name=run(2)))
    else:
        janitor.tidy(committed(store, last))
    assert {end_of(store, named) for named in (pending, next_one)} == {None}
    assert {named: names_of(store, named) for named in left} == left


def test_what_a_run_resumed_from_in_memory_stays_until_the_next_one_is_durable(
    store: Store, clock: Clock
) -> None:
    """Its agents may still write it, and this one may not know of it yet."""
    resumed, dead, later = save(1, 20), save(1, 30), save(2, 40)
    ancestors = descent(resumed, ())
    for named in (resumed, dead):
        put_bulk(store, named)
    janitor = Janitor(tuple, 0.0, clock)
    start = RunObject(
        name=run(2), ancestors=ancestors, save_id=resumed.save_id, iteration=20, source="memory"
    )
    janitor.tidy_after_start(store, start)
    assert (end_of(store, resumed), len(names_of(store, resumed))) == (None, 4)
    assert not names_of(store, dead)
    commit(store, later)
    janitor.tidy(committed(store, later, ancestors=ancestors))
    assert not names_of(store, resumed)


class FullStore(MemoryStore):
    """A store with room for so many bytes."""

    nbytes = 10**9

    def create(self, name: str, data: bytes) -> None:
        if sum(map(len, self.objects.values())) + len(data) > self.nbytes:
            raise StorageError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().create(name, data)


@pytest.mark.parametrize("has_record", [True, False])
def test_a_dead_save_gives_its_space_back_although_there_is_no_room_for_its_end(
    clock: Clock, has_record: bool
) -> None:
    store = FullStore()
    dead, last = save(1, 10), save(2, 20)
    commit(store, last)
    put_bulk(store, dead)
    record = path(dead, record_name(range(WORLD), dead.save_id))
    if has_record:
        store.put(record, bytes(1000))
    else:
        store.delete([record])
        store.put(path(dead, shard_name(0, dead.save_id)), bytes(1000))
    store.nbytes = sum(map(len, store.objects.values()))
    Janitor(tuple, 0.0, clock).tidy(committed(store, last))
    assert not names_of(store, dead)


def test_a_node_removes_its_own_files_of_a_failed_save_and_leaves_the_end(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    failed = save(1, 10)
    store.put(end_path(failed), encode_failure(Failure(failed="the disk is full")))
    for rank in range(4):
        store.put(path(failed, shard_name(rank, failed.save_id)), bytes(10))
    for ranks in (range(2), range(2, 4)):
        store.put(path(failed, record_name(ranks, failed.save_id)), b"record")
    store.put(path(failed, common_name(failed.save_id)), b"common")
    remove_own(store, 10, failed.save_id, {2, 3})
    assert names_of(store, failed) == {
        *(shard_name(rank, failed.save_id) for rank in range(2)),
        record_name(range(2), failed.save_id),
        common_name(failed.save_id),
        end_name(failed.save_id),
    }
    remove_own(store, 10, failed.save_id, {0, 1})
    assert names_of(store, failed) == {end_name(failed.save_id)}
    assert not caplog.records


def test_a_start_removes_signs_of_life_of_former_runs(store: Store, clock: Clock) -> None:
    for number in (1, 2, 3):
        store.put(alive_file(run(number)), b"{}")
    Janitor(tuple, 0.0, clock).tidy_after_start(store, RunObject(name=run(2)))
    assert [entry.name for entry in store.list(ALIVE)] == [run(2), run(3)]


def test_a_start_removes_what_killed_writers_left_of_our_own_files(
    clock: Clock, tmp_path: Path
) -> None:
    store = PosixStore(tmp_path)
    events = [
        event_name(1.0, of) for number in (1, 2) for of in (run(number), save_name(run(number), 1))
    ]
    for name in (TRACKED, *map(alive_file, map(run, (1, 2))), *map(run_file, (1, 2)), *events):
        store.put(name, b"{}")
        whole = tmp_path / name
        whole.with_name(temporary_name(whole.name)).write_bytes(b"{")
    Janitor(tuple, 0.0, clock).tidy_after_start(store, RunObject(name=run(2)))
    left = {parse_temporary_name(path.name) for path in tmp_path.rglob(".*")}
    of_this = {event.rpartition("/")[2] for event in events[2:]}
    assert left == {run(2), "000002.json", *of_this}, "the run of this start may write them"
    assert store.stat(TRACKED) is not None


# ---------------------------------------------------------------------- checkpoints


def test_records_go_after_the_commit_and_one_that_comes_back_with_the_next_one(
    store: Store, clock: Clock
) -> None:
    """A node repeats a create whose answer was lost, after the janitor has deleted the record."""
    first, last = save(1, 10), save(1, 20)
    janitor = Janitor(tuple, 0.0, clock)
    commit(store, first)
    janitor.tidy(committed(store, first))
    assert names_of(store, first) == expected_of(store, first)
    store.put(path(first, record_name(range(WORLD), first.save_id)), b"record")
    commit(store, last)
    janitor.tidy(committed(store, last))
    assert names_of(store, first) == expected_of(store, first)


def test_a_removed_checkpoint_has_a_failed_end_that_says_so(store: Store, clock: Clock) -> None:
    """A node that still waits for its end was not told yet that it was committed."""
    first, last = save(1, 10), save(1, 20)
    for named in (first, last):
        commit(store, named)
    track(store, 20)
    janitor = Janitor(tuple, DEADLINE_S, clock)
    janitor.tidy(committed(store, last, Retention(latest=1)))
    assert names_of(store, first) == {end_name(first.save_id)}
    assert decode_failure(store.get(end_path(first))).was_removed
    assert is_whole(store, last)


def test_a_checkpoint_that_is_pending_here_is_not_removed(store: Store, clock: Clock) -> None:
    """Its end exists, but ranks of this node do not know it yet."""
    first, last = save(1, 10), save(1, 20)
    for named in (first, last):
        commit(store, named)
    track(store, 20)
    pending = {first.save_id}
    janitor = Janitor(lambda: pending, 0.0, clock)
    janitor.tidy(committed(store, last, Retention(latest=1)))
    assert is_whole(store, first)
    pending.clear()
    janitor.tidy(committed(store, last, Retention(latest=1)))
    assert not is_whole(store, first)


def test_a_checkpoint_stays_while_a_command_runs_for_it(store: Store, clock: Clock) -> None:
    first, last = save(1, 10), save(1, 20)
    for named in (first, last):
        commit(store, named)
    track(store, 20)
    due = {first}
    commands: Any = SimpleNamespace(is_due=lambda named: named in due)
    janitor = Janitor(set, 0.0, clock, commands)
    janitor.tidy(committed(store, last, Retention(latest=1)))
    assert is_whole(store, first)
    due.clear()
    janitor.tidy(committed(store, last, Retention(latest=1)))
    assert not is_whole(store, first)


def test_a_command_is_taken_up_for_a_checkpoint_that_counts_alone(
    store: Store, clock: Clock
) -> None:
    """Another run has left the marks, and only one of the checkpoints counts for the newest run."""
    counts, lost, last = save(1, 10), save(1, 20), save(2, 30)
    for named in (counts, lost, last):
        commit(store, named)
        store.put(path(named, due_name(named.save_id)), b"")
    track(store, 30)
    taken: list[Save] = []
    commands: Any = SimpleNamespace(is_due=taken.__contains__)
    commands.add = lambda _, named: taken.append(named)
    Janitor(set, 0.0, clock, commands).tidy(
        committed(store, last, Retention(latest=5), descent(counts, ()))
    )
    assert sorted(taken) == [counts, last]
    assert due_name(lost.save_id) not in names_of(store, lost)


def test_without_a_tracker_no_checkpoint_is_removed(store: Store, clock: Clock) -> None:
    first, last = save(1, 10), save(1, 20)
    for named in (first, last):
        commit(store, named)
    Janitor(tuple, 0.0, clock).tidy(committed(store, last, Retention(latest=1)))
    assert is_whole(store, first)


def test_files_are_missing_only_if_they_stay_missing(clock: Clock) -> None:
    """A listing may show the end of a save of another node before its shards."""
    store = MemoryStore()
    first, second, last = save(1, 10), save(1, 20), save(1, 30)
    for named in (first, second, last):
        commit(store, named)
    track(store, 30)
    hidden = path(second, shard_name(1, second.save_id))
    shard = store.objects.pop(hidden)
    janitor = Janitor(tuple, DEADLINE_S, clock)
    done = committed(store, last, Retention(latest=2))
    janitor.tidy(done)
    assert is_whole(store, first), "it counts in place of the other one"
    store.objects[hidden] = shard
    janitor.tidy(done)
    assert [is_whole(store, named) for named in (first, second)] == [False, True]
    del store.objects[hidden]
    janitor = Janitor(tuple, DEADLINE_S, clock)
    janitor.tidy(done)
    assert end_of(store, second) is End.COMMITTED
    clock.now += DEADLINE_S
    janitor.tidy(done)
    assert end_of(store, second) is End.FAILED


def test_an_end_that_cannot_be_read_keeps_its_save_and_is_named_once(
    store: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, last = save(1, 10), save(2, 20)
    commit(store, damaged)
    store.put(end_path(damaged), b'{"digest":"0123456789abcdef","version":2}')
    commit(store, last)
    track(store, 20)
    janitor = Janitor(tuple, 0.0, clock)
    for _ in range(3):
        janitor.tidy(committed(store, last, Retention(latest=1)))
    assert len(names_of(store, damaged)) == 5
    assert caplog.text.count("its end cannot be read") == 1


def test_a_metric_that_no_checkpoint_has_removes_none_and_is_logged(
    store: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    other, first, last = save(1, 5), save(2, 10), save(2, 20)
    for named in (other, first, last):
        commit(store, named, metrics={"loss": 1.0})
    track(store, 20)
    rules = Retention(best=Best(metric="los"))
    Janitor(tuple, 0.0, clock).tidy(committed(store, last, rules))
    assert [is_whole(store, named) for named in (other, first, last)] == [True] * 3
    assert "no checkpoint has the metric 'los'" in caplog.text


def test_an_error_of_one_removal_stops_no_other(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, other, last = save(1, 10), save(1, 20), save(1, 30)

    class Stuck(MemoryStore):
        is_stuck = True

        def delete(self, names: Iterable[str]) -> None:
            names = list(names)
            if self.is_stuck and any(stuck.save_id in name for name in names):
                raise StorageError("cannot delete (Operation not permitted)")
            super().delete(names)

    store = Stuck()
    for named in (stuck, other, last):
        commit(store, named)
    track(store, 30)
    janitor = Janitor(tuple, 0.0, clock)
    janitor.tidy(committed(store, last, Retention(latest=1)))
    assert "cannot remove files of iteration 10: cannot delete" in caplog.text
    assert [is_whole(store, stuck), bool(names_of(store, other))] == [True, False]
    store.is_stuck = False
    for _ in range(2):
        janitor.tidy(committed(store, last, Retention(latest=1)))
    assert directories(store) == [iteration_dir(30)]


def test_a_deletion_that_took_effect_with_an_error_leaves_nothing(clock: Clock) -> None:
    """Nor does the checkpoint count any more, for rules that would keep it."""
    first, last = save(1, 10), save(1, 20)

    class LosesAnAnswer(MemoryStore):
        def delete(self, names: Iterable[str]) -> None:
            names = list(names)
            is_lost = names == [end_path(first)] and end_path(first) in self.objects
            super().delete(names)
            if is_lost:
                raise StorageError("no answer")

    store = LosesAnAnswer()
    for named in (first, last):
        commit(store, named)
    track(store, 20)
    janitor = Janitor(tuple, 0.0, clock)
    for latest in (2, 2, 1, 2, 2):  # the directories are settled when the first one expires
        janitor.tidy(committed(store, last, Retention(latest=latest)))
    assert directories(store) == [iteration_dir(20)]


# ---------------------------------------------------------------------- what others have put there


def test_links_renamed_directories_and_foreign_files_stay(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    root, elsewhere = tmp_path / "save", tmp_path / "elsewhere"
    store = PosixStore(root)
    gone, linked, renamed, last = save(1, 10), save(1, 20), save(1, 30), save(2, 50)
    for named in (gone, linked, renamed, last):
        commit(store, named)
    put_bulk(store, save(1, 30, sequence=99))  # a dead save next to the renamed checkpoint
    track(store, 50)
    (root / iteration_dir(20)).rename(elsewhere)
    (root / iteration_dir(20)).symlink_to(elsewhere)
    (root / iteration_dir(30)).rename(root / iteration_dir(40))
    others = {
        "iter_0000010/notes.txt": b"mine",
        "iter_0000001/mp_rank_00/model_optim_rng.pt": b"torch",
        "iter_0000002/.metadata": b"torch_dist",
        "iter_0000004/manifest.json": b"{}",
        "iter_20/manifest.json": b"no name of Megatron's",
        "release/common.pt": b"release",
    }
    for name, data in others.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    shard = root / path(gone, shard_name(1, gone.save_id))
    shard.rename(tmp_path / "moved")
    shard.symlink_to(tmp_path / "moved")
    before = {file: file.read_bytes() for file in (*elsewhere.iterdir(), tmp_path / "moved")}
    kept = sorted(os.listdir(root / iteration_dir(40)))
    janitor = Janitor(tuple, 0.0, clock)
    for _ in range(3):
        janitor.tidy(committed(store, last, Retention(latest=1)))
    assert {name: (root / name).read_bytes() for name in others} == others
    assert {file: file.read_bytes() for file in before} == before
    assert (root / iteration_dir(20)).is_symlink()
    assert sorted(os.listdir(root / iteration_dir(40))) == kept
    assert sorted(os.listdir(root / iteration_dir(10))) == [shard.name, "notes.txt"]
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == [
        f"{root}/iter_0000020: is a symbolic link; nothing in it is removed",
        f"{root}/iter_0000040: holds the checkpoint of iteration 30, so it was renamed or copied "
        "by hand; nothing in it is removed",
        f"{root}/iter_0000010: the save was removed, but the directory stays, because it holds "
        f"files of other programs: {shard.name}, notes.txt",
    ]


def test_a_checkpoint_in_a_renamed_directory_takes_no_other_one_s_place(
    tmp_path: Path, clock: Clock
) -> None:
    store = PosixStore(tmp_path)
    first, renamed, last = save(1, 10), save(1, 30), save(1, 50)
    for named in (first, renamed, last):
        commit(store, named)
    track(store, 50)
    (tmp_path / iteration_dir(30)).rename(tmp_path / iteration_dir(40))
    Janitor(tuple, 0.0, clock).tidy(committed(store, last, Retention(latest=2)))
    assert is_whole(store, first)
    assert is_whole(store, last)


def test_files_that_nfs_keeps_for_a_reader_stay_and_are_named_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    store = PosixStore(tmp_path)
    gone, last = save(1, 10), save(1, 20)
    for named in (gone, last):
        commit(store, named)
    track(store, 20)
    open_elsewhere = tmp_path / iteration_dir(10) / ".nfs000000000012ab3400000001"
    open_elsewhere.touch()
    janitor = Janitor(tuple, 0.0, clock)
    for _ in range(4):
        janitor.tidy(committed(store, last, Retention(latest=1)))
    assert os.listdir(tmp_path / iteration_dir(10)) == [open_elsewhere.name]
    assert caplog.text.count(open_elsewhere.name) == 1
    assert "other programs" not in caplog.text
    open_elsewhere.unlink()
    janitor.tidy(committed(store, last, Retention(latest=1)))
    assert not (tmp_path / iteration_dir(10)).exists()


def test_files_of_a_killed_writer_go_with_the_directory(tmp_path: Path, clock: Clock) -> None:
    store = PosixStore(tmp_path)
    dead, last = save(1, 10), save(2, 20)
    commit(store, last)
    put_bulk(store, dead)
    (tmp_path / iteration_dir(10) / f".{end_name(dead.save_id)}.0123abcd.tmp").touch()
    janitor = Janitor(tuple, 0.0, clock)
    janitor.tidy(committed(store, last))
    assert directories(store) == [iteration_dir(20)]


# ---------------------------------------------------------------------- costs, and the thread


class CountingStore(MemoryStore):
    """A store that notes which directories and ends are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[str] = []
        self.read: list[int | None] = []

    def list(self, directory: str, *, sizes: bool = True) -> list[Entry]:
        if directory.startswith("iter_"):
            self.listed.append(directory)
        return super().list(directory, sizes=sizes)

    def stat(self, name: str) -> Entry | None:
        return Entry(name, len(self.objects[name]), "file") if name in self.objects else None

    def get(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        if name.endswith(".end"):
            self.read.append(nbytes)
        return super().get(name, offset, nbytes)


def test_a_directory_is_listed_until_a_look_finds_nothing_and_a_manifest_read_once(
    clock: Clock,
) -> None:
    store = CountingStore()
    saves = [save(1, iteration) for iteration in range(10, 60, 10)]
    for named in saves:
        commit(store, named)
    track(store, 50)
    janitor = Janitor(tuple, DEADLINE_S, clock)
    for _ in range(3):
        janitor.tidy(committed(store, saves[-1], Retention(latest=9)))
    listed = [iteration_dir(named.iteration) for named in saves]
    committed_here = iteration_dir(50)
    assert sorted(store.listed) == sorted([*listed, *listed, committed_here])
    assert store.read.count(None) == 5
    store.listed.clear()
    store.read.clear()
    janitor.tidy_after_start(store, RunObject(name=run(2), ancestors=descent(saves[-1], ())))
    assert len(store.listed) == 5
    assert all(nbytes is not None and nbytes < 100 for nbytes in store.read), "heads only"


def test_a_checkpoint_that_another_agent_has_removed_counts_no_more(clock: Clock) -> None:
    store = MemoryStore()
    first, second, last = save(1, 10), save(1, 20), save(1, 30)
    for named in (first, second, last):
        commit(store, named)
    track(store, 30)
    janitor = Janitor(tuple, DEADLINE_S, clock)
    janitor.tidy(committed(store, last))
    store.put(end_path(second), encode_failure(Failure(failed="removed")))
    start = RunObject(name=run(2), ancestors=descent(last, ()), save_id=last.save_id, iteration=30)
    janitor.tidy_after_start(store, start)
    later = save(2, 40)
    commit(store, later)
    track(store, 40)
    janitor.tidy(committed(store, later, Retention(latest=3), start.ancestors))
    assert is_whole(store, first)


def test_the_thread_outlives_an_error_and_does_not_hold_up_the_end(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Hanging(MemoryStore):
        def delete(self, names: Iterable[str]) -> None:
            begun.set()
            assert go_on.wait(60.0)
            super().delete(names)

    class Broken(MemoryStore):
        def list(self, directory: str, *, sizes: bool = True) -> list[Entry]:
            raise RuntimeError("a mistake")

    store = Hanging()
    dead, last = save(1, 10), save(2, 20)
    put_bulk(store, dead)
    commit(store, last)
    janitor = Janitor(set, 0.0, clock)
    janitor.after_commit(committed(Broken(), last))
    janitor.after_commit(committed(store, last))
    assert begun.wait(60.0)
    removing = janitor._worker._thread
    assert removing is not None
    janitor.close(0.0)
    go_on.set()
    removing.join(60.0)
    assert not names_of(store, dead)
    assert "obsolete files were not removed" in caplog.text


def test_an_empty_directory_goes_when_a_checkpoint_has_passed_it(
    tmp_path: Path, clock: Clock
) -> None:
    """A process was killed before it had written a file; the first look comes at the start."""
    store, last = PosixStore(tmp_path), save(2, 20)
    (tmp_path / iteration_dir(10)).mkdir()
    (tmp_path / iteration_dir(30)).mkdir()
    janitor = Janitor(tuple, DEADLINE_S, clock)
    janitor.tidy_after_start(store, RunObject(name=run(2)))
    commit(store, last)
    janitor.tidy(committed(store, last))
    assert directories(store) == [iteration_dir(20), iteration_dir(30)]
    later = save(2, 40)
    commit(store, later)
    janitor.tidy(committed(store, later))
    assert iteration_dir(30) not in directories(store)
