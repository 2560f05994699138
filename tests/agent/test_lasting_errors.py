"""Errors that only a person can end: every node knows them, even if another node met them."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from megatron_flashckpt.agent import failed_save, persister
from megatron_flashckpt.agent.claim import RunKey
from megatron_flashckpt.agent.failed_save import lasts_elsewhere
from megatron_flashckpt.agent.fence import Fence
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.posix import PosixStorage, PosixWriter
from tests.agent.conftest import Node
from tests.agent.test_faulty_storage import agent_here
from tests.faulty_storage.preload import FaultyStorage, fail
from tests.support.persisting import persisted
from tests.support.trainer import PATIENCE_S, eventually, new_save_id


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_counts_as_lasting_on_all_nodes(
    node: Node, other_node: Node, root: Path, tmp_path: Path, full: int
) -> None:
    """The node of rank 0 learns from the note of the other node, and the other way round."""
    storage = FaultyStorage(root, tmp_path)
    with storage.under_agents():
        trainers = [node.trainer(root, 0, 2), other_node.trainer(root, 1, 2)]
    save_id = new_save_id()
    storage.rule(fail("write", errno.ENOSPC, file_names.shard_name(full, save_id)))
    for trainer in trainers:
        trainer.stage(1, save_id)
    outcomes = [trainer.outcome() for trainer in trainers]
    assert all("[Errno 28]" in (outcome.error or "") for outcome in outcomes)
    assert [outcome.lasts for outcome in outcomes] == [True, True]


class _Away(PosixStorage):
    """Storage that cannot be reached while `is_away`."""

    is_away = False
    refused: ClassVar[list[str]] = []

    def _reach(self, name: str) -> None:
        if self.is_away:
            self.refused.append(name)
            raise StorageError(errno.EHOSTDOWN, os.strerror(errno.EHOSTDOWN))

    def put(self, name: str, *args: Any, **more: Any) -> None:
        self._reach(name)
        super().put(name, *args, **more)

    def create(self, name: str, nbytes: int) -> PosixWriter:
        self._reach(name)
        return super().create(name, nbytes)


@pytest.mark.parametrize("away", [0, 1])
def test_a_node_reports_a_failure_as_soon_as_its_storage_is_back(
    node: Node, other_node: Node, root: Path, away: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node would wait for the end of its commit timeout."""
    monkeypatch.setattr(persister, "_WRITE_RETRIES_S", (0.01,))
    monkeypatch.setattr(failed_save, "_NOTE_RETRIES_S", (0.01,))
    monkeypatch.setattr(failed_save, "_TELL_AGAIN_S", 0.05)
    monkeypatch.setattr(_Away, "refused", [])
    places, save_id, storage = (node, other_node), new_save_id(), _Away(root)
    storage.is_away = True
    with contextlib.ExitStack() as agents:
        trainers = []
        for rank, place in enumerate(places):
            agent = agents.enter_context(agent_here(place, root))
            if rank == away:
                monkeypatch.setattr(agent._node, "storage_at", lambda _: storage)
            trainers.append(place.trainer(root, rank, 2))
        for trainer in trainers:
            trainer.stage(1, save_id)
        assert "Host is down" in (trainers[away].outcome().error or "")
        note = f"{file_names.iteration_dir(1)}/{file_names.failure_name(away, save_id)}"
        eventually("attempts to report the failure", lambda: _Away.refused.count(note) > 5)
        assert trainers[1 - away].client.poll(0.0).pending == 1
        storage.is_away = False
        assert "Host is down" in (trainers[1 - away].outcome().error or "")


def test_no_failure_is_reported_after_the_job_has_started_again(root: Path) -> None:
    """Nobody would remove a note in the directory of a later save of the iteration."""
    save = persisted(PosixStorage(root), "a" * 12, 0, 2)
    save.unsent_note, save.fence = (0, "Host is down"), Fence()
    save.fence.hold(RunKey(2, "bbbbbbbb"), has_rank_0=True)
    failed_save.keep_telling(save, time.monotonic() + 60.0)
    for thread in threading.enumerate():
        if thread.name == "note":
            thread.join(PATIENCE_S)
    assert not list(root.rglob("*.failed"))


@pytest.mark.parametrize(
    ("reason", "lasts"),
    [
        ("[Errno 28] /save: cannot write (No space left on device)", True),
        ("[Errno 110] /save: cannot write (Connection timed out)", False),
        ("rank 1: [Errno 28] no memory for a slab", False),
        ("gave up after 60 s", False),
        ("[Errno x] ", False),
    ],
)
def test_only_errors_of_storage_last(reason: str, lasts: bool) -> None:
    assert lasts_elsewhere(reason) is lasts
