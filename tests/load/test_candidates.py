"""What is loaded instead of what is damaged, from memory and storage together."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.errors import (
    CorruptCheckpointError,
    FlashCkptError,
    FormatVersionError,
    MissingStateError,
    NotCommittedError,
    StorageError,
)
from megatron_flashckpt.file_format.file_names import MANIFEST, TRACKER, iteration_dir, next_attempt
from megatron_flashckpt.load.candidates import Candidates, Named, named_in
from megatron_flashckpt.load.memory_checkpoints import InMemory
from megatron_flashckpt.storage.posix import PosixStorage

DAMAGE = CorruptCheckpointError("rank 3: a file: digest 1, expected 2")


def held(iteration: int, committed: int = 6) -> InMemory:
    """Return a checkpoint in memory; agents know that `committed` was committed."""
    slab: Any = None
    return InMemory(slab, Offer(0, iteration, f"{iteration:08x}", False, None), committed)


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    """Iterations 2, 4 and 6, committed as far as names tell; the tracker names the last."""
    for iteration in (2, 4, 6):
        (tmp_path / iteration_dir(iteration)).mkdir()
        (tmp_path / iteration_dir(iteration) / MANIFEST).touch()
    (tmp_path / TRACKER).write_text("6")
    return PosixStorage(tmp_path)


def tried(
    storage: PosixStorage,
    memory: list[InMemory],
    errors: dict[str, FlashCkptError],
    *,
    fall_back: bool = True,
) -> list[str]:
    """Return what is tried in turn; `errors` says what cannot be loaded, all else can."""
    candidates = Candidates(storage, named_in(storage, None), memory, rank=0, fall_back=fall_back)
    order = []
    while (current := candidates.current) is not None:
        name = (
            f"memory {current.offer.iteration}" if isinstance(current, InMemory) else str(current)
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
        # Memory is damaged: the same iteration in storage, nothing is lost.
        ([held(6), held(4)], ["memory 6"], ["memory 6", "6"]),
        ([held(6), held(4)], ["memory 6", "6"], ["memory 6", "6", "memory 4"]),
        ([held(6), held(4)], ["memory 6", "6", "memory 4"], ["memory 6", "6", "memory 4", "4"]),
        # Staged, never committed: ahead of storage.
        ([held(8), held(6)], ["memory 8"], ["memory 8", "memory 6"]),
        # Training fell back from 6 to 4 and crashed after it had staged 5: that comes first once 6
        # turns out to be damaged again.
        ([held(5), held(4)], ["6"], ["6", "memory 5"]),
        # Retention has removed from storage what memory still has.
        ([held(5), held(3)], ["6"], ["6", "memory 5"]),
        ([held(5), held(3)], ["6", "memory 5", "4"], ["6", "memory 5", "4", "memory 3"]),
    ],
)
def test_the_newest_that_is_not_damaged_is_used_wherever_it_is(
    storage: PosixStorage, memory: list[InMemory], damaged: list[str], order: list[str]
) -> None:
    assert tried(storage, memory, dict.fromkeys(damaged, DAMAGE)) == order


def test_what_somebody_has_gone_back_from_is_not_used_instead(storage: PosixStorage) -> None:
    storage.put(TRACKER, b"4")
    assert tried(storage, [held(6), held(2)], {"4": DAMAGE}) == ["4", "2"]
    assert tried(storage, [held(6)], {"4": DAMAGE}) == ["4", "2"]


def test_damage_never_hides_what_is_newer_and_intact(storage: PosixStorage) -> None:
    storage.put(TRACKER, b"2")
    assert tried(storage, [], {"2": DAMAGE}) == ["2", "6"]
    assert tried(storage, [], {"2": DAMAGE, "6": DAMAGE}) == ["2", "6", "4"]
    storage.put(TRACKER, b"4")
    assert tried(storage, [], {"4": DAMAGE, "2": DAMAGE}) == ["4", "2", "6"]


def test_a_tracker_that_names_nothing_finds_the_newest(storage: PosixStorage) -> None:
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
        # Of the start before, which has committed it after this one had resumed from memory.
        (f"{BASE}0008", 4, (f"{BASE}0009",), True),
        (next_attempt(f"{MINE}0003"), 6, (f"{BASE}0009",), True),
        # A damaged manifest says nothing.
        (None, 6, (f"{BASE}0009",), True),
        (f"{OTHER}0009", 6, (f"{BASE}0009",), False),
        (f"{OTHER}0009", 4, (f"{BASE}0009",), False),
        (f"{OTHER}0009", 4, ("",), False),
        # An agent that replaced another one knows nothing: older ones get the benefit of the doubt.
        (f"{OTHER}0009", 6, (), False),
        (f"{OTHER}0009", 4, (), True),
    ],
)
def test_memory_that_does_not_continue_what_is_in_storage_is_not_used(
    storage: PosixStorage,
    caplog: pytest.LogCaptureFixture,
    save_id: str | None,
    iteration: int,
    lineage: tuple[str, ...],
    used: bool,
) -> None:
    slab: Any = None
    offer = Offer(0, 6, f"{MINE}0003", False, None)
    memory = [InMemory(slab, offer, -1, frozenset(lineage))]
    named = Named(iteration, save_id=save_id)
    candidates = Candidates(storage, named, memory, rank=0, fall_back=True)
    assert candidates.current == (memory[0] if used else iteration)
    assert candidates.is_other_history != used
    said = [record.getMessage() for record in caplog.records]
    expected = f"6 in host memory (save {MINE}0003) is not used: {storage.place}/iter_000000"
    assert [expected in line and f"holds save {save_id}" in line for line in said] == [True] * (
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
def test_what_is_no_damage_never_falls_back(storage: PosixStorage, error: FlashCkptError) -> None:
    with pytest.raises(type(error)) as caught:
        tried(storage, [], {"6": error})
    assert caught.value is error
    # But storage is asked for what memory cannot give, whatever the reason.
    assert tried(storage, [held(6), held(4)], {"memory 6": error}) == ["memory 6", "6"]


def test_training_never_starts_from_scratch_because_memory_could_not_be_loaded(
    tmp_path: Path,
) -> None:
    """Only damage may cost iterations; here storage has nothing, so all of them would be lost."""
    error = FlashCkptError("rank 1: OutOfMemoryError: CUDA out of memory")
    with pytest.raises(FlashCkptError) as caught:
        tried(PosixStorage(tmp_path), [held(6, committed=-1)], {"memory 6": error})
    assert caught.value is error


def test_stop_loses_nothing(storage: PosixStorage) -> None:
    with pytest.raises(CorruptCheckpointError):
        tried(storage, [], {"6": DAMAGE}, fall_back=False)
    with pytest.raises(CorruptCheckpointError):
        tried(storage, [held(8)], {"memory 8": DAMAGE}, fall_back=False)
    found = tried(storage, [held(6)], {"memory 6": DAMAGE}, fall_back=False)
    assert found == ["memory 6", "6"]
    storage.put(TRACKER, b"?")
    with pytest.raises(CorruptCheckpointError, match="is no iteration; write 6 "):
        tried(storage, [], {}, fall_back=False)


def test_if_all_is_damaged_all_of_it_is_named(storage: PosixStorage) -> None:
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


def test_other_ranks_say_nothing(storage: PosixStorage, caplog: pytest.LogCaptureFixture) -> None:
    candidates = Candidates(storage, Named(4), [], rank=1, fall_back=True)
    candidates.report()
    assert caplog.messages == []


def test_a_job_that_starts_anew_beside_checkpoints_says_so(
    storage: PosixStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / TRACKER).unlink()
    with caplog.at_level(logging.WARNING):
        assert named_in(storage, None) == Named(None)
    assert "to resume from the newest, write 6 into that file" in caplog.text
