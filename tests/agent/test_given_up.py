"""Saves that an agent gave up while storage hung: no checkpoint when storage responds again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_flashckpt.agent import cleanup, commit_thread
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.base import Durable
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.conftest import Node
from tests.agent.test_failures import assert_intact
from tests.agent.test_faulty_storage import agent_here
from tests.support.trainer import PATIENCE_S, eventually, new_save_id

DIRECTORY = file_names.iteration_dir(2)


class HungStorage(PosixStorage):
    """Storage that hangs for the commit thread of the agent, in the save of iteration 2."""

    back = threading.Event()
    sized = threading.Event()
    hangs_at = ""

    def _is_stuck(self, name: str, call: str) -> bool:
        return name.startswith(DIRECTORY) and self.hangs_at == call

    def put(
        self,
        name: str,
        data: bytes,
        durable: Durable = "name",
        guard: Callable[[], None] | None = None,
    ) -> None:
        super().put(name, data, durable, guard)
        if name.endswith(".commit") and self._is_stuck(name, "put"):
            self.back.wait(PATIENCE_S)

    def size(self, name: str) -> int:
        nbytes = super().size(name)
        if name.endswith(".safetensors") and name.startswith(DIRECTORY) and self.hangs_at:
            self.sized.set()
            self.back.wait(PATIENCE_S)
            eventually("another thread removes the file", lambda: self.kind(name) is None)
        return nbytes


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[HungStorage]]:
    monkeypatch.setattr("megatron_flashckpt.agent.state.open_storage", HungStorage)
    monkeypatch.setattr(commit_thread, "_HUNG_S", 0.1)
    for event in (HungStorage.back, HungStorage.sized):
        event.clear()
    yield HungStorage
    HungStorage.hangs_at = ""
    for event in (HungStorage.back, HungStorage.sized):
        event.set()


def test_a_resumed_job_may_remove_the_files_of_a_save_given_up(
    node: Node, root: Path, stuck: type[HungStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit hangs between its check of the shards and its manifest."""
    monkeypatch.setattr(cleanup, "_SETTLE_S", 0.1)
    with agent_here(node, root, commit_timeout_s=0.5):
        trainer = node.trainer(root)
        kept = new_save_id()
        trainer.stage(1, kept)
        assert trainer.outcome().error is None
        stuck.hangs_at = "size"
        trainer.stage(2, new_save_id())
        assert "gave up" in (trainer.outcome().error or "")
        assert stuck.sized.is_set()
        trainer.client.resume_from(kept, 1)
        eventually(
            "the removal of the shards", lambda: not list((root / DIRECTORY).glob("*.safetensors"))
        )
        stuck.hangs_at = ""
        stuck.back.set()
        assert trainer.save(3).error is None
        assert not (root / DIRECTORY / file_names.MANIFEST).exists()
        assert_intact(root, 3, [trainer])


def test_an_agent_removes_a_save_given_up_when_its_put_returns(
    node: Node, root: Path, stuck: type[HungStorage]
) -> None:
    """All files are there by then, but the save has failed."""
    with agent_here(node, root, commit_timeout_s=0.5):
        trainer = node.trainer(root)
        assert trainer.save(1).error is None
        stuck.hangs_at = "put"
        trainer.stage(2, new_save_id())
        assert "gave up" in (trainer.outcome().error or "")
        stuck.back.set()
        eventually(
            "the removal of the shards", lambda: not list((root / DIRECTORY).glob("*.safetensors"))
        )
        eventually(
            "the removal of the records", lambda: not list((root / DIRECTORY).glob("*.commit"))
        )
        stuck.hangs_at = ""
        assert trainer.save(3).error is None
        assert not (root / DIRECTORY / file_names.MANIFEST).exists()
        assert_intact(root, 3, [trainer])
