"""`Checkpointer` of a rank with tensors of its own, but no model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.config import Config
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.file_format.file_names import first_sequence, save_name
from megatron_flashckpt.layout.piece import MASTER, Piece
from megatron_flashckpt.megatron_lm import parallel, side_state
from megatron_flashckpt.megatron_lm.cutting import LocalPiece
from megatron_flashckpt.megatron_lm.enumeration import Enumeration
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.save.checkpointer import Checkpointer, SaveRequest
from megatron_flashckpt.save.save_reports import SaveReports
from megatron_flashckpt.save.session import Session, _MegatronSaves
from megatron_flashckpt.save.startup import Startup
from tests.support.stored import stored
from tests.support.trainer import eventually

#: Number of elements in one tensor.
NUMEL = 1_500_000


#: The arguments of Megatron that a save of such a job reads.
JOB = JobState(chunks=[], saves_optimizer=False, save_rng=False)


class Job:
    """A rank with four tensors and no model."""

    def __init__(self, root: Path, config: Config, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(parallel, "coordinates", Coordinates)
        patch.setattr(side_state, "rank_state", self._rank_state)
        #: State of this rank in addition to its tensors.
        self.side_state: Callable[[], dict[str, Any]] = lambda: {"seed": 1}
        self.tensors = [torch.rand(NUMEL) for _ in range(4)]
        self.checkpointer = Checkpointer(str(root), config)
        patch.setattr(self.checkpointer.model_state, "owned", self._owned)

    @property
    def values(self) -> list[torch.Tensor]:
        """The tensors, in host memory."""
        return self.tensors

    def _owned(self, *_: Any) -> Enumeration:
        owned = Enumeration()
        owned.add(
            [
                LocalPiece(
                    Piece(f"w{n}", MASTER, "F32", (NUMEL,), (0,), (NUMEL,), 0, NUMEL), tensor
                )
                for n, tensor in enumerate(self.tensors)
            ]
        )
        return owned

    def _rank_state(self, *_: Any, **__: Any) -> dict[str, Any]:
        return self.side_state()

    def save_id(self, iteration: int) -> str:
        """Return the name of this job's first save of an iteration; see `Run.new_save_id`."""
        self.checkpointer.runs.ensure()
        assert self.checkpointer.runs.run.name is not None
        return save_name(self.checkpointer.runs.run.name, first_sequence(iteration))

    def request(self, iteration: int, *, optimizer: Any = None, **more: Any) -> SaveRequest:
        return SaveRequest(iteration, dataclasses.replace(JOB, optimizer=optimizer), **more)

    def stage(self, iteration: int, **more: Any) -> None:
        """Save, and wait until the agent has the slot."""
        self.checkpointer.save(self.request(iteration, **more))
        self.checkpointer.link.stager.wait()

    def save(self, iteration: int, **more: Any) -> str | None:
        """Save and wait; return the error, or None."""
        self.stage(iteration, **more)
        (outcome,) = eventually("a result of the save", lambda: self.checkpointer.saves.poll(0.1))
        return outcome.error

    def assert_stored(self, root: Path, iteration: int) -> None:
        checkpoint = stored(root, iteration)
        assert verify(checkpoint) == []
        shard = (root / file_names.iteration_dir(iteration)).glob("*.safetensors")
        data = next(shard).read_bytes()
        for values in self.values:
            assert values.numpy().tobytes() in data


def session_of(job: Job, config: Config) -> tuple[Session, SaveReports]:
    """Return the session of a process that has this checkpointer only, and its reports."""
    session, root = Session(config), job.checkpointer.root
    reports = SaveReports(root, 0)
    startup = Startup(job.checkpointer, session.note_nodes)
    session._open[root] = _MegatronSaves(job.checkpointer, reports, startup)
    session._reports[root] = reports
    return session, reports
