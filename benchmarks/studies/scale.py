"""Commits of growing numbers of ranks, and the time in which one rank plans its reads.

The agent's code commits the records that a job of this size would write. It lists the directory,
reads, merges and checks the records, puts the manifest and its marker, and moves the tracker. Then
it reports the outcome and deletes the records. Shards are empty files of the right size, because
the commit does not open them. A waiting node asks for the marker, as its agent does.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peak_memory import with_peak_mb
from benchmarks.study import Result, Study, Table
from benchmarks.synthetic import LLAMA_405B, SAVE_ID, World
from megatron_flashckpt.agent.commit import outcome_of
from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.agent.tidying import CommittedSave, tidy
from megatron_flashckpt.file_format import file_names, manifest
from megatron_flashckpt.file_format.commit_record import CommitRecord, encode_items, encode_records
from megatron_flashckpt.layout.read_plan import read_plan
from megatron_flashckpt.layout.template import PlanCache, Source
from megatron_flashckpt.memory.slot import SlotMeta
from megatron_flashckpt.storage.opening import open_storage
from megatron_flashckpt.storage.posix import PosixStorage

ITERATION = 1000
#: Tensor and pipeline parallel sizes, which stay the same; the number of replicas grows.
TP, PP = 8, 8
#: Polls of a waiting node before the commit, as in its first second.
_LOOKS = 5
#: Ranks of a node, which share a record file. 1: a record file for each rank.
_PER_NODE = (1, 8)
LOADING = World(LLAMA_405B, tp=4, pp=8, dp=64)


def write_records(root: Path, world: World, per_node: int) -> SlotMeta:
    """Write the commit records of all nodes with the agents' format; return rank 0's meta.

    Args:
        per_node: number of ranks whose records share a file.
    """
    directory = root / file_names.iteration_dir(ITERATION)
    directory.mkdir(parents=True)
    first: SlotMeta | None = None
    cache = PlanCache()
    of_node: list[CommitRecord] = []
    for rank, (coordinates, pieces) in enumerate(world.ranks()):
        layout = cache.layout(pieces)
        encoded = encode_items(layout.template.items)
        record = CommitRecord(
            iteration=ITERATION,
            save_id=SAVE_ID,
            rank=rank,
            coordinates=coordinates,
            file=file_names.shard_name(rank, SAVE_ID),
            nbytes=4096 + layout.nbytes,
            header_digest="0" * 16,
            template_fingerprint=layout.template_fingerprint,
            template=encoded,
            template_nbytes=layout.nbytes,
            placement=layout.placement,
        )
        of_node.append(record)
        if len(of_node) == per_node:
            name = file_names.record_name(of_node[0].rank, SAVE_ID, per_node)
            (directory / name).write_bytes(encode_records(of_node))
            of_node.clear()
        with open(directory / record.file, "xb") as shard:
            shard.truncate(record.nbytes)
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


class _CountingStorage(PosixStorage):
    """Storage that counts listings and bytes read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.listed = self.nbytes = 0

    def list(self, directory: str) -> list[str]:
        self.listed += 1
        return super().list(directory)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        data = super().read(name, offset, nbytes)
        self.nbytes += len(data)
        return data


class Commit(NamedTuple):
    """Duration of a commit, and its requests to storage."""

    seconds: float
    """Seconds from the last record to the committed checkpoint."""
    peak_mb: float
    """Peak growth of the committing agent's memory."""
    tidy_s: float
    """Seconds for the removals after the commit."""
    waiting_listed: int
    """Listings by a waiting node, in `_LOOKS` polls before the commit and one after it."""
    waiting_nbytes: int
    """Bytes read by that node."""


def committed(root: Path, meta: SlotMeta) -> Commit:
    """Commit the records in `root`, while another node waits."""
    began = time.monotonic()
    save = PendingSave(open_storage(root), ITERATION, SAVE_ID, began, {0: meta}, {0})
    distant = _CountingStorage(root)
    waiting = PendingSave(distant, ITERATION, SAVE_ID, began, {1: meta}, {1})
    for _ in range(_LOOKS):
        assert outcome_of(waiting, 600.0) == (False, None)

    def commit() -> float:
        started = time.perf_counter()
        assert outcome_of(save, 600.0) == (True, None)
        return time.perf_counter() - started

    seconds, peak_mb = with_peak_mb(commit)
    assert outcome_of(waiting, 600.0) == (True, None)
    started = time.perf_counter()
    tidy(CommittedSave.of(save))
    tidy_s = time.perf_counter() - started
    return Commit(seconds, peak_mb, tidy_s, distant.listed, distant.nbytes)


def read_and_plan_s(root: Path) -> tuple[float, int]:
    """Return the seconds from the manifest's file to a checked plan, and the manifest's bytes."""
    wanted = LOADING.wanted(tp=1, stage=3, dp=20)
    path = root / file_names.iteration_dir(ITERATION) / file_names.MANIFEST
    started = time.perf_counter()
    encoded = path.read_bytes()
    decoded = manifest.decode_manifest(encoded, str(path))
    templates = {name: decoded.template(name) for name in decoded.templates}
    sources = [
        Source(shard.rank, templates[shard.template], shard.placement) for shard in decoded.shards
    ]
    read_plan(wanted, sources, "the checkpoint")
    return time.perf_counter() - started, len(encoded)


_COLUMNS = {
    "ranks": "",
    "record files": ",",
    "records, MB": ".1f",
    "commit, s": ".2f",
    "peak memory of the commit, MB": ".0f",
    "manifest, MB": ".1f",
    "read and plan, s": ".2f",
    "peak memory of a rank, MB": ".0f",
    "tidy up, s": ".2f",
    "bytes read by a waiting node": ",",
    "listings by it": "",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--most", type=int, default=65_536, help="largest number of ranks")


def run(options: argparse.Namespace, root: Path) -> Iterator[Result]:
    """Yield the times and the manifest's size for 64 ranks, 256 ranks, and so on."""
    rows: list[tuple[Any, ...]] = []
    ranks = TP * PP
    while ranks <= options.most:
        for per_node in _PER_NODE:
            row, seconds = _measured(root / str(ranks), ranks, per_node)
            rows.append(row)
            # The files of the largest jobs take minutes to write, so report each job at once.
            yield f"{ranks:,} ranks, {per_node} per record file: committed in {seconds:.2f} s"
        ranks *= 4
    yield Table("commits by number of ranks, and one rank's plan of its reads", _COLUMNS, rows)


def _measured(where: Path, ranks: int, per_node: int) -> tuple[tuple[Any, ...], float]:
    """Return the row of a job of `ranks` ranks, and the seconds of its commit."""
    meta = write_records(where, World(LLAMA_405B, tp=TP, pp=PP, dp=ranks // (TP * PP)), per_node)
    records = [path.stat().st_size for path in where.rglob("*.commit")]
    commit = committed(where, meta)
    (planned_s, nbytes), planning_mb = with_peak_mb(lambda: read_and_plan_s(where))
    shutil.rmtree(where)
    row = (
        *(f"{ranks:,}", len(records), sum(records) / 1e6, commit.seconds, commit.peak_mb),
        *(nbytes / 1e6, planned_s, planning_mb),
        *(commit.tidy_s, commit.waiting_nbytes, commit.waiting_listed),
    )
    return row, commit.seconds


STUDY = Study("scale", "the commit, and a plan of reads, by number of ranks", add_options, run)
