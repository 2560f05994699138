"""Order of the checkpoints in memory and storage that a load tries if one is damaged."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.catalog import listing
from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, read_manifest
from megatron_flashckpt.errors import (
    ConfigError,
    CorruptCheckpointError,
    FlashCkptError,
    FormatVersionError,
    MissingStateError,
    NotCommittedError,
    RenamedCheckpointError,
    StorageError,
)
from megatron_flashckpt.file_format.file_names import (
    MANIFEST,
    RELEASE,
    TRACKER,
    iteration_dir,
    next_attempt,
    record_name,
)
from megatron_flashckpt.load.candidates import Candidates
from megatron_flashckpt.load.memory_checkpoints import HeldInMemory, MemoryCheckpoint
from megatron_flashckpt.load.named_checkpoint import NamedCheckpoint, named_in, refuse_path_inside
from megatron_flashckpt.storage.posix import PosixStorage
from tests.support.checkpoints import make

DAMAGE = CorruptCheckpointError("rank 3: a file: digest 1, expected 2")


def held(iteration: int, committed: int = 6) -> MemoryCheckpoint:
    """Return a checkpoint in memory; its agent has committed the iteration `committed`."""
    slab: Any = None
    return MemoryCheckpoint(slab, Offer(0, iteration, f"{iteration:08x}", False, None), committed)


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    """A storage with empty manifests of iterations 2, 4 and 6; the tracker names 6."""
    for iteration in (2, 4, 6):
        (tmp_path / iteration_dir(iteration)).mkdir()
        (tmp_path / iteration_dir(iteration) / MANIFEST).touch()
    (tmp_path / TRACKER).write_text("6")
    return PosixStorage(tmp_path)


def tried(
    storage: PosixStorage,
    memory: list[MemoryCheckpoint],
    errors: dict[str, FlashCkptError],
    *,
    fall_back: bool = True,
) -> list[str]:
    """Return the checkpoints that a load tries, in order. Loads fail for the names in `errors`."""
    candidates = Candidates(
        storage, named_in(storage, None), HeldInMemory(memory), rank=0, fall_back=fall_back
    )
    order = []
    while (current := candidates.current) is not None:
        name = (
            f"memory {current.offer.iteration}"
            if isinstance(current, MemoryCheckpoint)
            else str(current)
        )
        order.append(name)
        if name not in errors:
            candidates.report()
            break
        candidates.refuse(errors[name])
    return order


@pytest.mark.parametrize(
    ("memory", "damaged", "order"),
    [
        ([], [], ["6"]),
        ([], ["6"], ["6", "4"]),
        ([], ["6", "4"], ["6", "4", "2"]),
        ([held(6), held(4)], [], ["memory 6"]),
        # Memory is damaged; storage has the same iteration, so no iteration is lost.
        ([held(6), held(4)], ["memory 6"], ["memory 6", "6"]),
        ([held(6), held(4)], ["memory 6", "6"], ["memory 6", "6", "memory 4"]),
        ([held(6), held(4)], ["memory 6", "6", "memory 4"], ["memory 6", "6", "memory 4", "4"]),
        # Iteration 8 was staged but never committed, so storage lacks it.
        ([held(8), held(6)], ["memory 8"], ["memory 8", "memory 6"]),
        # Training fell back from 6 to 4 and crashed after it had staged 5. If 6 is damaged again,
        # iteration 5 comes next.
        ([held(5), held(4)], ["6"], ["6", "memory 5"]),
        # Memory still holds iterations that retention has removed from storage.
        ([held(5), held(3)], ["6"], ["6", "memory 5"]),
        ([held(5), held(3)], ["6", "memory 5", "4"], ["6", "memory 5", "4", "memory 3"]),
    ],
)
def test_the_newest_intact_checkpoint_in_memory_or_storage_is_used(
    storage: PosixStorage, memory: list[MemoryCheckpoint], damaged: list[str], order: list[str]
) -> None:
    assert tried(storage, memory, dict.fromkeys(damaged, DAMAGE)) == order


def test_after_the_tracker_was_set_back_a_fallback_ignores_memory(storage: PosixStorage) -> None:
    storage.put(TRACKER, b"4")
    assert tried(storage, [held(6), held(2)], {"4": DAMAGE}) == ["4", "2"]
    assert tried(storage, [held(6)], {"4": DAMAGE}) == ["4", "2"]


def test_if_all_older_checkpoints_are_damaged_newer_ones_are_tried(storage: PosixStorage) -> None:
    storage.put(TRACKER, b"2")
    assert tried(storage, [], {"2": DAMAGE}) == ["2", "6"]
    assert tried(storage, [], {"2": DAMAGE, "6": DAMAGE}) == ["2", "6", "4"]
    storage.put(TRACKER, b"4")
    assert tried(storage, [], {"4": DAMAGE, "2": DAMAGE}) == ["4", "2", "6"]


def test_a_tracker_that_names_no_checkpoint_falls_back_to_the_newest(storage: PosixStorage) -> None:
    storage.put(TRACKER, b"5")
    assert tried(storage, [], {"5": NotCommittedError("not there")}) == ["5", "6"]
    storage.put(TRACKER, b"?")
    assert tried(storage, [], {}) == ["6"]


MINE, BASE, OTHER = "a" * 8, "b" * 8, "c" * 8


@pytest.mark.parametrize(
    ("save_id", "iteration", "lineage", "used"),
    [
        (f"{MINE}0003", 6, (), True),
        (f"{MINE}0001", 4, (), True),
        (f"{BASE}0009", 4, (f"{BASE}0009",), True),
        # Committed by the previous run after this run had resumed from memory.
        (f"{BASE}0008", 4, (f"{BASE}0009",), True),
        (next_attempt(f"{MINE}0003"), 6, (f"{BASE}0009",), True),
        # The manifest is damaged, so its save id is unknown.
        (None, 6, (f"{BASE}0009",), True),
        (f"{OTHER}0009", 6, (f"{BASE}0009",), False),
        (f"{OTHER}0009", 4, (f"{BASE}0009",), False),
        (f"{OTHER}0009", 4, ("",), False),
        # A new agent knows no save ids: only older iterations in storage count as the same history.
        (f"{OTHER}0009", 6, (), False),
        (f"{OTHER}0009", 4, (), True),
    ],
)
def test_memory_of_another_history_than_storage_is_not_used(
    storage: PosixStorage,
    caplog: pytest.LogCaptureFixture,
    save_id: str | None,
    iteration: int,
    lineage: tuple[str, ...],
    used: bool,
) -> None:
    slab: Any = None
    offer = Offer(0, 6, f"{MINE}0003", False, None)
    memory = [MemoryCheckpoint(slab, offer, -1, frozenset(lineage))]
    named = NamedCheckpoint(iteration, save_id=save_id)
    candidates = Candidates(storage, named, HeldInMemory(memory), rank=0, fall_back=True)
    assert candidates.current == (memory[0] if used else iteration)
    assert candidates.is_other_history != used
    messages = [record.getMessage() for record in caplog.records]
    expected = f"6 in host memory (save {MINE}0003) is not used: {storage.place}/iter_000000"
    assert [expected in line and f"holds save {save_id}" in line for line in messages] == [True] * (
        not used
    )


@pytest.mark.parametrize(
    "error",
    [
        MissingStateError("another model"),
        FormatVersionError("of the future"),
        StorageError(13, "permission denied"),
        FlashCkptError("anything"),
    ],
)
def test_an_error_other_than_damage_never_falls_back(
    storage: PosixStorage, error: FlashCkptError
) -> None:
    with pytest.raises(type(error)) as caught:
        tried(storage, [], {"6": error})
    assert caught.value is error
    # After any error in memory, the load tries storage.
    assert tried(storage, [held(6), held(4)], {"memory 6": error}) == ["memory 6", "6"]


def test_training_never_starts_anew_because_memory_failed_to_load(
    tmp_path: Path,
) -> None:
    """Only damage may cost iterations. Storage is empty here, so all iterations would be lost."""
    error = FlashCkptError("rank 1: OutOfMemoryError: CUDA out of memory")
    with pytest.raises(FlashCkptError) as caught:
        tried(PosixStorage(tmp_path), [held(6, committed=-1)], {"memory 6": error})
    assert caught.value is error


@pytest.mark.parametrize("error", [FlashCkptError("no memory"), MissingStateError("a layer")])
def test_without_fallback_no_error_of_memory_costs_iterations(
    storage: PosixStorage, error: FlashCkptError
) -> None:
    with pytest.raises(type(error)) as caught:
        tried(storage, [held(8)], {"memory 8": error}, fall_back=False)
    assert caught.value is error
    order = tried(storage, [held(6)], {"memory 6": error}, fall_back=False)
    assert order == ["memory 6", "6"]


def test_without_fallback_no_iteration_is_lost(storage: PosixStorage) -> None:
    with pytest.raises(CorruptCheckpointError):
        tried(storage, [], {"6": DAMAGE}, fall_back=False)
    with pytest.raises(CorruptCheckpointError):
        tried(storage, [held(8)], {"memory 8": DAMAGE}, fall_back=False)
    order = tried(storage, [held(6)], {"memory 6": DAMAGE}, fall_back=False)
    assert order == ["memory 6", "6"]
    storage.put(TRACKER, b"?")
    with pytest.raises(CorruptCheckpointError, match="is no iteration; write 6 "):
        tried(storage, [], {}, fall_back=False)


def test_if_all_checkpoints_are_damaged_the_error_names_each(storage: PosixStorage) -> None:
    with pytest.raises(CorruptCheckpointError) as caught:
        tried(storage, [], dict.fromkeys("642", DAMAGE))
    for iteration in (6, 4, 2):
        assert f"\n  {iteration} in storage: rank 3: a file: digest 1" in str(caught.value)


def test_the_report_names_damage_place_and_loss(
    storage: PosixStorage, caplog: pytest.LogCaptureFixture
) -> None:
    tried(storage, [held(6)], {"memory 6": DAMAGE, "6": DAMAGE})
    block = caplog.messages[-1]
    assert f"DAMAGED CHECKPOINT in {storage.place}\n" in block
    assert "iteration 6 in memory: rank 3: a file" in block
    assert "iteration 6 in storage: rank 3: a file" in block
    assert "RESUMES FROM ITERATION 4 in storage: 2 iterations are lost" in block


def test_the_report_of_one_lost_iteration_is_singular(
    storage: PosixStorage, caplog: pytest.LogCaptureFixture
) -> None:
    tried(storage, [held(7)], {"memory 7": DAMAGE})
    assert "RESUMES FROM ITERATION 6 in storage: 1 iteration is lost" in caplog.messages[-1]


def test_only_rank_0_logs_the_report(
    storage: PosixStorage, caplog: pytest.LogCaptureFixture
) -> None:
    candidates = Candidates(storage, NamedCheckpoint(4), HeldInMemory(), rank=1, fall_back=True)
    candidates.report()
    assert caplog.messages == []


def test_iteration_0_may_be_a_commit_that_no_tracker_names(tmp_path: Path) -> None:
    made = make(tmp_path, iteration=0)
    (tmp_path / TRACKER).unlink()
    assert named_in(PosixStorage(tmp_path), None).iteration is None
    (made.directory / record_name(0, made.save_id)).touch()
    assert named_in(PosixStorage(tmp_path), None).iteration == 0


def test_the_manifests_of_newer_iterations_are_not_read_without_commit_records(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the tracker was set back, there may be hundreds, of 10 MB each in a large job."""
    storage.put(TRACKER, b"2")
    read: list[int] = []
    reader = "megatron_flashckpt.load.named_checkpoint.read_manifest"
    monkeypatch.setattr(reader, lambda _, iteration: read.append(iteration))
    assert named_in(storage, None) == NamedCheckpoint(2)
    assert read == []


def test_a_job_that_ignores_existing_checkpoints_logs_a_warning(
    storage: PosixStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / TRACKER).unlink()
    with caplog.at_level(logging.WARNING):
        assert named_in(storage, None) == NamedCheckpoint(None)
    assert "to resume from the newest, write 6 into that file" in caplog.text


def test_a_renamed_directory_stops_the_load_with_the_name_that_it_needs(tmp_path: Path) -> None:
    """An older checkpoint is not what the person wants who named this directory."""
    for iteration, save_id in ((2, "a" * 12), (4, "b" * 12)):
        make(tmp_path, iteration, save_id)
    (tmp_path / iteration_dir(4)).rename(tmp_path / iteration_dir(100))
    (tmp_path / TRACKER).write_text("100")
    storage = PosixStorage(tmp_path)
    with pytest.raises(RenamedCheckpointError, match="rename it to iter_0000004") as caught:
        StoredCheckpoint(storage, 100, read_manifest(storage, 100))
    named = named_in(storage, None)
    candidates = Candidates(storage, named, HeldInMemory(), rank=0, fall_back=True)
    with pytest.raises(RenamedCheckpointError):
        candidates.refuse(caught.value)
    assert [entry.state for entry in listing.checkpoints(storage)] == ["committed", "unreadable"]


def test_our_checkpoint_under_the_name_release_is_loaded_if_the_tracker_says_so(
    tmp_path: Path,
) -> None:
    make(tmp_path, 4)
    (tmp_path / iteration_dir(4)).rename(tmp_path / "release")
    (tmp_path / TRACKER).write_text("release")
    storage = PosixStorage(tmp_path)
    assert named_in(storage, None).iteration == RELEASE
    stored = StoredCheckpoint(storage, RELEASE, read_manifest(storage, RELEASE))
    assert stored.manifest.iteration == 4
    (entry,) = listing.checkpoints(storage)
    assert (entry.iteration, entry.state) == (None, "committed")
    assert "iteration 4" in entry.remark


def test_a_damaged_release_is_not_replaced_by_a_checkpoint_without_its_optimizer(
    tmp_path: Path,
) -> None:
    """A load takes only the weights of a release; masters and moments would stay random."""
    make(tmp_path, 2)
    make(tmp_path, 4, "b" * 12)
    (tmp_path / iteration_dir(4)).rename(tmp_path / "release")
    (tmp_path / TRACKER).write_text("release")
    storage = PosixStorage(tmp_path)
    candidates = Candidates(
        storage, named_in(storage, None), HeldInMemory(), rank=0, fall_back=True
    )
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        candidates.refuse(CorruptCheckpointError("damaged"))


def test_a_load_from_inside_a_save_directory_is_refused_with_the_right_flags(
    tmp_path: Path,
) -> None:
    """Megatron starts from scratch then, and its first save moves the tracker back."""
    make(tmp_path, 4)
    inside = tmp_path / iteration_dir(4)
    flags = f"--load {tmp_path} --ckpt-step 4"
    with pytest.raises(ConfigError, match=f"is one checkpoint, .*{flags}"):
        refuse_path_inside(str(inside))
    with pytest.raises(ConfigError, match="is a file; name the directory"):
        refuse_path_inside(str(inside / MANIFEST))
    refuse_path_inside(str(tmp_path))
    refuse_path_inside(str(tmp_path / "missing"))
    own = tmp_path / "iter_0000009"
    own.mkdir()
    (own / TRACKER).write_text("4")
    refuse_path_inside(str(own))
