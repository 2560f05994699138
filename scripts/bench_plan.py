"""How long one rank needs to plan its reads of a checkpoint that 16,384 ranks saved."""

from __future__ import annotations

import statistics
import time

from rich.console import Console
from synthetic import LLAMA_405B, World, manifest

from megatron_flashckpt.layout.coverage import read_plan
from megatron_flashckpt.layout.manifest import decode_manifest, encode_manifest
from megatron_flashckpt.layout.plan import Source

SAVED = World(LLAMA_405B, tp=8, pp=16, dp=128)
LOADING = World(LLAMA_405B, tp=4, pp=8, dp=512)


def bench_plan(out: Console, rounds: int) -> None:
    """Print the median seconds from the manifest's bytes to a checked plan, on one rank."""
    made = manifest(SAVED)
    pieces = sum(len(made.templates[shard.template]) for shard in made.shards)
    encoded = encode_manifest(made)
    del made
    wanted = LOADING.wanted(tp=1, stage=3, dp=200)
    decode_s, plan_s = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        decoded = decode_manifest(encoded, "the manifest")
        templates = {name: decoded.template(name) for name in decoded.templates}
        sources = [
            Source(shard.rank, templates[shard.template], shard.placement)
            for shard in decoded.shards
        ]
        middle = time.perf_counter()
        plan = read_plan(wanted, sources, "the checkpoint")
        decode_s.append(middle - started)
        plan_s.append(time.perf_counter() - middle)
    reads = sum(map(len, plan.reads.values()))
    out.print(
        f"synthetic checkpoint of {SAVED.size:,} ranks (TP{SAVED.tp} x PP{SAVED.pp} x "
        f"DP{SAVED.dp}), {pieces:,} pieces, manifest of {len(encoded) / 2**20:.0f} MiB"
    )
    out.print(
        f"one rank of TP{LOADING.tp} x PP{LOADING.pp} x DP{LOADING.dp}: {len(wanted)} pieces from "
        f"{reads:,} stored ones in {len(plan.reads)} shards"
    )
    decode, plan_time = statistics.median(decode_s), statistics.median(plan_s)
    out.print(
        f"decoded in {decode:.2f} s, planned and checked in {plan_time:.2f} s, together "
        f"{decode + plan_time:.2f} s (medians of {rounds})"
    )
