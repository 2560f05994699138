"""What the nodes of a job ask storage while they wait for each other, and what they are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flashckpt.agent.commit import leave_note, outcome_of
from megatron_flashckpt.layout import names
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.persisting import persisted

SAVE_ID = "a" * 12
POLLS = 50
OPEN = (False, None)


class _Counting(PosixStorage):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.listed = 0

    def list(self, directory: str) -> list[str]:
        self.listed += 1
        return super().list(directory)


def test_nodes_that_do_not_commit_ask_for_two_names_and_seldom_list_them_all(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long this takes, it is not time yet to list again.
    monkeypatch.setattr("megatron_flashckpt.agent.commit._LIST_EVERY_S", 1e6)
    first, second = _Counting(root), _Counting(root)
    committing = persisted(first, SAVE_ID, 0, 2)
    waiting = persisted(second, SAVE_ID, 1, 2)
    (root / names.iteration_dir(5) / names.record_name(1, SAVE_ID)).rename(root / "later")
    for _ in range(POLLS):
        assert outcome_of(waiting, 60.0) == OPEN
        assert outcome_of(committing, 60.0) == OPEN
    assert (first.listed, second.listed) == (POLLS, 1)
    (root / "later").rename(root / names.iteration_dir(5) / names.record_name(1, SAVE_ID))
    assert outcome_of(committing, 60.0) == (True, None)
    assert outcome_of(waiting, 60.0) == (True, None)
    assert second.listed == 1


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_the_node_that_commits_hands_on_why_a_save_failed(root: Path, failed: int) -> None:
    saves = [persisted(PosixStorage(root), SAVE_ID, rank, 4) for rank in range(3)]
    assert [outcome_of(save, 60.0) for save in saves] == [OPEN] * 3
    leave_note(PosixStorage(root), 5, SAVE_ID, failed, "no space")
    assert outcome_of(saves[0], 60.0) == (True, "no space")
    assert [outcome_of(save, 60.0) for save in saves[1:]] == [(True, "no space")] * 2


def test_a_failure_is_found_though_the_node_that_commits_knows_nothing_of_the_save(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = persisted(PosixStorage(root), SAVE_ID, 1, 3)
    assert outcome_of(waiting, 60.0) == OPEN
    leave_note(PosixStorage(root), 5, SAVE_ID, 2, "no space")
    assert outcome_of(waiting, 60.0) == OPEN, "it has listed just now"
    monkeypatch.setattr("megatron_flashckpt.agent.commit._LIST_EVERY_S", 0.0)
    assert outcome_of(waiting, 60.0) == (True, "no space")
