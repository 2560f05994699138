"""Saves to an S3 server on this machine and loads from it: processor time, memory and speed.

Every measurement is a process of its own; ways take turns. The server (SeaweedFS) shares processors
and disk, so seconds say little: what counts is processor time of the client, which the server's is
not part of, and the speed relative to obstore alone in the same round. Each way to save and load
has a state of `nbytes` in two halves. `writer` returns the id of the process that uploads; `save`
returns when the objects are complete; `load` fills tensors that were made before.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import importlib.util
import itertools
import json
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.resources import Peak, cpu_s, own_mib
from benchmarks.studies.persist import RANKS, Rank, save
from benchmarks.study import Result, Study, Table, in_turns
from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.config import Config
from megatron_flashckpt.layout.read_plan import read_plan
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.storage.object_store import part_nbytes
from megatron_flashckpt.storage.opening import open_store
from tests.support.object_server import BUCKET, reachable_s3_server
from tests.support.stored import read_all

_ALONE = "obstore alone"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
#: Bytes of one request of a load, as in `storage.object_store`.
_BLOCK_NBYTES = 16 * 2**20


class Ours:
    """Two ranks hand their slots to a real agent; a load verifies every digest."""

    def __init__(self, url: str, mib: int, where: Path) -> None:
        self._url = url
        config = Config(runtime_dir=str(where / "run"))
        self._ranks = [Rank(url, config, rank, mib // RANKS) for rank in range(RANKS)]
        self.nbytes = sum(rank.nbytes for rank in self._ranks)
        self._tensors = [
            [torch.zeros(piece.numel, dtype=_DTYPES[piece.dtype]) for piece in rank.pieces]
            for rank in self._ranks
        ]

    def writer(self) -> int:
        return self._ranks[0].client.agent_pid

    def save(self, number: int) -> None:
        save(self._ranks, number)

    def load(self, number: int) -> None:
        checkpoint = open_checkpoint(open_store(self._url), number)
        for rank, tensors in zip(self._ranks, self._tensors, strict=True):
            plan = read_plan(rank.pieces, checkpoint.sources(), checkpoint.place)
            read_all(checkpoint, plan, rank.pieces, Targets(rank.pieces, tensors), threads=4)

    def close(self) -> None:
        for rank in self._ranks:
            rank.hang_up(leave=True)


class _InThisProcess:
    def __init__(self, url: str, mib: int, where: Path) -> None:
        self._url = url
        self._halves = [
            {f"{half}.{n}": torch.rand(2**22) for n in range(mib // 16 // RANKS)}
            for half in range(RANKS)
        ]
        self.nbytes = sum(t.nbytes for half in self._halves for t in half.values())

    def writer(self) -> int:
        return os.getpid()

    def close(self) -> None:
        pass


class Obstore(_InThisProcess):
    """The library alone: two uploads at a time, and ranges into memory; no digest."""

    def __init__(self, url: str, mib: int, where: Path) -> None:
        from obstore.store import from_url

        super().__init__(url, mib, where)
        self._client = from_url(url)
        self._memory = [
            memoryview(torch.cat(list(half.values())).numpy()).cast("B") for half in self._halves
        ]

    def save(self, number: int) -> None:
        def put(half: int) -> None:
            size = part_nbytes(self._memory[half].nbytes)
            self._client.put(
                f"{number}/{half}", self._memory[half], chunk_size=size, max_concurrency=8
            )

        _in_threads(put, range(RANKS))

    def load(self, number: int) -> None:
        def get(block: tuple[int, int]) -> None:
            half, at = block
            into = self._memory[half][at : at + _BLOCK_NBYTES]
            into[:] = self._client.get_range(f"{number}/{half}", start=at, length=into.nbytes)

        size = self._memory[0].nbytes
        _in_threads(
            get, [(half, at) for half in range(RANKS) for at in range(0, size, _BLOCK_NBYTES)]
        )


class _Dcp(_InThisProcess):
    def _storage(self, number: int) -> tuple[Any, Any]:
        raise NotImplementedError

    def save(self, number: int) -> None:
        import torch.distributed.checkpoint as dcp

        writer, _ = self._storage(number)
        dcp.save(self._state(), storage_writer=writer, no_dist=True)

    def load(self, number: int) -> None:
        import torch.distributed.checkpoint as dcp

        _, reader = self._storage(number)
        dcp.load(self._state(), storage_reader=reader, no_dist=True)

    def _state(self) -> dict[str, Any]:
        return {name: tensor for half in self._halves for name, tensor in half.items()}


class DcpByFsspec(_Dcp):
    def _storage(self, number: int) -> tuple[Any, Any]:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

        client = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
        path = f"{self._url}/{number}"
        more = {"client_kwargs": client, "skip_instance_cache": True}
        writer = FsspecWriter(path, single_file_per_rank=False, thread_count=RANKS, **more)
        return writer, FsspecReader(path, **more)


class DcpByMsc(_Dcp):
    """DCP through NVIDIA's Multi-Storage Client, as Megatron uses it."""

    def __init__(self, url: str, mib: int, where: Path) -> None:
        super().__init__(url, mib, where)
        base, _, self._prefix = url.removeprefix("s3://").partition("/")
        options = {"base_path": base, "endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
        provider = {"type": "s3", "options": {**options, "region_name": "us-east-1"}}
        config = where / "msc.json"
        config.write_text(json.dumps({"profiles": {"s": {"storage_provider": provider}}}))
        os.environ["MSC_CONFIG"] = str(config)

    def _storage(self, number: int) -> tuple[Any, Any]:
        from multistorageclient.contrib.torch import filesystem

        path = f"msc://s/{self._prefix}/{number}"
        writer = filesystem.MultiStorageFileSystemWriter(path, thread_count=RANKS)
        return writer, filesystem.MultiStorageFileSystemReader(path)


#: By their names in the table, with the package that each one needs.
WAYS: dict[str, tuple[type[Any], str]] = {
    "this package": (Ours, "obstore"),
    "obstore alone": (Obstore, "obstore"),
    "DCP by fsspec (s3fs)": (DcpByFsspec, "s3fs"),
    "DCP by Multi-Storage Client": (DcpByMsc, "multistorageclient"),
}


def _in_threads(work: Any, of: Any) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, of))


class Figures(NamedTuple):
    seconds: float
    cpu_s: float
    """Processor time of the process that sends or receives."""
    mib: float
    """Peak of its private memory beyond that before the call."""
    nbytes: int


def measured(pid: int, nbytes: int, work: Callable[[], None]) -> Figures:
    """Call `work`; return what it cost the process `pid`."""
    used, since = cpu_s(pid), time.perf_counter()
    with Peak(lambda: own_mib(pid), 0.005) as peak:
        work()
        seconds = time.perf_counter() - since
    return Figures(seconds, cpu_s(pid) - used, peak.growth, nbytes)


def _measure(name: str, url: str, mib: int, where: Path, results: mp.Queue[list[Figures]]) -> None:
    """In a process of its own: put the figures of a save and of a load; the first pair is left."""
    where.mkdir()
    way = WAYS[name][0](url, mib, where)
    way.save(1)
    way.load(1)
    saved = measured(way.writer(), way.nbytes, lambda: way.save(2))
    loaded = measured(os.getpid(), way.nbytes, lambda: way.load(2))
    way.close()
    results.put([saved, loaded])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512, help="state, MiB")


def run(options: argparse.Namespace, root: Path) -> Iterator[Result]:
    ways = [name for name, (_, package) in WAYS.items() if importlib.util.find_spec(package)]
    for name in WAYS.keys() - ways:
        yield f"{name}: left out, not installed (benchmarks/object_clients.txt)"
    context = mp.get_context("spawn")
    places = map(str, itertools.count())

    def measure(name: str) -> list[Figures]:
        results, place = context.Queue(), next(places)
        arguments = (name, f"s3://{BUCKET}/{place}/save", options.mib, root / place, results)
        process = context.Process(target=_measure, args=arguments)
        process.start()
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"{name}: failed, see above")
        return results.get()

    with reachable_s3_server(root / "server"):
        works = {name: functools.partial(measure, name) for name in ways}
        taken = in_turns(works, options.rounds)
    for index, what in enumerate(("save", "load")):
        of_kind = {name: [pair[index] for pair in rounds] for name, rounds in taken.items()}
        yield _table(what, of_kind, options)


def _table(what: str, taken: dict[str, list[Figures]], options: argparse.Namespace) -> Table:
    alone = [figures.seconds for figures in taken[_ALONE]]
    rows = []
    for name, rounds in taken.items():
        shares = [one / figures.seconds for one, figures in zip(alone, rounds, strict=True)]
        rows.append(
            (
                name,
                statistics.median(figures.cpu_s / figures.nbytes * 1e9 for figures in rounds),
                statistics.median(figures.mib for figures in rounds),
                statistics.median(shares),
                *(min(shares), max(shares)),
            )
        )
    columns = {what: "", "CPU s per GB": ".2f", "memory beside the state, MiB": ".0f"}
    columns |= dict.fromkeys(("share of obstore's speed", "least", "most"), ".2f")
    title = f"{what} of {options.mib} MiB; medians of {options.rounds} interleaved rounds"
    return Table(title, columns, rows)


STUDY = Study(
    "objects", "saves to and loads from an object store, against other clients", add_options, run
)
