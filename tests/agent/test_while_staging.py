"""When `Checkpointer` lets the agent write before all is copied, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flashckpt import run_id
from megatron_flashckpt.agent.client import AgentClient
from megatron_flashckpt.checkpointer import Checkpointer, SaveRequest
from megatron_flashckpt.config import Config
from megatron_flashckpt.layout import names
from megatron_flashckpt.layout.piece import MASTER, Piece
from megatron_flashckpt.layout.records import Coordinates
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.model_state import LocalPiece
from megatron_flashckpt.verification import verify
from tests.agent.conftest import Node
from tests.agent.test_persist import stored
from tests.agent.trainer import eventually

RUN = "0123abcd"
#: Of each tensor; copies are reported every 4 MiB.
NUMEL = 1_500_000


class Job:
    """One rank, with four tensors and no model."""

    def __init__(self, root: Path, config: Config, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(parallel, "coordinates", Coordinates)
        patch.setattr(run_id, "from_store", lambda root: RUN)
        self.tensors = [torch.rand(NUMEL) for _ in range(4)]
        self.checkpointer = Checkpointer(str(root), config)
        patch.setattr(self.checkpointer.model_state, "owned", self._owned)
        self.told: list[int] = []
        tell = AgentClient.copied

        def copied(client: AgentClient, slot: int, nbytes: int) -> None:
            self.told.append(nbytes)
            tell(client, slot, nbytes)

        patch.setattr(AgentClient, "copied", copied)

    def _owned(self, *_: Any) -> list[LocalPiece]:
        return [
            LocalPiece(
                Piece(f"w{n}", MASTER, "F32", (NUMEL,), (0,), (NUMEL,), 0, NUMEL), self.tensors[n]
            )
            for n in range(len(self.tensors))
        ]

    def save(self, iteration: int, **more: Any) -> str | None:
        """Save, wait, and return the error if there was one."""
        self.checkpointer.save(
            SaveRequest(
                iteration=iteration,
                chunks=[],
                optimizer=None,
                rank_state=lambda geometry: {"seed": 1},
                common_state=lambda: {"iteration": iteration},
                description={},
                **more,
            )
        )
        self.checkpointer.link.stager.wait()
        (outcome,) = eventually("its outcome", lambda: self.checkpointer.poll(0.1))
        return outcome.error

    def assert_stored(self, root: Path, iteration: int) -> None:
        checkpoint = stored(root, iteration)
        assert verify(checkpoint) == []
        shard = (root / names.iteration_dir(iteration)).glob("rank_*")
        data = next(shard).read_bytes()
        for tensor in self.tensors:
            assert tensor.numpy().tobytes() in data


@pytest.fixture
def config(node: Node) -> Config:
    return node.config()


@pytest.fixture
def make(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Job] = []

    def job(config: Config) -> Job:
        made.append(Job(root, config, monkeypatch))
        return made[-1]

    yield job
    for each in made:
        each.checkpointer.close(leave=False)


def with_(config: Config, **more: str) -> Config:
    return Config(runtime_dir=config.runtime_dir, agent=config.agent, **more)  # type: ignore[arg-type]


def test_a_deferred_save_says_how_far_it_is_and_is_stored_bit_for_bit(
    make: Any, config: Config, root: Path
) -> None:
    job = make(config)
    for iteration in (1, 2, 3):
        job.told.clear()
        assert job.save(iteration) is None
        job.assert_stored(root, iteration)
        assert len(job.told) >= 3
        assert job.told[0] > 0, "no word while the save itself goes on"
        assert job.told == sorted(job.told)
        assert job.told[-1] < 4 * job.tensors[0].nbytes, "the end is told by the doorbell"
        for tensor in job.tensors:
            tensor.add_(1)


@pytest.mark.parametrize(
    "settings", [{"staging": "blocking"}, {"persist": "when_staged"}], ids=lambda it: next(iter(it))
)
def test_nothing_is_said_where_training_waits_or_nobody_asks_for_it(
    make: Any, config: Config, root: Path, settings: dict[str, str]
) -> None:
    job = make(with_(config, **settings))
    assert job.save(1) is None
    job.assert_stored(root, 1)
    assert job.told == []


def test_nothing_of_a_save_for_memory_only_is_written(
    make: Any, config: Config, root: Path
) -> None:
    job = make(config)
    assert job.save(1, memory_only=True) is None
    assert job.told == []
    assert not (root / names.iteration_dir(1)).exists()


def test_a_copy_that_fails_in_the_middle_leaves_no_shard_and_the_next_save_works(
    make: Any, config: Config, root: Path
) -> None:
    job = make(config)
    whole = job.tensors
    assert job.save(1) is None
    job.told.clear()
    job.tensors = [*whole[:3], torch.empty(NUMEL, device="meta")]  # which has no bytes to copy
    error = job.save(2)
    assert error is not None
    assert "copying to host memory failed" in error
    assert len(job.told) >= 2
    job.tensors = whole
    assert job.save(3) is None
    job.assert_stored(root, 3)
    directory = root / names.iteration_dir(2)
    assert not list(directory.glob("rank_*.safetensors"))
    job.assert_stored(root, 1)
