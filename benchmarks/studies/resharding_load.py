"""Resharding load, compared with raw reads of the same files, in turn.

Four ranks (TP2 x DP2) "saved" a Llama-like model. One process loads the whole model, as under TP1 x
DP1: it reads and verifies every byte once, and copies the parts of both tensor ranks to their
places. Raw reads read the same files with the same number of threads into memory of the same size.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.resources import drop_from_cache
from benchmarks.study import Result, Study, Table, in_turns
from benchmarks.synthetic import SAVE_ID, Model, World, slot_meta, write_shard
from megatron_flashckpt.agent.proposals import propose_manifest
from megatron_flashckpt.agent.write_limits import Flow
from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.file_format.file_names import iteration_dir
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.layout.read_plan import read_plan
from megatron_flashckpt.layout.template import PlanCache
from megatron_flashckpt.load.chunk_reader import ChunkReader, chunk_reads
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.megatron_lm.torch_dtypes import torch_dtype
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.store import Store

ITERATION = 1000


def write_checkpoint(store: Store, world: World) -> None:
    """Write a committed checkpoint of random bytes with the agents' code."""
    noise = memoryview(random.Random(0).randbytes(CHUNK_NBYTES))

    def data_section(nbytes: int) -> Iterator[memoryview]:
        for start in range(0, nbytes, CHUNK_NBYTES):
            yield noise[: min(CHUNK_NBYTES, nbytes - start)]

    metas = []
    for rank, (coordinates, pieces) in enumerate(world.ranks()):
        layout = PlanCache().layout(pieces)
        common = b"" if rank else b"none"
        of_rank = {"rank": rank, "world_size": world.size, "coordinates": coordinates}
        meta = slot_meta(store.place, layout, common=common, **of_rank)
        write_shard(store, ITERATION, SAVE_ID, meta, data_section(layout.nbytes), Flow())
        metas.append(meta)
    names = [entry.name for entry in store.list(iteration_dir(ITERATION))]
    propose_manifest(store, ITERATION, SAVE_ID, metas[0], names)


def read_raw(paths: list[Path], into: memoryview, threads: int) -> int:
    """Read all files in `paths` into `into`, one behind the other; return the number of bytes."""
    jobs = []
    position = 0
    for path in paths:
        for offset in range(0, path.stat().st_size, CHUNK_NBYTES):
            nbytes = min(CHUNK_NBYTES, path.stat().st_size - offset)
            jobs.append((path, offset, into[position : position + nbytes]))
            position += nbytes

    def read(path: Path, offset: int, part: memoryview) -> int:
        with open(path, "rb", 0) as file:
            return os.preadv(file.fileno(), [part], offset)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(read, *zip(*jobs, strict=True)))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=2048, help="approximate checkpoint, MiB")
    parser.add_argument("--threads", type=int, default=2)


def run(options: argparse.Namespace, root: Path) -> Iterator[Result]:
    """Yield the bandwidths of raw reads and loads, page cache warm and cold, and their ratio."""
    threads = options.threads
    layers = max(1, round(options.mib / 600))  # 45 million parameters, 14 bytes each
    model = Model(layers, hidden=2048, ffn=5632, qkv=3072, vocab=8192)
    store = open_store(root)
    write_checkpoint(store, World(model, tp=2, pp=1, dp=2))
    stored = open_checkpoint(store, ITERATION)
    paths = sorted((root / stored.directory).glob("*.safetensors"))
    wanted = World(model, 1, 1, 1).wanted(0, 0, 0)
    tensors = [torch.zeros(piece.numel, dtype=torch_dtype(piece.dtype)) for piece in wanted]

    nbytes = sum(path.stat().st_size for path in paths)
    raw_memory = memoryview(bytearray(nbytes))

    def read_all_raw() -> int:
        return read_raw(paths, raw_memory, threads)

    def load() -> int:
        plan = read_plan(wanted, stored.sources(), stored.place)
        with ChunkReader(stored, threads) as reader:
            reader.read(chunk_reads(plan, wanted), Targets(wanted, tensors))
            return reader.read_nbytes

    def timed(work: Callable[[], int], *, cold: bool) -> float:
        if cold:
            drop_from_cache(paths)
        started = time.perf_counter()
        nbytes = work()
        return nbytes / (time.perf_counter() - started) / 2**20

    rows = []
    for cold in (False, True):
        works = {
            "raw": lambda cold=cold: timed(read_all_raw, cold=cold),
            "ours": lambda cold=cold: timed(load, cold=cold),
        }
        speeds = in_turns(works, options.rounds, warm_up=1)
        raw, ours = speeds["raw"], speeds["ours"]
        ratio = statistics.median(b / a for a, b in zip(raw, ours, strict=True))
        state = "cold" if cold else "warm"
        rows.append((state, statistics.median(raw), statistics.median(ours), ratio))
    yield Table(
        f"TP2 x DP2 -> TP1 x DP1, {nbytes / 2**20:.0f} MiB in {len(paths)} files, "
        f"{threads} threads",
        {"page cache": "", "raw read, MiB/s": ".0f", "load, MiB/s": ".0f", "load / raw": ".2f"},
        rows,
    )


STUDY = Study("load", "a load under another layout, against raw reads", add_options, run)
