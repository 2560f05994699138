"""Exchange of a restart from memory on one of 16,384 ranks: requests, rounds and collectives.

The layout is synthetic. This process is one rank, which plans its reads as in a job. A simulated
process group answers as if all other ranks sent the same data as this rank.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.study import Result, Study, Table
from benchmarks.synthetic import LLAMA_405B, World
from megatron_flashckpt.collectives import gather_named, gather_objects
from megatron_flashckpt.layout.read_plan import read_plan
from megatron_flashckpt.layout.template import PlanCache, Source
from megatron_flashckpt.load.all_to_all import RoundSizes, Span, Stream

SAVED = World(LLAMA_405B, tp=8, pp=16, dp=128)
#: The measured rank, one of the first tensor ranks; its replicas hold all pieces that it needs.
TP, STAGE, REPLICA = 0, 7, 40
ROUND_NBYTES = 64 * 2**20
Requests = dict[int, list[Span]]


def requests() -> Requests:
    """Return the spans that the measured rank requests from its replicas after a restart."""
    cache = PlanCache()
    layouts = [cache.layout(pieces) for pieces in SAVED.owned(TP, STAGE)]
    sources = [
        Source(number, layout.template, layout.placement) for number, layout in enumerate(layouts)
    ]
    reads = read_plan(SAVED.wanted(TP, STAGE, REPLICA), sources, "memory").reads
    return {
        source: [(read.source_offset, read.nbytes) for read in of_source]
        for source, of_source in reads.items()
        if source != REPLICA
    }


def measured(work: Callable[[], object]) -> tuple[float, int, float]:
    """Return the seconds and the collective calls of `work`, and the device memory of the largest.

    This process is a rank of a job in which all ranks send the same data. Memory is in MB.
    """
    nbytes: list[int] = []

    def gather(received: torch.Tensor, sent: torch.Tensor, group: Any = None) -> None:
        received.view(SAVED.size, -1)[:] = sent
        nbytes.append(received.nbytes + sent.nbytes)

    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    replaced: dict[str, Any] = {
        "is_initialized": lambda: True,
        "get_rank": lambda group=None: REPLICA,
        "get_world_size": lambda group=None: SAVED.size,
        "get_backend": lambda group=None: "gloo",
        name: gather,
    }
    gc.collect()
    with mock.patch.multiple(dist, **replaced):
        started = time.perf_counter()
        work()
        return time.perf_counter() - started, len(nbytes), max(nbytes) / 1e6


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace, _: Path) -> Iterator[Result]:
    """Yield the cost of exchanging all ranks' requests, and of the other gathers of a load."""
    requested = requests()
    streams = {peer: Stream(spans) for peer, spans in requested.items()}
    nbytes = sum(stream.nbytes for stream in streams.values())
    spans = sum(map(len, requested.values()))
    title = (
        f"one of {SAVED.size:,} ranks requests {spans:,} spans from {len(requested)} others, "
        f"{nbytes / 1e6:,.0f} MB, in {RoundSizes.of(streams, ROUND_NBYTES).rounds(streams)} rounds"
    )
    works: dict[str, Callable[[], object]] = {
        "gather all requests": lambda: gather_named(requested),
        "agree on success": lambda: gather_objects((None, None)),
        "gather a summary": lambda: gather_objects(("0" * 32, tuple(range(1000, 1060)))),
    }
    columns = {
        "": "",
        "s": ".2f",
        "collective calls": "",
        "device memory of one call, MB": ".1f",
    }
    rows = [(name, *measured(work)) for _ in range(options.rounds) for name, work in works.items()]
    yield Table(title, columns, rows)


STUDY = Study("exchange", "collectives of a restart from memory on 16,384 ranks", add_options, run)
