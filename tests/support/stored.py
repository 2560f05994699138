"""What agents have left in a save directory: checkpoints with their verified bytes, and files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, open_checkpoint
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.end import End, kind_of
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import ReadPlan, read_plan
from megatron_flashckpt.load.chunk_reader import ChunkReader, ChunkSource, Sink, chunk_reads
from megatron_flashckpt.load.gpu_buffers import Gpu
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.store import Store
from tests.support.trainer import FakeTrainer, content, eventually

_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}


def read_all(
    source: ChunkSource,
    plan: ReadPlan,
    wanted: list[Piece],
    sink: Sink,
    threads: int,
    gpu: Gpu | None = None,
) -> int:
    """Execute `plan` without other ranks; return the bytes read."""
    with ChunkReader(source, threads, gpu) as reader:
        reader.read(chunk_reads(plan, wanted), sink)
        return reader.read_nbytes


def stored(root: Path | str, iteration: int) -> StoredCheckpoint:
    return open_checkpoint(open_store(root), iteration)


def read_rank(checkpoint: StoredCheckpoint, trainer: FakeTrainer) -> bytes:
    """Return the verified bytes of a rank in layout order."""
    plan = read_plan(trainer.pieces, checkpoint.sources(), checkpoint.place)
    tensors = [torch.empty(p.numel, dtype=_TORCH[p.dtype]) for p in trainer.pieces]
    read_all(checkpoint, plan, trainer.pieces, Targets(trainer.pieces, tensors), threads=2)
    return b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors)


def assert_intact(root: Path | str, iteration: int, trainers: list[FakeTrainer]) -> None:
    """Assert that the tracker names `iteration`, and that every rank's bytes are verified."""
    assert tracked(root) == str(iteration)
    for trainer in trainers:
        expected = content(trainer.rank, iteration, trainer.layout.nbytes)
        assert read_rank(stored(root, iteration), trainer) == expected


def names_in(root: Path | str) -> list[str]:
    """Return the names of all files or objects below `root`, those of killed writers included."""
    if isinstance(root, Path):
        # os.walk skips a directory that an agent removes meanwhile; Path.rglob raises an error.
        files = [os.path.join(at, name) for at, _, names in os.walk(root) for name in names]
        return sorted(os.path.relpath(file, root) for file in files)
    return sorted(_objects(open_store(root), ""))


def _objects(store: Store, directory: str) -> Iterator[str]:
    for entry in store.list(directory):
        name = f"{directory}/{entry.name}".lstrip("/")
        if entry.kind == "directory":
            yield from _objects(store, name)
        else:
            yield name


def tracked(root: Path | str) -> str:
    """Return what the tracker says; empty without a tracker."""
    try:
        return open_store(root).get(file_names.TRACKER).decode()
    except FileNotFoundError:
        return ""


def iterations_in(root: Path | str) -> list[int]:
    """Return the iterations that have a file."""
    iterations = {file_names.parse_iteration_dir(name.partition("/")[0]) for name in names_in(root)}
    return sorted(iteration for iteration in iterations if iteration is not None)


def files_of_ours(root: Path | str) -> list[str]:
    """Return the tracker and all files of checkpoints below `root`, but no ends of failed saves."""
    ours = [name for name in names_in(root) if not name.startswith(f"{file_names.OWN}/")]
    return [name for name in ours if not is_failed_end(root, name)]


def is_failed_end(root: Path | str, name: str) -> bool:
    """Return whether a file is the end of a failed save."""
    return name.endswith(".end") and kind_of(open_store(root).get(name)) is End.FAILED


def await_tracker(root: Path | str, iteration: int) -> None:
    """Wait until the tracker names `iteration`: a crash does not wait for the agent."""
    eventually(
        f"the commit of iteration {iteration}", lambda: tracked(root) == str(iteration), 60.0
    )
