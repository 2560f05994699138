"""What `flashckpt plan` says of a save against that save, on this machine.

The model gets the speeds that this machine has (a plain copy into memory that is there already, a
plain write of space reserved before, with fdatasync); then one rank's state of the same size is
staged and persisted by the code that does so in training. Stated: the model is right within a
factor of 2.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.resources import write_raw
from megatron_flashckpt.agent.shard_writer import persist_slot
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.layout.piece import MASTER, Piece
from megatron_flashckpt.layout.template import PlanCache
from megatron_flashckpt.memory.runs import Copy
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotHeader, SlotMeta, SlotState
from megatron_flashckpt.save.stager import Stager
from megatron_flashckpt.sizing.cluster_model import Cluster, PerParameter, even_sizes, plan
from megatron_flashckpt.storage.opening import open_storage

FACTOR = 2.0
SAVE_ID = "0badcafe0002"


def seconds_of_copy(source: torch.Tensor, target: torch.Tensor) -> float:
    started = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - started


def bench_model(out: Console, root: Path, mib: int, rounds: int) -> None:
    """Print what was predicted and what came of it; end with status 1 beyond the stated factor."""
    numel = mib * 2**20 // 4
    state = torch.rand(numel)
    layout = PlanCache().layout([Piece("w", MASTER, "F32", (numel,), (0,), (numel,), 0, numel)])
    meta = SlotMeta(
        root=str(root),
        rank=0,
        world_size=1,
        coordinates=Coordinates(),
        template_fingerprint=layout.template_fingerprint,
        template=layout.template,
        placement=layout.placement,
        common=b"",
        description={},
    )
    storage, stager, slab = open_storage(root), Stager(), Slab.create(2, 4096, layout.nbytes, "0")
    slab.populate()
    stager.use(slab, device=None)
    slot, target = slab.slots[0], torch.zeros(numel)
    found: dict[str, list[float]] = {name: [] for name in ("copy", "write", "stage", "persist")}
    for _ in range(rounds):
        found["copy"].append(seconds_of_copy(state, target))
        started = time.perf_counter()
        stager.stage([Copy(state, slot.data_offset, early=False)], lambda *_: None)
        stager.wait()
        found["stage"].append(time.perf_counter() - started)
        slot.set_header(SlotHeader(SlotState.STAGED, 1, SAVE_ID, 0, layout.nbytes))
        found["write"].append(write_raw(root / "raw", state.view(torch.uint8), direct=False))
        (root / "raw").unlink()
        started = time.perf_counter()
        persist_slot(storage, slot, slot.header, meta)
        found["persist"].append(time.perf_counter() - started)
    stager.close()
    slab.close()
    median = {name: statistics.median(times) for name, times in found.items()}
    speed = {name: layout.nbytes / 1e9 / seconds for name, seconds in median.items()}
    cluster = Cluster(
        gpus_per_node=1,
        pcie_gb_s=speed["copy"],
        node_storage_gb_s=speed["write"],
        storage_gb_s=speed["write"],
    )
    said = plan(even_sizes(numel, 1, 1, PerParameter(4, 4)), cluster)
    table = Table("", "predicted", "measured", "measured / predicted")
    right = True
    for name, predicted in (("stage", said.stage_s), ("persist", said.persist_s)):
        ratio = median[name] / predicted
        right = right and 1 / FACTOR <= ratio <= FACTOR
        table.add_row(name, f"{predicted:.3f} s", f"{median[name]:.3f} s", f"{ratio:.2f}")
    out.print(f"{mib} MiB of one rank, medians of {rounds}, interleaved")
    out.print(table)
    out.print(f"within a factor of {FACTOR:g}: {'yes' if right else 'NO'}")
    if not right:
        raise SystemExit(1)
