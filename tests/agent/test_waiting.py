"""Waits of the nodes of a job for each other: their calls of storage, and the results."""

from __future__ import annotations

import itertools
import time
import types
from pathlib import Path

import pytest
from megatron_flashckpt.agent.commit import outcome_of
from megatron_flashckpt.agent.failed_save import leave_note

from megatron_flashckpt.agent import presence
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.posix import PosixStorage
from tests.support.persisting import persisted

SAVE_ID = "a" * 12
POLLS = 50
OPEN = (False, None)


class _CountingStorage(PosixStorage):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.listed = 0

    def list(self, directory: str) -> list[str]:
        self.listed += 1
        return super().list(directory)


@pytest.fixture
def never_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent listings by waiting nodes, even if a test takes long."""
    monkeypatch.setattr(presence, "_FIRST_S_PER_RANK", 1e6)
    monkeypatch.setattr(presence, "_FIRST_S", 1e6)


@pytest.mark.usefixtures("never_lists")
def test_waiting_nodes_ask_for_three_names_and_rarely_list(root: Path) -> None:
    first, second = _CountingStorage(root), _CountingStorage(root)
    committing = persisted(first, SAVE_ID, 0, 2)
    waiting = persisted(second, SAVE_ID, 1, 2)
    (root / file_names.iteration_dir(5) / file_names.record_name(1, SAVE_ID)).rename(root / "later")
    for _ in range(POLLS):
        assert outcome_of(waiting, 60.0) == OPEN
        assert outcome_of(committing, 60.0) == OPEN
    assert (first.listed, second.listed) == (POLLS, 0)
    (root / "later").rename(root / file_names.iteration_dir(5) / file_names.record_name(1, SAVE_ID))
    assert outcome_of(committing, 60.0) == (True, None)
    assert outcome_of(waiting, 60.0) == (True, None)
    assert second.listed == 0


def test_listings_wait_longer_in_larger_jobs_and_each_time(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(presence, "time", types.SimpleNamespace(monotonic=lambda: now))
    for world_size, longest_s in ((2, 0.1), (64, 3.2), (16_384, 10.0)):
        storage = _CountingStorage(root)
        waiting = persisted(storage, SAVE_ID, 1, world_size)
        listed_after: list[float] = []
        began = now
        while now < began + 600.0:
            before = storage.listed
            presence.present_files(waiting)
            if storage.listed > before:
                listed_after.append(now - began)
            now += longest_s / 10 if now < began + longest_s else 0.25
        assert longest_s / 2 <= listed_after[0] <= longest_s * 1.2
        pauses = [b - a for a, b in itertools.pairwise(listed_after)]
        for pause, mean in zip(pauses, (10, 20, 40, 80, 90, 90), strict=False):
            assert 0.75 * mean <= pause <= 1.25 * mean + 0.5
        assert 7 <= len(listed_after) <= 11, "before, there were 20, one every 30 s"


def test_nodes_list_at_different_times(root: Path) -> None:
    saves = [persisted(PosixStorage(root), SAVE_ID, rank, 1000) for rank in range(1, 9)]
    for save in saves:
        presence.present_files(save)
    assert len({save.list_at for save in saves}) == len(saves)


def test_the_committing_node_asks_for_the_last_records_by_name(root: Path) -> None:
    """A listing may be old: NFS compares directory times, which may have ticks of 4 ms."""
    storage = _CountingStorage(root)
    saves = [persisted(storage, SAVE_ID, rank, 64) for rank in range(62)]
    assert outcome_of(saves[0], 60.0) == OPEN
    listed = storage.listed
    old = storage.list(file_names.iteration_dir(5))
    storage.list = lambda directory: old  # type: ignore[method-assign]
    for _ in range(POLLS):
        assert outcome_of(saves[0], 60.0) == OPEN
    assert storage.listed == listed + 1, "only this test has listed"
    for rank in (62, 63):
        saves.append(persisted(storage, SAVE_ID, rank, 64))
    assert outcome_of(saves[0], 60.0) == (True, None)


def test_records_that_a_node_publishes_in_parts_are_listed_soon(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier listings do not count, because they replaced many requests for single names."""
    now = 1000.0
    monkeypatch.setattr(presence, "time", types.SimpleNamespace(monotonic=lambda: now))
    storage = PosixStorage(root)
    saves = [persisted(storage, SAVE_ID, rank, 64, 4) for rank in range(0, 32, 4)]
    for _ in range(10):
        assert outcome_of(saves[0], 60.0) == OPEN
        now += 1.0
    for rank in range(32, 60, 4):
        persisted(storage, SAVE_ID, rank, 64, 4)
    assert outcome_of(saves[0], 60.0) == OPEN
    assert saves[0].missing == [60, 61, 62, 63]
    assert outcome_of(saves[0], 60.0) == OPEN
    persisted(storage, SAVE_ID, 60, 64, 3)
    persisted(storage, SAVE_ID, 63, 64, 1)
    began = now
    while outcome_of(saves[0], 60.0) == OPEN:
        now += 0.25
        assert now < began + 7.0


def test_a_note_of_a_last_missing_rank_is_looked_up_by_name(root: Path) -> None:
    storage = _CountingStorage(root)
    saves = [persisted(storage, SAVE_ID, rank, 64) for rank in range(62)]
    assert outcome_of(saves[0], 60.0) == OPEN
    listed = storage.listed
    leave_note(PosixStorage(root), 5, SAVE_ID, 63, "no space")
    assert outcome_of(saves[0], 60.0) == (True, "no space")
    assert storage.listed == listed


def test_a_node_names_its_note_after_a_failed_rank(root: Path) -> None:
    """A note named after a rank with a record would be seen only in a listing."""
    save = persisted(PosixStorage(root), SAVE_ID, 1, 64)
    save.metas[2] = save.metas[1]
    save.error, save.failed = "no space", {2}
    assert outcome_of(save, 60.0) == (True, "no space")
    note = root / file_names.iteration_dir(5) / file_names.failure_name(2, SAVE_ID)
    assert note.read_text() == "no space"


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_the_committing_node_passes_on_why_a_save_failed(root: Path, failed: int) -> None:
    saves = [persisted(PosixStorage(root), SAVE_ID, rank, 4) for rank in range(3)]
    assert [outcome_of(save, 60.0) for save in saves] == [OPEN] * 3
    leave_note(PosixStorage(root), 5, SAVE_ID, failed, "no space")
    assert outcome_of(saves[0], 60.0) == (True, "no space")
    assert [outcome_of(save, 60.0) for save in saves[1:]] == [(True, "no space")] * 2


@pytest.mark.usefixtures("never_lists")
def test_a_failure_is_seen_even_if_the_committing_node_lacks_the_save(
    root: Path,
) -> None:
    waiting = persisted(PosixStorage(root), SAVE_ID, 1, 3)
    assert outcome_of(waiting, 60.0) == OPEN
    leave_note(PosixStorage(root), 5, SAVE_ID, 2, "no space")
    assert outcome_of(waiting, 60.0) == OPEN, "the waiting node does not list yet"
    waiting.list_at = time.monotonic()
    assert outcome_of(waiting, 60.0) == (True, "no space")
