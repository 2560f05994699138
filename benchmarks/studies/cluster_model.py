"""Predictions of `flashckpt plan` for a save, compared with that save on this machine.

The model gets the speeds of this machine: of a plain copy into mapped memory, and of a plain write
to reserved space, with fdatasync. Then the code of the package stages and persists one rank's state
of the same size. The package claims that the model is right within a factor of 2.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.resources import write_raw
from benchmarks.study import Result, Study, Table
from benchmarks.synthetic import slot_meta
from megatron_flashckpt.agent.proposals import create_records
from megatron_flashckpt.agent.shard_writer import slot_shard
from megatron_flashckpt.layout.piece import MASTER, Piece
from megatron_flashckpt.layout.template import PlanCache
from megatron_flashckpt.memory.runs import Copy
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotHeader, SlotState
from megatron_flashckpt.save.stager import Stager
from megatron_flashckpt.sizing.cluster_model import Cluster, PerParameter, even_sizes, plan
from megatron_flashckpt.storage.opening import open_store

FACTOR = 2.0
SAVE_ID = "000001-bad0.00001.1"


def seconds_of_copy(source: torch.Tensor, target: torch.Tensor) -> float:
    started = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - started


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512, help="state of one rank")


def run(options: argparse.Namespace, root: Path) -> Iterator[Result]:
    """Yield predicted and measured times; exit with status 1 if they differ by more than FACTOR."""
    numel = options.mib * 2**20 // 4
    state = torch.rand(numel)
    raw = memoryview(state.numpy()).cast("B")
    layout = PlanCache().layout([Piece("w", MASTER, "F32", (numel,), (0,), (numel,), 0, numel)])
    meta = slot_meta(str(root), layout)
    store, stager, slab = open_store(root), Stager(), Slab.create(2, 4096, layout.nbytes, "0")
    slab.populate()
    stager.use(slab, device=None)
    slot, target = slab.slots[0], torch.zeros(numel)
    seconds_of: dict[str, list[float]] = {
        name: [] for name in ("copy", "write", "stage", "persist")
    }
    for iteration in range(options.rounds):
        seconds_of["copy"].append(seconds_of_copy(state, target))
        started = time.perf_counter()
        stager.stage([Copy(state, slot.data_offset, early=False)], lambda *_: None)
        stager.wait()
        seconds_of["stage"].append(time.perf_counter() - started)
        slot.set_header(SlotHeader(SlotState.STAGED, iteration, SAVE_ID, 0, layout.nbytes))
        seconds_of["write"].append(write_raw(root / "raw", raw, direct=False))
        (root / "raw").unlink()
        started = time.perf_counter()
        shard = slot_shard(store, slot, slot.header, meta)
        create_records(store, [shard.record])
        seconds_of["persist"].append(time.perf_counter() - started)
    stager.close()
    slab.close()
    median = {name: statistics.median(times) for name, times in seconds_of.items()}
    speed = {name: layout.nbytes / 1e9 / seconds for name, seconds in median.items()}
    cluster = Cluster(
        gpus_per_node=1,
        pcie_gb_s=speed["copy"],
        node_storage_gb_s=speed["write"],
        storage_gb_s=speed["write"],
    )
    prediction = plan(even_sizes(numel, 1, 1, PerParameter(4, 4)), cluster)
    rows = [
        (name, predicted, median[name], median[name] / predicted)
        for name, predicted in (("stage", prediction.stage_s), ("persist", prediction.persist_s))
    ]
    yield Table(
        f"{options.mib} MiB of one rank, medians of {options.rounds}, interleaved",
        {"": "", "predicted, s": ".3f", "measured, s": ".3f", "measured / predicted": ".2f"},
        rows,
    )
    right = all(1 / FACTOR <= ratio <= FACTOR for *_, ratio in rows)
    yield f"within a factor of {FACTOR:g}: {'yes' if right else 'NO'}"
    if not right:
        raise SystemExit(1)


STUDY = Study("model", "predictions of flashckpt plan, against measured saves", add_options, run)
