"""Two ways to load, compared: all replicas read everything, or one replica reads and sends a chunk.

All replicas load the same whole checkpoint, as data-parallel replicas load weights, over gloo on
one machine. The "shared" stores simulate a file system whose bandwidth is shared: a lock is held
for the time that the bytes would take at the given bandwidth.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.resources import drop_from_cache
from benchmarks.studies.resharding_load import ITERATION, write_checkpoint
from benchmarks.study import Result, Study, Table
from benchmarks.synthetic import Model, World
from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.config import Config
from megatron_flashckpt.layout.read_plan import read_plan
from megatron_flashckpt.load.chunk_reader import ChunkReader, chunk_reads
from megatron_flashckpt.load.replica_sharing import ReplicaGroup, read_with_replicas
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.megatron_lm.torch_dtypes import torch_dtype
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.posix_store import PosixStore

MODEL = Model(layers=1, hidden=1024, ffn=2816, qkv=1536, vocab=4096)
MODES = ("never", "always", "auto")


@dataclasses.dataclass(frozen=True)
class Speed:
    name: str
    cold: bool = False
    mib_per_s: float | None = None
    """Bandwidth for all replicas together; None: that of this machine."""


SPEEDS = (
    Speed("local, page cache"),
    Speed("local disk, cold", cold=True),
    Speed("shared, 1000 MiB/s", mib_per_s=1000),
    Speed("shared, 200 MiB/s", mib_per_s=200),
)


class SharedStore(PosixStore):
    """Files behind one lock, which a read holds for the time that its bytes would take."""

    def __init__(self, root: Path, lock: Any, mib_per_s: float | None) -> None:
        super().__init__(root)
        self._held = lock
        self._mib_per_s = mib_per_s

    def get_into(self, *args: Any) -> int:
        if self._mib_per_s is None:
            return super().get_into(*args)
        with self._held:
            started = time.perf_counter()
            filled = super().get_into(*args)
            took = time.perf_counter() - started
            time.sleep(max(0.0, filled / 2**20 / self._mib_per_s - took))
            return filled


def replica(rank: int, size: int, root: Path, lock: Any, rounds: int, results: Any) -> None:
    """Load in every mode from every storage, as one replica, together with the others."""
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=size)
    torch.set_num_threads(1)
    config = Config()
    wanted = World(MODEL, 1, 1, 1).wanted(0, 0, 0)
    tensors = [torch.zeros(piece.numel, dtype=torch_dtype(piece.dtype)) for piece in wanted]
    for round_number in range(rounds + 1):  # the first round is a warm-up
        for speed in SPEEDS:
            stored = open_checkpoint(SharedStore(root, lock, speed.mib_per_s), ITERATION)
            for mode in MODES:
                if speed.cold and rank == 0:
                    drop_from_cache(sorted((root / stored.directory).glob("*.safetensors")))
                chunks = chunk_reads(read_plan(wanted, stored.sources(), stored.place), wanted)
                with ChunkReader(stored, 1) as reader:
                    sharing = ReplicaGroup(
                        None, mode, config.read_memory_mib * 2**20 - reader.nbytes
                    )
                    dist.barrier()
                    report = read_with_replicas(reader, chunks, Targets(wanted, tensors), sharing)
                    dist.barrier()
                if rank == 0 and round_number:
                    results.put((speed.name, mode, report.seconds))
    dist.destroy_process_group()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=4)


def run(options: argparse.Namespace, root: Path) -> Iterator[Result]:
    """Yield the seconds of a load by storage and mode, as medians over the rounds."""
    replicas, rounds = options.replicas, options.rounds
    write_checkpoint(open_store(root), World(MODEL, tp=2, pp=1, dp=2))
    nbytes = sum(path.stat().st_size for path in root.glob("*/*.safetensors"))
    context = mp.get_context("spawn")
    results, lock = context.SimpleQueue(), context.Lock()
    mp.spawn(replica, (replicas, root, lock, rounds, results), nprocs=replicas)
    seconds: dict[tuple[str, str], list[float]] = {}
    while not results.empty():
        name, mode, taken = results.get()
        seconds.setdefault((name, mode), []).append(taken)
    yield Table(
        f"{replicas} replicas on one machine each load the same {nbytes / 2**20:.0f} MiB; seconds, "
        f"medians of {rounds}",
        {"storage": "", **{f"share_reads: {mode}": ".2f" for mode in MODES}},
        [
            (speed.name, *(statistics.median(seconds[speed.name, mode]) for mode in MODES))
            for speed in SPEEDS
        ],
    )


STUDY = Study("share", "replicas that read each chunk once, or all chunks", add_options, run)
