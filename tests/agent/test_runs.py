"""A run takes its number: against other starts, retries, damage, and what is there already."""

from __future__ import annotations

import collections
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_flashckpt.agent import alive, runs
from megatron_flashckpt.agent.alive import Admission
from megatron_flashckpt.catalog.directory import put_tracked, read_facts, tracked
from megatron_flashckpt.catalog.lineage import NOTHING, Save, Tracked
from megatron_flashckpt.errors import AlreadyExistsError, OtherWriterError, StorageError
from megatron_flashckpt.file_format.file_names import ALIVE, TRACKER, alive_file, run_file
from megatron_flashckpt.file_format.run_object import Ancestor, RunObject, encode_run
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.agent.test_alive import Clock, clock, elsewhere, no_agent  # noqa: F401, a fixture
from tests.support.memory_store import MemoryStore

ME = os.getpid()


def admission(store: Any, policy: alive.Policy = "refuse") -> Admission:
    return Admission(store, policy, 0.0, no_agent)


def opened(store: Any, save: Save | None = None, **more: Any) -> RunObject:
    """Return a run that rank 0 of a job has opened, on whatever machine."""
    run = runs.new_run(save, (), "scratch" if save is None else "storage", 8)
    return runs.open_run(admission(store), run, **more)


def put_object(store: MemoryStore, number: int, name: str | None = None) -> None:
    run = RunObject(name=name or f"{number:06d}-0000")
    store.create(run_file(number), encode_run(run))


def test_a_run_repeats_all_ancestors_and_continues_the_numbers() -> None:
    store = MemoryStore()
    first = opened(store)
    assert first.name.startswith("000001-")
    assert (first.ancestors, first.source) == ((), "scratch")
    save = Save(20, f"{first.name}.00002.1")
    run = runs.new_run(save, first.ancestors, "storage", 8)
    second = runs.open_run(admission(store), run)
    assert second.name.startswith("000002-")
    assert second.ancestors == (Ancestor(first.name, 20),)
    third = runs.new_run(Save(30, f"{second.name}.00001.1"), second.ancestors, "memory", 8)
    assert third.ancestors == (Ancestor(second.name, 30), Ancestor(first.name, 20))


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("iter_0000007/000041-3fa9.00001.1.rank_00000.safetensors", 42),
        ("iter_0000007/000041-3fa9.00001.1.end", 42),
        ("iter_0000007/notes.txt", 1),
        ("elsewhere/000041-3fa9.00001.1.end", 1),
    ],
)
def test_the_number_is_higher_than_that_of_any_save_in_the_directory(
    name: str, number: int
) -> None:
    """`flashckpt/` was removed, or the checkpoint was copied here; the save may be unfinished."""
    store = MemoryStore()
    store.create(name, b"x")
    assert opened(store).name.startswith(f"{number:06d}-")


def test_the_number_is_higher_than_that_of_any_save_in_memory() -> None:
    """An older copy of the directory was put in its place, while agents hold later saves."""
    store = MemoryStore()
    put_object(store, 3)
    assert opened(store, held=7).name.startswith("000008-")
    resumed = Save(5, "000011-aaaa.00001.1")
    assert opened(store, resumed).name.startswith("000012-")


class _Hooked(MemoryStore):
    """Calls `meanwhile` once, right before the first object is created."""

    meanwhile: Callable[[], object] | None = None

    def create(self, name: str, data: bytes) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        super().create(name, data)


@pytest.mark.parametrize("other", ["trains", "was killed", "is to be taken over"])
def test_of_two_starts_at_one_moment_one_is_refused_or_takes_the_next_number(
    other: str,
    clock: Clock,  # noqa: F811
) -> None:
    store = _Hooked()

    def start_elsewhere() -> None:
        assert any(name.startswith(ALIVE) for name in store.objects), (
            "who finds the run asks for it"
        )
        put_object(store, 1, "000001-aaaa")
        alive.put(store, elsewhere("000001-aaaa"))
        if other != "was killed":
            clock.every(2.0, lambda number: alive.put(store, elsewhere("000001-aaaa", number)))

    store.meanwhile = start_elsewhere
    start = admission(store, "take_over" if other == "is to be taken over" else "refuse")
    run = runs.new_run(None, (), "scratch", 1)
    if other != "trains":
        assert runs.open_run(start, run, agent_pid=ME).name.startswith("000002-")
        return
    with pytest.raises(OtherWriterError, match="000001-aaaa"):
        runs.open_run(start, run, agent_pid=ME)
    assert set(store.objects) == {run_file(1), alive_file("000001-aaaa")}, "nothing is left"


@pytest.mark.parametrize(
    "error",
    [
        AlreadyExistsError(errno.EEXIST, "a retry met itself"),
        StorageError(errno.ETIMEDOUT, "the answer was lost"),
        StorageError(errno.EROFS, "read-only"),
    ],
    ids=str,
)
def test_a_create_that_happened_counts_whatever_its_answer(error: StorageError) -> None:
    class Raises(MemoryStore):
        def create(self, name: str, data: bytes) -> None:
            if error.errno != errno.EROFS:
                super().create(name, data)
            raise error

    store = Raises()
    if error.errno == errno.EROFS:
        with pytest.raises(StorageError, match="read-only"):
            opened(store, agent_pid=ME)
        assert not store.objects
    else:
        run = opened(store, agent_pid=ME)
        assert run.name.startswith("000001-")
        assert set(store.objects) == {run_file(1), alive_file(run.name)}


@pytest.mark.parametrize("contents", [b"garbage", b"{}", b'{"name": "no run"}'])
def test_the_number_of_a_damaged_object_stays_taken(contents: bytes) -> None:
    store = _Hooked()
    store.meanwhile = lambda: store.create(run_file(1), contents)
    assert opened(store).name.startswith("000002-")
    assert store.objects[run_file(1)] == contents
    assert opened(store).name.startswith("000003-")


class _Counting(MemoryStore):
    """Counts requests by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: collections.Counter[str] = collections.Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in ("get", "put", "create", "stat", "list", "delete"):
            object.__getattribute__(self, "requests")[name] += 1
        return object.__getattribute__(self, name)


def test_a_start_costs_the_same_after_a_thousand_runs() -> None:
    def requests(earlier: int) -> dict[str, int]:
        store = _Counting()
        for number in range(1, earlier + 1):
            put_object(store, number)
        store.requests.clear()
        start = admission(store)
        start.await_end()
        run = runs.open_run(start, runs.new_run(None, (), "scratch", 1), agent_pid=ME)
        assert run.name.startswith(f"{earlier + 1:06d}-")
        runs.grant_wish(store, run, None)
        return dict(store.requests)

    few = requests(1)
    assert requests(1000) == few
    assert sum(few.values()) <= 9


def test_a_load_grants_what_it_has_seen_in_the_tracker() -> None:
    """A person who sets the tracker back during the load still has a wish."""
    store = MemoryStore()
    store.put(TRACKER, b"20")
    facts = read_facts(store)
    store.put(TRACKER, b"10")
    run = opened(store)
    runs.grant_wish(store, run, None)
    assert tracked(store) is None, "a job that loads nothing grants nothing"
    runs.grant_wish(store, run, facts)
    assert tracked(store) == Tracked(20, "", run.name)


def test_a_job_that_loads_nothing_starts_beside_a_tracker_that_is_no_file(tmp_path: Path) -> None:
    """Its first commit replaces the link."""
    (tmp_path / TRACKER).symlink_to("nowhere")
    store = PosixStore(tmp_path)
    runs.grant_wish(store, opened(store), None)
    assert tracked(store) is None


@pytest.mark.parametrize("loads", [True, False])
def test_a_start_is_granted_that_the_tracker_was_removed(loads: bool) -> None:
    store = MemoryStore()
    put_tracked(store, Tracked(20, "000000-aaaa.00001.1"))
    facts = read_facts(store) if loads else None
    run = opened(store)
    runs.grant_wish(store, run, facts)
    assert tracked(store) == Tracked(NOTHING, run.name)


@pytest.mark.parametrize("state", ["trains", "has left", "was killed here"])
def test_the_message_of_an_overtaken_run_names_the_later_run_and_the_remedy(
    tmp_path: Path, state: str
) -> None:
    run = RunObject(name="000009-abcd", host="node7", opened_at=0.0)
    store = MemoryStore(str(tmp_path))
    sign = alive.sign_of_life(run.name, "training", 1)
    if state == "trains":
        alive.put(store, sign)
    elif state == "was killed here":
        alive.put(store, msgspec.structs.replace(sign, started=sign.started + 1))
    message = runs.why_overtaken(store, run)
    for words in (str(tmp_path), "000009-abcd", "node7", "or save elsewhere"):
        assert words in message
    assert ("end one of the two jobs" in message) is (state == "trains")
    assert ("has ended since: start this job again" in message) is (state != "trains")
