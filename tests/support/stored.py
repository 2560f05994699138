"""What agents have left in a save directory: checkpoints with their verified bytes, and files."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, open_checkpoint
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.end import End, kind_of
from megatron_flashckpt.layout.read_plan import read_plan
from megatron_flashckpt.load.chunk_reader import read_all
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.trainer import FakeTrainer, content

_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}


def stored(root: Path, iteration: int) -> StoredCheckpoint:
    return open_checkpoint(PosixStore(root), iteration)


def read_rank(checkpoint: StoredCheckpoint, trainer: FakeTrainer) -> bytes:
    """Return the verified bytes of a rank in layout order."""
    plan = read_plan(trainer.pieces, checkpoint.sources(), checkpoint.place)
    tensors = [torch.empty(p.numel, dtype=_TORCH[p.dtype]) for p in trainer.pieces]
    read_all(checkpoint, plan, trainer.pieces, Targets(trainer.pieces, tensors), threads=2)
    return b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors)


def assert_intact(root: Path, iteration: int, trainers: list[FakeTrainer]) -> None:
    """Assert that the tracker names `iteration`, and that every rank's bytes are verified."""
    assert (root / file_names.TRACKER).read_text() == str(iteration)
    for trainer in trainers:
        expected = content(trainer.rank, iteration, trainer.layout.nbytes)
        assert read_rank(stored(root, iteration), trainer) == expected


def iterations_in(root: Path) -> list[int]:
    """Return the iterations that have a directory."""
    iterations = [file_names.parse_iteration_dir(path.name) for path in root.iterdir()]
    return sorted(iteration for iteration in iterations if iteration is not None)


def files_of_ours(root: Path) -> list[str]:
    """Return the tracker and all files of checkpoints below `root`, but no ends of failed saves."""
    # os.walk skips a directory that an agent removes meanwhile; Path.rglob raises an error.
    files = [
        os.path.join(directory, name)
        for directory, _, names in os.walk(root)
        for name in names
        if Path(directory, name).relative_to(root).parts[0] != file_names.OWN
    ]
    return sorted(os.path.relpath(file, root) for file in files if not _is_failed_end(Path(file)))


def _is_failed_end(file: Path) -> bool:
    return file.suffix == ".end" and kind_of(file.read_bytes()) is End.FAILED
