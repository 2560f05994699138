"""Commits of growing numbers of ranks, and the time in which one rank plans its reads.

The agent's code commits the records that a job of this size would write. It lists the directory,
reads, merges and checks the records, creates the manifest, and moves the tracker. Shards are empty
files of the right size, because the commit does not open them. A waiting node asks for the end of
the save as often as its agent does while the commit lasts.
"""

from __future__ import annotations

import argparse
import builtins
import math
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.study import Result, Study, Table
from benchmarks.synthetic import LLAMA_405B, SAVE_ID, World, decoded_sources, slot_meta
from megatron_flashckpt.agent import commit_core as core
from megatron_flashckpt.agent.commit_core import CommitCore
from megatron_flashckpt.agent.proposals import look, propose_manifest
from megatron_flashckpt.agent.track import moved_tracker
from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.commit_record import CommitRecord, encode_items, encode_records
from megatron_flashckpt.file_format.end import End
from megatron_flashckpt.layout.read_plan import read_plan
from megatron_flashckpt.layout.template import PlanCache
from megatron_flashckpt.memory.slot import SlotMeta
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.store import Entry, Store

ITERATION = 1000
_DIRECTORY = file_names.iteration_dir(ITERATION)
#: Tensor and pipeline parallel sizes, which stay the same; the number of replicas grows.
TP, PP = 8, 8
#: Ranks of a node, which share a record file. 1: a record file for each rank.
_PER_NODE = (1, 8)
LOADING = World(LLAMA_405B, tp=4, pp=8, dp=64)


def write_records(root: Path, world: World, per_node: int) -> SlotMeta:
    """Write the commit records of all nodes with the agents' format; return rank 0's meta.

    Args:
        per_node: number of ranks whose records share a file.
    """
    directory = root / _DIRECTORY
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
            name = file_names.record_name(range(rank + 1 - per_node, rank + 1), SAVE_ID)
            (directory / name).write_bytes(encode_records(of_node))
            of_node.clear()
        with open(directory / record.file, "xb") as shard:
            shard.truncate(record.nbytes)
        first = first or slot_meta(
            str(root), layout, common=b"none", world_size=world.size, coordinates=coordinates
        )
    assert first is not None
    return first


class CountingStore(PosixStore):
    """A store that counts requests by kind, and bytes read: on an object store they are money."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.requests: Counter[str] = Counter()
        self.nbytes = 0

    def get(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        self.requests["get"] += 1
        data = super().get(name, offset, nbytes)
        self.nbytes += len(data)
        return data

    def put(self, name: str, data: bytes) -> None:
        self.requests["put"] += 1
        super().put(name, data)

    def create(self, name: str, data: bytes) -> None:
        self.requests["create"] += 1
        super().create(name, data)

    def stat(self, name: str) -> Entry | None:
        self.requests["stat"] += 1
        return super().stat(name)

    def list(self, directory: str, *, sizes: bool = True) -> builtins.list[Entry]:
        self.requests["list"] += 1
        return super().list(directory, sizes=sizes)

    def delete(self, names: Iterable[str]) -> None:
        names = builtins.list(names)
        self.requests["delete"] += len(names)
        super().delete(names)

    @property
    def counts(self) -> str:
        """The numbers of requests, for a table."""
        return " ".join(f"{kind} {count:,}" for kind, count in sorted(self.requests.items()))


def wait(store: Store, world_size: int, per_node: int, seconds: float) -> None:
    """Ask for the end of the committed save, as a node does that has waited for `seconds`."""
    now = 0.0
    machine = CommitCore(store.place, world_size, now, math.inf, store.pace)
    for rank in range(world_size - per_node, world_size):
        machine.note(now, core.Joined(rank, is_adopted=True))
    machine.note(now, core.Recorded(frozenset(machine.ranks)))
    while now < seconds:
        match machine.next(now, core.Trainers()):
            case core.Wait(until):
                now = until
            case core.Look():
                # As for a save that is not committed yet.
                assert look(store, ITERATION, file_names.next_attempt(SAVE_ID)) is None
                machine.note(now, core.Looked())
            case action:
                raise AssertionError(action)
    ended = look(store, ITERATION, SAVE_ID)
    assert ended is not None
    assert ended.end is End.COMMITTED


def committed(root: Path, meta: SlotMeta, per_node: int) -> tuple[float, str, str, int]:
    """Commit the records in `root`, while another node waits.

    Returns:
        The seconds from the last record to the tracker, the requests of the committing node, and
        those of the waiting node with the bytes that it has read.
    """
    store, distant = CountingStore(root), CountingStore(root)
    started = time.perf_counter()
    names = [entry.name for entry in store.list(_DIRECTORY, sizes=False)]
    propose_manifest(store, ITERATION, SAVE_ID, meta, names)
    moved_tracker(store, Save(ITERATION, SAVE_ID), None)
    seconds = time.perf_counter() - started
    wait(distant, meta.world_size, per_node, seconds)
    return seconds, store.counts, distant.counts, distant.nbytes


def read_and_plan_s(root: Path) -> tuple[float, int]:
    """Return the seconds from the manifest's file to a checked plan, and the manifest's bytes."""
    wanted = LOADING.wanted(tp=1, stage=3, dp=20)
    path = root / _DIRECTORY / file_names.end_name(SAVE_ID)
    started = time.perf_counter()
    encoded = path.read_bytes()
    read_plan(wanted, decoded_sources(encoded), "the checkpoint")
    return time.perf_counter() - started, len(encoded)


_COLUMNS = {
    "ranks": "",
    "record files": ",",
    "records, MB": ".1f",
    "commit, s": ".2f",
    "manifest, MB": ".1f",
    "read and plan, s": ".2f",
    "requests of the committing node": "",
    "requests of a waiting node": "",
    "bytes read by it": ",",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--most", type=int, default=65_536, help="largest number of ranks")


def run(options: argparse.Namespace, root: Path) -> Iterator[Result]:
    """Yield the times and the manifest's size for 64 ranks, 256 ranks, and so on."""
    rows = []
    ranks = TP * PP
    while ranks <= options.most:
        for per_node in _PER_NODE:
            rows.append(_measured(root / str(ranks), ranks, per_node))
            # The files of the largest jobs take minutes to write, so report each job at once.
            yield f"{ranks:,} ranks, {per_node} per record file: committed in {rows[-1][3]:.2f} s"
        ranks *= 4
    yield Table("commits by number of ranks, and one rank's plan of its reads", _COLUMNS, rows)


def _measured(where: Path, ranks: int, per_node: int) -> tuple[Any, ...]:
    meta = write_records(where, World(LLAMA_405B, tp=TP, pp=PP, dp=ranks // (TP * PP)), per_node)
    records = [path.stat().st_size for path in where.rglob("*.record")]
    seconds, *requests = committed(where, meta, per_node)
    planned_s, nbytes = read_and_plan_s(where)
    shutil.rmtree(where)
    row = (f"{ranks:,}", len(records), sum(records) / 1e6, seconds, nbytes / 1e6, planned_s)
    return *row, *requests


STUDY = Study("scale", "the commit, and a plan of reads, by number of ranks", add_options, run)
