"""How the commit grows with the number of ranks, and what one rank then needs to plan its reads.

The agent's own commit, on the records that a job of so many ranks would leave: it lists the
directory, reads the records, merges and checks them, puts the manifest, moves the tracker, and
deletes the records. Shards are not written: the commit never opens them.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from rich.console import Console
from synthetic import LLAMA_405B, SAVE_ID, World

from megatron_flashckpt.agent.commit import outcome_of
from megatron_flashckpt.agent.pending import PendingSave
from megatron_flashckpt.layout import manifest, names
from megatron_flashckpt.layout.coverage import read_plan
from megatron_flashckpt.layout.plan import PlanCache, Source
from megatron_flashckpt.layout.records import CommitRecord, encode_items, encode_record
from megatron_flashckpt.memory.slot import SlotMeta
from megatron_flashckpt.storage.posix import PosixStorage

ITERATION = 1000
#: Tensor and pipeline parallel sizes stay; there are ever more replicas, as in practice.
TP, PP = 8, 8
LOADING = World(LLAMA_405B, tp=4, pp=8, dp=64)


def write_records(root: Path, world: World) -> SlotMeta:
    """Write every rank's commit record, as agents do but for the fsync; return rank 0's meta."""
    directory = root / names.iteration_dir(ITERATION)
    directory.mkdir(parents=True)
    first: SlotMeta | None = None
    cache = PlanCache()
    for rank, (coordinates, pieces) in enumerate(world.ranks()):
        layout = cache.layout(pieces)
        encoded = encode_items(layout.template.items)
        record = CommitRecord(
            iteration=ITERATION,
            save_id=SAVE_ID,
            rank=rank,
            coordinates=coordinates,
            file=names.shard_name(rank, SAVE_ID),
            nbytes=4096 + layout.nbytes,
            header_digest="0" * 16,
            template_fingerprint=layout.template_fingerprint,
            template=encoded,
            template_nbytes=layout.nbytes,
            placement=layout.placement,
        )
        (directory / names.record_name(rank, SAVE_ID)).write_bytes(encode_record(record))
        first = first or SlotMeta(
            root=str(root),
            rank=0,
            world_size=world.size,
            coordinates=coordinates,
            template_fingerprint=layout.template_fingerprint,
            template=layout.template,
            placement=layout.placement,
            common=b"none",
            description={},
        )
    assert first is not None
    return first


def commit_s(root: Path, meta: SlotMeta) -> float:
    """Return the seconds from the moment when all records are there to a committed checkpoint."""
    save = PendingSave(PosixStorage(root), ITERATION, SAVE_ID, time.monotonic(), metas={0: meta})
    save.persisted.add(0)
    started = time.perf_counter()
    finished, error = outcome_of(save, 600.0)
    took = time.perf_counter() - started
    assert finished, error
    assert error is None, error
    return took


def read_and_plan_s(root: Path) -> tuple[float, int]:
    """Return the seconds from the manifest's file to a checked plan, and the manifest's bytes."""
    wanted = LOADING.wanted(tp=1, stage=3, dp=20)
    path = root / names.iteration_dir(ITERATION) / names.MANIFEST
    started = time.perf_counter()
    encoded = path.read_bytes()
    decoded = manifest.decode_manifest(encoded, str(path))
    templates = {name: decoded.template(name) for name in decoded.templates}
    sources = [Source(it.rank, templates[it.template], it.placement) for it in decoded.shards]
    read_plan(wanted, sources, "the checkpoint")
    return time.perf_counter() - started, len(encoded)


def bench_scale(out: Console, root: Path, most: int) -> None:
    """Print the times and the manifest's size for 64 ranks and ever four times as many."""
    # Line by line: the largest take minutes to make.
    out.print("  ranks    records  commit   manifest  read and plan")
    ranks = TP * PP
    while ranks <= most:
        where = root / str(ranks)
        meta = write_records(where, World(LLAMA_405B, tp=TP, pp=PP, dp=ranks // (TP * PP)))
        records = sum(it.stat().st_size for it in where.rglob("*.commit"))
        committed = commit_s(where, meta)
        planned, nbytes = read_and_plan_s(where)
        out.print(
            f"{ranks:7,} {records / 1e6:7.1f} MB {committed:5.2f} s {nbytes / 1e6:7.1f} MB "
            f"{planned:8.2f} s"
        )
        shutil.rmtree(where)
        ranks *= 4
