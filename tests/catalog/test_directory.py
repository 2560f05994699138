"""What a store holds, read into facts: late, damaged, foreign and removed objects."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
import pytest

from megatron_flashckpt import FORMAT_VERSION
from megatron_flashckpt.catalog.directory import (
    later_run,
    put_tracked,
    read_facts,
)
from megatron_flashckpt.catalog.lineage import Candidate, Save, Tracked, choose
from megatron_flashckpt.errors import FormatVersionError, StorageError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.run_object import (
    Ancestor,
    Ancestors,
    RunObject,
    encode_run,
)
from megatron_flashckpt.file_format.seal import seal
from megatron_flashckpt.storage.opening import open_store
from tests.support.memory_store import MemoryStore


def run(number: int) -> str:
    return file_names.run_name(number, "abcd")


def open_run(store: MemoryStore, number: int, ancestors: Ancestors = ()) -> str:
    name = run(number)
    store.create(file_names.run_file(number), encode_run(RunObject(name=name, ancestors=ancestors)))
    return name


def commit(store: MemoryStore, run_name: str, iteration: int, ancestors: Ancestors = ()) -> Save:
    save_id = file_names.save_name(run_name, iteration)
    end = {
        "version": FORMAT_VERSION,
        "iteration": iteration,
        "save_id": save_id,
        "ancestors": ancestors,
    }
    name = f"{file_names.iteration_dir(iteration)}/{file_names.end_name(save_id)}"
    store.create(name, seal(msgspec.json.encode(end)))
    return Save(iteration, save_id)


def test_a_thousand_earlier_runs_cost_no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    store, read = MemoryStore(), list[str]()
    ancestors: Ancestors = ()
    for number in range(1, 1001):
        ancestors = (Ancestor(open_run(store, number, ancestors), number), *ancestors)
    save = commit(store, run(1000), 1000, ancestors[1:])
    get = store.get
    monkeypatch.setattr(store, "get", lambda name, *where: read.append(name) or get(name, *where))
    assert list(read_facts(store).stored) == [save]
    assert len([name for name in read if name.startswith(file_names.RUNS)]) == 1


def test_a_damaged_object_is_replaced_by_what_the_saves_repeat(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    first = open_run(store, 1)
    ancestors = (Ancestor(first, 10),)
    second = open_run(store, 2, ancestors)
    commit(store, first, 10)
    commit(store, second, 20, ancestors)
    store.put(file_names.run_file(2), b"{")
    store.create(file_names.run_file(3), encode_run(RunObject(name=run(7))))
    facts = read_facts(store)
    assert facts.runs == {first: (), second: ancestors}
    assert "000002.json" in caplog.text
    assert "000003.json" in caplog.text
    assert later_run(store, 1) is None
    open_run(store, 4)
    open_run(store, 5)
    store.create(file_names.run_file(6), b"{")
    assert later_run(store, 1) == RunObject(name=run(5))


def test_a_run_that_left_nothing_tells_where_it_left_its_ancestor() -> None:
    """The run above it died early, too, and began from scratch."""
    store = MemoryStore()
    first = open_run(store, 1)
    saves = [commit(store, first, 10), commit(store, first, 20)]
    open_run(store, 2, (Ancestor(first, 10),))
    open_run(store, 3)
    assert choose(read_facts(store)).candidates == (Candidate(saves[0], in_memory=False),)


def test_memory_of_a_dead_branch_is_of_a_known_run() -> None:
    """The branch has committed nothing."""
    store = MemoryStore()
    first = open_run(store, 1)
    commit(store, first, 10)
    ancestors = (Ancestor(first, 10),)
    held = Save(20, file_names.save_name(open_run(store, 2, ancestors), 1))
    open_run(store, 3, ancestors)
    choice = choose(read_facts(store, {held: ancestors}))
    assert "another history" in choice.unused[held]


@pytest.mark.parametrize(("code", "is_damage"), [(errno.EIO, True), (errno.EACCES, False)])
def test_an_end_that_cannot_be_read_is_passed_over_by_no_load(
    code: int, *, is_damage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load of a damaged save reports it; other errors concern all saves."""
    store = MemoryStore()
    save = commit(store, open_run(store, 1), 10)
    get = store.get

    def get_other(name: str, *where: int) -> bytes:
        if name.startswith(file_names.iteration_dir(10)):
            raise StorageError(code, name)
        return get(name, *where)

    monkeypatch.setattr(store, "get", get_other)
    if is_damage:
        assert list(read_facts(store).stored) == [save]
    else:
        with pytest.raises(StorageError):
            read_facts(store)


def test_no_flipped_bit_of_a_run_or_of_the_twin_hides_a_checkpoint() -> None:
    store = MemoryStore()
    first = open_run(store, 1)
    ancestors = (Ancestor(first, 20),)
    second = open_run(store, 2, ancestors)
    saves = [commit(store, first, 10), commit(store, first, 20)]
    saves.append(commit(store, second, 30, ancestors))
    store.put(file_names.TRACKER, b"30")
    put_tracked(store, Tracked(30, saves[-1].save_id))
    held = Save(40, file_names.save_name(second, 40))
    in_memory = [Candidate(held, in_memory=True)]
    expected = in_memory + [Candidate(save, in_memory=False) for save in reversed(saves)]
    for name in (file_names.run_file(2), file_names.TRACKED):
        contents = store.get(name)
        for bit in range(8 * len(contents)):
            flipped = bytearray(contents)
            flipped[bit // 8] ^= 1 << bit % 8
            store.put(name, bytes(flipped))
            choice = choose(read_facts(store, {held: ancestors}))
            assert list(choice.candidates) == expected, bytes(flipped)
        store.put(name, contents)


def test_a_run_whose_object_is_damaged_keeps_its_only_save_in_memory() -> None:
    store = MemoryStore()
    commit(store, open_run(store, 1), 10)
    store.create(file_names.run_file(2), b"{")
    ancestors = (Ancestor(run(1), 10),)
    held = Save(20, file_names.save_name(run(2), 1))
    assert read_facts(store, {held: ancestors}).runs == {run(1): (), run(2): ancestors}


def test_without_its_own_directory_saves_in_storage_and_memory_tell_the_runs() -> None:
    store, ancestors = MemoryStore(), (Ancestor(run(7), 10),)
    held = {Save(30, file_names.save_name(run(9), 1)): (Ancestor(run(8), 20),)}
    assert read_facts(store, held).runs == {}, "the directory was emptied"
    commit(store, run(7), 10)
    commit(store, run(8), 20, ancestors)
    runs = {run(7): (), run(8): ancestors, run(9): (Ancestor(run(8), 20),)}
    assert read_facts(store, held).runs == runs


def test_a_directory_of_format_1_is_refused_with_the_commit_that_converts_it() -> None:
    store = MemoryStore()
    store.create("iter_0000010/manifest.json", b"{}")
    with pytest.raises(FormatVersionError, match=file_names.LAST_OF_FORMAT_1):
        read_facts(store)


@pytest.mark.parametrize(
    ("text", "iteration", "is_damaged"),
    [(b"20", 20, False), (b"release", file_names.RELEASE, False), (b"\xff\x00", None, True)],
)
def test_the_tracker_names_an_iteration_or_is_damaged(
    text: bytes, iteration: int | None, is_damaged: bool
) -> None:
    store = MemoryStore()
    store.put(file_names.TRACKER, text)
    facts = read_facts(store)
    assert (facts.tracker, facts.tracker_is_damaged) == (iteration, is_damaged)


def test_a_directory_with_an_end_is_that_of_no_other_program() -> None:
    store = MemoryStore()
    commit(store, open_run(store, 1), 10)
    for iteration in (10, 20):
        store.create(f"{file_names.iteration_dir(iteration)}/metadata.json", b"{}")
    assert list(read_facts(store).foreign) == [20]


def test_links_are_not_entered(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    store = open_store(tmp_path / "save")
    save = file_names.save_name(run(1), 1)
    store.create(f"iter_0000010/{file_names.end_name(save)}", b'{"digest"}')
    (tmp_path / "save/iter_0000020").symlink_to("iter_0000010")
    assert list(read_facts(store).stored) == [Save(10, save)]
