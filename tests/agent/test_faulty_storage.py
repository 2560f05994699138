"""Storage that is slow or does not answer.

The agent runs in a thread of the test, and the system calls below it are replaced. All layers above
the system calls are real.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.errors import SaveFailedError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.memory.slot import Slot
from tests.agent.conftest import Node
from tests.support.agents import agent_here
from tests.support.stored import assert_intact
from tests.support.trainer import PATIENCE_S, eventually, new_save_id

#: System calls of a save, by their names in Python.
CALLS = ["pwrite", "fdatasync", "scandir"]


class Faults:
    """Lets system calls on files below `root` wait until `heal`."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root, self._hanging, self._healed = str(root), "", threading.Event()
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(target: Any, *args: Any, **kwargs: Any) -> Any:
            if name == self._hanging:
                path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target
                if os.fspath(path).startswith(self._root):
                    self._healed.wait(PATIENCE_S)
            return call(target, *args, **kwargs)

        return wrapper

    def hang(self, call: str) -> None:
        self._hanging = call

    def heal(self) -> None:
        self._hanging = ""
        self._healed.set()


@pytest.fixture
def faults(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    made = Faults(root, monkeypatch)
    yield made
    made.heal()


@pytest.mark.parametrize("call", CALLS)
def test_a_save_on_hanging_storage_is_reported_slow_then_failed(
    node: Node, root: Path, faults: Faults, call: str
) -> None:
    with agent_here(node, root, slow_save_s=0.2, commit_timeout_s=0.6):
        trainer = node.trainer(root)
        assert trainer.save(1).error is None
        faults.hang(call)
        trainer.stage(2, new_save_id())
        (notice,) = eventually("a notice", lambda: trainer.client.poll(0.5).notices)
        assert notice.iteration == 2
        assert "not durable" in notice.text
        error = trainer.outcome().error
        assert error is not None
        assert f"{root}/{file_names.iteration_dir(2)}: gave up after 1 s" in error
        assert "agent.commit_timeout_s" in error
        # The first slot is still being read; the other one is free, and holds the older checkpoint.
        assert [offer.iteration for offer in trainer.take()] == [2, 1]
        faults.heal()
        assert trainer.save(3).error is None
        assert_intact(root, 3, [trainer])
        # The files of the save are removed, unless the hung call was part of the commit.
        directory = root / file_names.iteration_dir(2)
        if call != "scandir":
            shards = directory.glob
            eventually("the removal of the save", lambda: not any(shards("*.safetensors")))


def test_a_save_without_a_slot_fails_once_the_saves_in_all_slots_failed(
    node: Node, root: Path, faults: Faults
) -> None:
    """Before that, the setting 'busy' decides whether the save waits."""
    with agent_here(node, root, commit_timeout_s=0.6):
        trainer = node.trainer(root)
        faults.hang("pwrite")
        for iteration in (1, 2):
            trainer.stage(iteration, new_save_id())
        assert trainer.begin(3, new_save_id()) is None
        assert [trainer.outcome().iteration for _ in range(2)] == [1, 2]
        with pytest.raises(SaveFailedError, match="the storage hangs; look at it"):
            trainer.begin(3, new_save_id(), wait_s=PATIENCE_S)
        faults.heal()

        def free_slot() -> Slot | None:
            with contextlib.suppress(SaveFailedError):
                return trainer.begin(4, new_save_id())

        eventually("a free slot", free_slot)
