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
from megatron_flashckpt.agent.janitor import CommittedSave, Janitor
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
from tests.support.histories import committed_save
from tests.support.memory_store import MemoryStore
from tests.support.trainer import eventually

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
    return committed_save(store, named, History(named.run, ancestors), rules)


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


def is_ahead(named: Save, last: CommittedSave) -> bool:
    """Return whether a save of a run was begun after the last committed one."""
    return named.order[1] > Save(last.iteration, last.save_id).order[1]


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
        is_ended = end_of(job.store, named) is not None
        is_committed = end_of(job.store, named) is End.COMMITTED
        is_off = iteration not in whole and is_whole(job.store, named)
        if (
            named.save_id in pending
            or run_number(named.run) > run_number(last.history.run)
            or (named.run == last.history.run and is_ahead(named, last) and not is_ended)
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
        job.add(save(9, 10 * rng.randrange(1, 7)), rng.choice(KINDS))
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
                own = [named for named in job.saves if named.run == run(count)]
                own = [named for named in own if end_of(store, named) is None]
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
                if any(end_of(store, named) is End.FAILED for named in own):
                    bad.append("a start has ended a save of its own run")
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
        if named not in must and names_of(store, named):
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


# ---------------------------------------------------------------------- examples

ONE = Retention(latest=1)


def commit_all(store: Store, *saves: Save, rules: Retention = ONE) -> CommittedSave:
    """Commit saves; the tracker names the last one, after whose commit the janitor works."""
    for named in saves:
        commit(store, named)
    track(store, saves[-1].iteration)
    return committed(store, saves[-1], rules)


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


def test_what_a_run_resumed_from_in_memory_stays_until_the_next_one_is_durable(
    store: Store,
) -> None:
    """Its agents may still write it, and this one may not know of it yet."""
    resumed, later = save(1, 20), save(2, 40)
    ancestors = descent(resumed, ())
    put_bulk(store, resumed)
    janitor = Janitor()
    janitor.tidy_after_start(store, RunObject(name=run(2), ancestors=ancestors))
    assert (end_of(store, resumed), len(names_of(store, resumed))) == (None, 4)
    commit(store, later)
    janitor.tidy(committed(store, later, ancestors=ancestors))
    assert not names_of(store, resumed)


@pytest.mark.parametrize("takes_the_room", [".record", ".safetensors"])
def test_a_dead_save_gives_its_space_back_although_there_is_no_room_for_its_end(
    takes_the_room: str,
) -> None:
    dead, last = save(1, 10), save(2, 20)

    class Full(MemoryStore):
        def create(self, name: str, data: bytes) -> None:
            if any(dead.save_id in it and it.endswith(takes_the_room) for it in self.objects):
                raise StorageError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().create(name, data)

    store = Full()
    commit(store, last)
    put_bulk(store, dead)
    if takes_the_room != ".record":
        store.delete([path(dead, record_name(range(WORLD), dead.save_id))])
    Janitor().tidy(committed(store, last))
    assert not names_of(store, dead)


def test_a_start_removes_what_overtaken_runs_left_of_our_own_files(tmp_path: Path) -> None:
    """Its own agents may write their files at that moment."""
    store = PosixStore(tmp_path)
    events = [
        event_name(1.0, of) for number in (1, 2) for of in (run(number), save_name(run(number), 1))
    ]
    for name in (TRACKED, *map(alive_file, map(run, (1, 2))), *map(run_file, (1, 2)), *events):
        store.put(name, b"{}")
        whole = tmp_path / name
        whole.with_name(temporary_name(whole.name)).write_bytes(b"{")
    store.put(alive_file(run(3)), b"{}")
    Janitor().tidy_after_start(store, RunObject(name=run(2)))
    left = {parse_temporary_name(path.name) for path in tmp_path.rglob(".*")}
    assert left == {run(2), "000002.json", *(event.rpartition("/")[2] for event in events[2:])}
    assert [entry.name for entry in store.list(ALIVE)] == [run(2), run(3)]
    assert store.stat(TRACKED) is not None


def test_records_go_after_the_commit_and_one_that_comes_back_with_the_next_one(
    store: Store,
) -> None:
    """A node repeats a create whose answer was lost, after the janitor has deleted the record."""
    first, last = save(1, 10), save(1, 20)
    janitor = Janitor()
    commit(store, first)
    janitor.tidy(committed(store, first))
    assert names_of(store, first) == expected_of(store, first)
    store.put(path(first, record_name(range(WORLD), first.save_id)), b"record")
    janitor.tidy(commit_all(store, last, rules=Retention()))
    assert names_of(store, first) == expected_of(store, first)


@pytest.mark.parametrize("reason", ["is pending here", "a command runs for it", "no tracker"])
def test_a_checkpoint_in_use_stays_and_a_removed_one_says_so(store: Store, reason: str) -> None:
    first, last = save(1, 10), save(1, 20)
    done = commit_all(store, first, last)
    in_use = {first.save_id}
    commands: Any = SimpleNamespace(
        is_due=lambda named: reason == "a command runs for it" and named.save_id in in_use
    )
    if reason == "no tracker":
        store.delete([TRACKER])
    pending = in_use if reason == "is pending here" else set()
    janitor = Janitor(lambda: pending, DEADLINE_S, commands=commands)
    janitor.tidy(done)
    assert is_whole(store, first)
    in_use.clear()
    track(store, 20)
    janitor.tidy(done)
    assert names_of(store, first) == {end_name(first.save_id)}
    assert decode_failure(store.get(end_path(first))).was_removed, "a late node reads this"
    assert is_whole(store, last)


def test_a_command_is_taken_up_for_a_checkpoint_that_counts_alone(store: Store) -> None:
    """Another run has left the marks, and only one of the checkpoints counts for the newest run."""
    counts, lost, last = saves = save(1, 10), save(1, 20), save(2, 30)
    commit_all(store, *saves)
    for named in saves:
        store.put(path(named, due_name(named.save_id)), b"")
    taken: list[Save] = []
    commands: Any = SimpleNamespace(is_due=taken.__contains__)
    commands.add = lambda _, named: taken.append(named)
    done = committed(store, last, Retention(latest=5), descent(counts, ()))
    Janitor(commands=commands).tidy(done)
    assert sorted(taken) == [counts, last]
    assert due_name(lost.save_id) not in names_of(store, lost)


def test_files_are_missing_only_if_they_stay_missing(clock: Clock) -> None:
    """A listing may show the end of a save of another node before its shards."""
    store = MemoryStore()
    first, second, last = save(1, 10), save(1, 20), save(1, 30)
    done = commit_all(store, first, second, last, rules=Retention(latest=2))
    hidden = path(second, shard_name(1, second.save_id))
    shard = store.objects.pop(hidden)
    janitor = Janitor(tuple, DEADLINE_S, clock)
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
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, last = save(1, 10), save(2, 20)
    done = commit_all(store, damaged, last)
    store.put(end_path(damaged), b'{"digest":"0123456789abcdef","version":2}')
    janitor = Janitor()
    for _ in range(3):
        janitor.tidy(done)
    assert len(names_of(store, damaged)) == 5
    assert caplog.text.count("its end cannot be read") == 1


def test_a_metric_that_no_checkpoint_has_removes_none_and_is_logged(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    saves = save(1, 5), save(2, 10), save(2, 20)
    Janitor().tidy(commit_all(store, *saves, rules=Retention(best=Best(metric="los"))))
    assert all(is_whole(store, named) for named in saves)
    assert "no checkpoint has the metric 'los'" in caplog.text


def test_an_error_of_one_removal_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    stuck, other, last = save(1, 10), save(1, 20), save(1, 30)

    class Stuck(MemoryStore):
        def delete(self, names: Iterable[str]) -> None:
            names = list(names)
            if any(stuck.save_id in name for name in names):
                raise StorageError("cannot delete (Operation not permitted)")
            super().delete(names)

    store = Stuck()
    Janitor().tidy(commit_all(store, stuck, other, last))
    assert "cannot remove files of iteration 10: cannot delete" in caplog.text
    assert [is_whole(store, stuck), bool(names_of(store, other))] == [True, False]


def test_a_deletion_that_took_effect_with_an_error_leaves_nothing() -> None:
    """Nor does the checkpoint count any more, for rules that would keep it."""
    first, last = save(1, 10), save(1, 20)

    class LosesAnAnswer(MemoryStore):
        def delete(self, names: Iterable[str]) -> None:
            names = list(names)
            is_lost = names == [end_path(first)] and end_path(first) in self.objects
            super().delete(names)
            if is_lost:
                raise StorageError("no answer")

    store, janitor = LosesAnAnswer(), Janitor()
    commit_all(store, first, last)
    for latest in (2, 2, 1, 2, 2):  # the directories are settled when the first one expires
        janitor.tidy(committed(store, last, Retention(latest=latest)))
    assert directories(store) == [iteration_dir(20)]


# ---------------------------------------------------------------------- what others have put there


def test_links_renamed_directories_and_foreign_files_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint in the renamed directory takes no place among the latest ones."""
    root, elsewhere = tmp_path / "save", tmp_path / "elsewhere"
    store = PosixStore(root)
    gone, linked, kept, renamed, last = (save(1, iteration) for iteration in (10, 20, 25, 30, 50))
    done = commit_all(store, gone, linked, kept, renamed, last, rules=Retention(latest=2))
    put_bulk(store, save(1, 30, sequence=29))  # a dead save next to the renamed checkpoint
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
    moved = sorted(os.listdir(root / iteration_dir(40)))
    janitor = Janitor()
    for _ in range(3):
        janitor.tidy(done)
    assert {name: (root / name).read_bytes() for name in others} == others
    assert {file: file.read_bytes() for file in before} == before
    assert (root / iteration_dir(20)).is_symlink()
    assert sorted(os.listdir(root / iteration_dir(40))) == moved
    assert sorted(os.listdir(root / iteration_dir(10))) == [shard.name, "notes.txt"]
    assert is_whole(store, kept)
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == [
        f"{root}/iter_0000020: is a symbolic link; nothing in it is removed",
        f"{root}/iter_0000040: holds the checkpoint of iteration 30, so it was renamed or copied "
        "by hand; nothing in it is removed",
        f"{root}/iter_0000010: the save was removed, but the directory stays, because it holds "
        f"files of other programs: {shard.name}, notes.txt",
    ]


def test_files_that_nfs_keeps_for_a_reader_stay_and_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    done = commit_all(PosixStore(tmp_path), save(1, 10), save(1, 20))
    open_elsewhere = tmp_path / iteration_dir(10) / ".nfs000000000012ab3400000001"
    open_elsewhere.touch()
    janitor = Janitor()
    for _ in range(4):
        janitor.tidy(done)
    assert os.listdir(tmp_path / iteration_dir(10)) == [open_elsewhere.name]
    assert caplog.text.count(open_elsewhere.name) == 1
    assert "other programs" not in caplog.text
    open_elsewhere.unlink()
    janitor.tidy(done)
    assert not (tmp_path / iteration_dir(10)).exists()


def test_an_empty_directory_and_files_of_a_killed_writer_go_when_a_checkpoint_has_passed_them(
    tmp_path: Path,
) -> None:
    """A process was killed before it had written a file; the first look comes at the start."""
    store, dead, last, later = PosixStore(tmp_path), save(1, 5), save(2, 20), save(2, 40)
    put_bulk(store, dead)
    (tmp_path / iteration_dir(5) / f".{end_name(dead.save_id)}.0123abcd.tmp").touch()
    for iteration in (10, 30):
        (tmp_path / iteration_dir(iteration)).mkdir()
    janitor = Janitor()
    janitor.tidy_after_start(store, RunObject(name=run(2)))
    janitor.tidy(commit_all(store, last))
    assert directories(store) == [iteration_dir(20), iteration_dir(30)]
    janitor.tidy(commit_all(store, later, rules=Retention()))
    assert directories(store) == [iteration_dir(20), iteration_dir(40)]


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


def test_a_directory_is_listed_until_a_look_finds_nothing_and_a_manifest_read_once() -> None:
    store = CountingStore()
    saves = [save(1, iteration) for iteration in range(10, 60, 10)]
    done = commit_all(store, *saves, rules=Retention(latest=9))
    janitor = Janitor(deadline_s=DEADLINE_S)
    for _ in range(3):
        janitor.tidy(done)
    listed = [iteration_dir(named.iteration) for named in saves]
    assert sorted(store.listed) == sorted([*listed, *listed, listed[-1]])
    assert store.read.count(None) == 5
    store.listed.clear()
    store.read.clear()
    janitor.tidy_after_start(store, RunObject(name=run(2), ancestors=descent(saves[-1], ())))
    assert len(store.listed) == 5
    assert all(nbytes is not None and nbytes < 100 for nbytes in store.read), "heads only"


def test_a_checkpoint_that_another_agent_has_removed_counts_no_more(store: Store) -> None:
    first, second, last, later = (save(1 + n // 4, 10 * n) for n in range(1, 5))
    janitor = Janitor(deadline_s=DEADLINE_S)
    janitor.tidy(commit_all(store, first, second, last, rules=Retention()))
    store.put(end_path(second), encode_failure(Failure(failed="removed")))
    start = RunObject(name=run(2), ancestors=descent(last, ()), save_id=last.save_id, iteration=30)
    janitor.tidy_after_start(store, start)
    commit_all(store, later)
    janitor.tidy(committed(store, later, Retention(latest=3), start.ancestors))
    assert is_whole(store, first)


def test_the_thread_outlives_an_error_and_does_not_hold_up_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Hanging(MemoryStore):
        def delete(self, names: Iterable[str]) -> None:
            begun.set()
            assert go_on.wait(60.0)
            super().delete(names)

    store, dead, last = Hanging(), save(1, 10), save(2, 20)
    put_bulk(store, dead)
    commit(store, last)
    janitor = Janitor()
    broken: Any = None
    janitor.after_commit(committed(broken, last))
    janitor.after_commit(committed(store, last))
    assert begun.wait(60.0)
    janitor.close(0.0)
    go_on.set()
    eventually("the removal", lambda: not names_of(store, dead))
    assert "obsolete files were not removed" in caplog.text
