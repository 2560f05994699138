"""Time that one rank needs to plan a save, and a load from a checkpoint of 16,384 ranks."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.study import Result, Study, Table
from benchmarks.synthetic import LLAMA_405B, World, decoded_sources, manifest
from benchmarks.workload import KINDS, layers_of, shapes
from megatron_flashckpt.file_format.manifest import encode_manifest
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import read_plan
from megatron_flashckpt.layout.template import PlanCache, order
from megatron_flashckpt.megatron_lm.torch_dtypes import dtype_name
from megatron_flashckpt.save.gc_pause import gc_paused

SAVED = World(LLAMA_405B, tp=8, pp=16, dp=128)
LOADING = World(LLAMA_405B, tp=4, pp=8, dp=512)


#: Pieces of the rank whose layout is planned.
_PIECES = 20_000
_HIDDEN = 64


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)


def run(options: argparse.Namespace, _: Path) -> Iterator[Result]:
    """Yield one rank's time for planning a save, and a load from a large job's manifest."""
    yield _layout(options.rounds)
    yield _reads(options.rounds)


def _layout(rounds: int) -> Table:
    """Return the median CPU times of a rank's layout, without and with cached plans."""
    pieces = [
        Piece(name, kind, dtype_name(dtype), shape, (0,) * len(shape), shape, 0, math.prod(shape))
        for kind, dtype in KINDS.items()
        for name, shape in shapes(layers_of(_PIECES), _HIDDEN).items()
    ]

    in_order = [pieces[position] for position in order(pieces)]

    def plan_s(plans: PlanCache) -> float:
        started = time.thread_time()
        plans.layout(in_order)
        return time.thread_time() - started

    seconds: dict[str, list[float]] = {"first save": [], "later save": []}
    with gc_paused():
        for _ in range(rounds):
            plans = PlanCache()
            for of_save in seconds.values():
                of_save.append(plan_s(plans))
    return Table(
        f"layout of {len(pieces):,} pieces; medians of {rounds}",
        {"": "", "ms of CPU": ".1f"},
        [(name, 1000 * statistics.median(of_save)) for name, of_save in seconds.items()],
    )


def _reads(rounds: int) -> Table:
    """Return the median seconds from the manifest's bytes to a checked plan, on one rank."""
    made = manifest(SAVED)
    pieces = sum(len(made.templates[shard.template]) for shard in made.shards)
    encoded = encode_manifest(made)
    del made
    wanted = LOADING.wanted(tp=1, stage=3, dp=200)
    decode_s, plan_s = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        sources = decoded_sources(encoded)
        middle = time.perf_counter()
        plan = read_plan(wanted, sources, "the checkpoint")
        decode_s.append(middle - started)
        plan_s.append(time.perf_counter() - middle)
    reads = sum(map(len, plan.reads.values()))
    decode, plan_time = statistics.median(decode_s), statistics.median(plan_s)
    return Table(
        f"synthetic checkpoint of {SAVED.size:,} ranks (TP{SAVED.tp} x PP{SAVED.pp} x "
        f"DP{SAVED.dp}), {pieces:,} pieces, manifest of {len(encoded) / 2**20:.0f} MiB;\n"
        f"one rank of TP{LOADING.tp} x PP{LOADING.pp} x DP{LOADING.dp}: {len(wanted)} pieces from "
        f"{reads:,} stored pieces in {len(plan.reads)} shards; medians of {rounds}",
        {"": "", "s": ".2f"},
        [("decode", decode), ("plan and check", plan_time), ("sum", decode + plan_time)],
    )


STUDY = Study("plan", "one rank's plans of a save and of a load", add_options, run)
