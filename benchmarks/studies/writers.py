"""Comparison of the number of writers: one, some or all replicas write state that all hold.

A group of replicas, two on each of four nodes, saves once with each number of writers. The agents'
code writes the shards (chunks, digests, commit records) with the default numbers of threads.
Network and storage are models without a disk. A node sends at a fixed bandwidth. A storage has
servers, each with a bandwidth for all nodes together. A server may need time to create a file, or
to change from one file to another, as spinning disks do.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.study import Result, Study, Table, in_turns
from benchmarks.synthetic import slot_meta, write_shard
from megatron_flashckpt.agent.write_limits import Flow
from megatron_flashckpt.config import AgentConfig, ShareOut
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.layout.piece import (
    MASTER,
    RANK_STATE,
    Piece,
    equal_shares,
    spread_over_nodes,
)
from megatron_flashckpt.layout.template import PlanCache
from megatron_flashckpt.memory.slot import SlotMeta

NODES, REPLICAS = 4, 8
NODE_MIB_PER_S = 200
SIDE_NBYTES = 64 * 1024
SAVE_ID = "000001-3fa9.00001.1"
POLICIES: tuple[ShareOut, ...] = ("share", "first", 2, 4)


@dataclasses.dataclass(frozen=True)
class Kind:
    name: str
    servers: int = 1
    """Number of servers; a file lies on one of them."""
    mib_per_s: float | None = None
    """Bandwidth of each server for all nodes together; None: more than the nodes send."""
    create_s: float = 0.0
    """Seconds to create a file; the storage creates one file at a time."""
    turn_s: float = 0.0
    """Seconds of a server's change to another file."""


KINDS = (
    Kind("faster than all nodes"),
    Kind("1 server of 200 MiB/s", mib_per_s=200),
    Kind("1 server of 400 MiB/s, 10 ms per file", mib_per_s=400, create_s=0.01),
    Kind("1 server of 200 MiB/s, 20 ms per turn", mib_per_s=200, turn_s=0.02),
    Kind("4 servers of 100 MiB/s, 20 ms per turn", servers=4, mib_per_s=100, turn_s=0.02),
)


class Line:
    """Queue that lets one piece of work pass at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._last: object = None

    def wait(self, seconds: float, of: object = None, turn_s: float = 0.0) -> None:
        """Wait for work of `seconds`, and `turn_s` more if the last work was of another file."""
        with self._lock:
            turned, self._last = self._last is not of, of
            begin = max(time.perf_counter(), self._free_at)
            self._free_at = end = begin + seconds + turned * turn_s
        time.sleep(max(0.0, end - time.perf_counter()))


class Servers:
    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._files = Line()
        self._lock = threading.Lock()
        self._lines = [Line() for _ in range(kind.servers)]
        self._nbytes = [0] * kind.servers

    def create(self, nbytes: int) -> Line:
        """Create a file on the server with the least data; return that server's queue."""
        self._files.wait(self.kind.create_s)
        with self._lock:
            server = self._nbytes.index(min(self._nbytes))
            self._nbytes[server] += nbytes
        return self._lines[server]


class Storage:
    """Storage as one node sees it, with the methods that `durable_shard` calls."""

    place = "the model"

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.network = Line()

    def writer(self, name: str, nbytes: int) -> Writer:
        return Writer(self, self.servers.create(nbytes))

    def create(self, name: str, data: bytes) -> None:
        """Accept a commit record; their number does not depend on the writers."""


class Writer:
    """File that discards its contents."""

    def __init__(self, storage: Storage, server: Line) -> None:
        self._network, self._server = storage.network, server
        self._kind = storage.servers.kind

    def write_at(self, offset: int, chunk: memoryview) -> None:
        mib = len(chunk) / 2**20
        self._network.wait(mib / NODE_MIB_PER_S)
        if self._kind.mib_per_s is not None:
            self._server.wait(mib / self._kind.mib_per_s, self, self._kind.turn_s)

    def finish(self) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing, because there is no file to remove."""


def part_of(replica: int, numel: int, policy: ShareOut) -> tuple[int, int]:
    """Return the range of elements that a replica writes."""
    writers = list(range(REPLICAS))
    if policy == "first":
        writers = [0]
    elif policy != "share":
        nodes = [number * NODES // REPLICAS for number in range(REPLICAS)]
        writers = spread_over_nodes(nodes, policy, turn=0)
    if replica not in writers:
        return 0, 0
    return equal_shares([(numel, 4)], len(writers), writers.index(replica))[0]


def meta_of(replica: int, numel: int, policy: ShareOut) -> SlotMeta:
    start, end = part_of(replica, numel, policy)
    pieces = [Piece("side", RANK_STATE, "U8", (SIDE_NBYTES,), (0,), (SIDE_NBYTES,), 0, SIDE_NBYTES)]
    if start < end:
        pieces.insert(0, Piece("w", MASTER, "F32", (numel,), (0,), (numel,), start, end))
    layout = PlanCache().layout(pieces)
    coordinates = Coordinates(dp=replica)
    return slot_meta("", layout, rank=replica, world_size=REPLICAS, coordinates=coordinates)


def seconds_of_save(kind: Kind, state: bytearray, numel: int, policy: ShareOut) -> float:
    """Save once; return the seconds until the last shard is written."""
    usual = AgentConfig()
    servers = Servers(kind)
    storages: list[Any] = [Storage(servers) for _ in range(NODES)]
    metas = [meta_of(replica, numel, policy) for replica in range(REPLICAS)]

    def chunks(nbytes: int) -> Iterator[memoryview]:
        for start in range(0, nbytes, CHUNK_NBYTES):
            yield memoryview(state)[start : min(start + CHUNK_NBYTES, nbytes)]

    def write(replica: int) -> None:
        meta = metas[replica]
        flow = Flow(usual.write_threads)
        storage = storages[replica * NODES // REPLICAS]
        write_shard(storage, 1, SAVE_ID, meta, chunks(meta.template.nbytes), flow)

    pools = [concurrent.futures.ThreadPoolExecutor(usual.persist_threads) for _ in range(NODES)]
    started = time.perf_counter()
    writing = [pools[n * NODES // REPLICAS].submit(write, n) for n in range(REPLICAS)]
    for future in writing:
        future.result()
    seconds = time.perf_counter() - started
    for pool in pools:
        pool.shutdown()
    return seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--mib", type=int, nargs="+", default=[8, 128], help="state that all replicas hold, MiB"
    )


def run(options: argparse.Namespace, _: Path) -> Iterator[Result]:
    """Yield the seconds of a save by storage, size and policy, as medians over the rounds."""
    state = bytearray(max(options.mib) * 2**20 + SIDE_NBYTES)
    works = {
        (kind.name, mib, policy): functools.partial(
            seconds_of_save, kind, state, mib * 2**20 // 4, policy
        )
        for kind in KINDS
        for mib in options.mib
        for policy in POLICIES
    }
    seconds = in_turns(works, options.rounds)
    yield Table(
        f"{REPLICAS} replicas on {NODES} nodes of {NODE_MIB_PER_S} MiB/s; seconds until state that "
        f"all replicas hold is written, medians of {options.rounds} interleaved rounds",
        {"storage": "", "MiB": "", **{f"replicated: {policy}": ".3f" for policy in POLICIES}},
        [
            (
                kind.name,
                f"{mib}",
                *(statistics.median(seconds[kind.name, mib, policy]) for policy in POLICIES),
            )
            for kind in KINDS
            for mib in options.mib
        ],
    )


STUDY = Study("writers", "how many replicas should write, by storage", add_options, run)
