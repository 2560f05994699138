"""Real Megatron: training lost per save, and restarts after a SIGKILL in the middle of copies.

There are four jobs of one rank. The job "without" trains without the package. The job "first"
trains the same iterations with saves: blocks with and without a save in turn, then a save after
every iteration. It saves to storage, trains on, starts another save and is killed during its
copies. The job "memory" resumes from memory; the job "storage" resumes from storage after the agent
has ended. Both must repeat the losses and all tensors of the job "first".

What a save costs is the time of the job's blocks with saves, beyond that of its own blocks without
one. So it does not depend on how fast another job ran. If this section is the only one, the turns
also have blocks whose saves leave out one cause of lost training (`variants.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from megatron_flashckpt.memory.host_memory import available_nbytes
from tests.support.trainer import end_agents
from tools.gpu_check import machine
from tools.gpu_check.megatron_run import MODELS, Run
from tools.gpu_check.report import Report
from tools.gpu_check.variants import VARIANTS


@dataclasses.dataclass(frozen=True)
class Size:
    """Model, and what it needs in GiB."""

    what: str
    arguments: str
    gpu: float
    host: float
    disk: float


_BATCH = " --micro-batch-size 4 --global-batch-size 8"
#: The largest one that fits is trained.
_SIZES = (
    Size("1.3 B parameters, 16.9 GiB per save", MODELS["1.3b"] + _BATCH, 70, 50, 25),
    Size("0.4 B parameters, 4.7 GiB per save", MODELS["0.4b"] + _BATCH, 22, 16, 8),
)
_TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 500 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4"
)
#: Iteration of the first save; before it, agent and slots are prepared.
_FIRST = 12
#: Iterations of a block. A block of 3.4 s on an H100 contains the digests of its save, which last
#: from 1 to 3.4 s after the save; otherwise the next block without a save would pay for them.
_LENGTH = 10
_PLAIN = "no save"
_ONE = "one save"
_EVERY = "a save after every step"
#: Seconds that all jobs take with three rounds of blocks, on the slower card.
_THREE_ROUNDS_S = 135.0
#: The same with blocks of all variants.
_VARIANTS_S = 190.0


@dataclasses.dataclass(frozen=True)
class Block:
    """Consecutive iterations with one frequency of saves; `end` is excluded."""

    kind: str
    begin: int
    end: int
    saved: tuple[int, ...]


def blocks(begin: int, rounds: int, variants: Iterable[str] = ()) -> list[Block]:
    """Return `rounds` blocks of each kind in turn, then one with a save after every iteration.

    Every other round has the opposite order, so a steady drift falls on all kinds alike. The last
    iteration of a block has no save, so the copies of a block's saves end inside it.
    """
    made = []
    order = [_PLAIN, _ONE, *variants]
    turns = [kind for number in range(rounds) for kind in order[:: -1 if number % 2 else 1]]
    for kind in [*turns, _EVERY]:
        end = begin + _LENGTH
        saved = {_PLAIN: (), _EVERY: tuple(range(begin, end - 1))}.get(kind, (begin,))
        made.append(Block(kind, begin, end, saved))
        begin = end
    return made


def run(report: Report) -> None:
    """Run the jobs on the GPU, or without a GPU on CPU ranks with a tiny model."""
    arguments = _TINY
    if machine.simulated_node is None:
        size = next(filter(_fits, _SIZES), None)
        if size is None:
            report.skip("all", "GPU memory, host memory or disk is too small")
            return
        report.note("model", size.what)
        arguments = size.arguments
    where = Path(tempfile.mkdtemp(prefix="m-"))
    try:
        _run(report, where, arguments)
    finally:
        end_agents(where)
        shutil.rmtree(where, ignore_errors=True)


def _fits(size: Size) -> bool:
    has = (
        torch.cuda.get_device_properties(0).total_memory,
        available_nbytes(),
        shutil.disk_usage(tempfile.gettempdir()).free,
    )
    needs = (size.gpu, size.host, size.disk)
    return all(nbytes >= gib * 2**30 for nbytes, gib in zip(has, needs, strict=True))


def _run(report: Report, where: Path, size: str) -> None:
    enough = machine.seconds_left() > _THREE_ROUNDS_S
    variants = VARIANTS if machine.seconds_left() > _VARIANTS_S else {}
    if not variants:
        report.skip("variants of a save", f"no {_VARIANTS_S:.0f} s left: use --only M")
    turns = blocks(_FIRST + _LENGTH, machine.pick(3 if enough else 1, 1), variants)
    kept = turns[-1].end
    last = kept + 3
    saves = dict.fromkeys((_FIRST, last + 1, *(n for b in turns for n in b.saved)), "memory")
    saves[kept] = "storage"
    # Copies of the tiny model on a CPU end at once, so a fault kills that process.
    fault = machine.pick({}, {"FLASHCKPT_FAULT": f"rank0:stage.copied:{len(saves)}"})
    digests = (kept, last)
    without = Run(where, "without", size, kill=2 * _FIRST + 1, ours=False)
    first = Run(
        *(where, "first", size),
        kill=last + 2,
        saves=saves,
        variants={block.begin: block.kind for block in turns} if variants else {},
        digests=digests,
        **fault,
    )
    memory, storage = (
        Run(where, source, size, kill=last + 1, digests=digests) for source in ("memory", "storage")
    )
    if not (without.run(report) and first.run(report)):
        return
    report_lost(report, without, first, turns)
    _report_memory(report, without, first)
    if machine.simulated_node is None:
        copying = first.events("killed")[0]["copying"]
        report.note("SIGKILL came while a save was being copied", "yes" if copying else "no")
    same = without.losses(1, 2 * _FIRST) == first.losses(1, 2 * _FIRST) != []
    report.must("the losses with saves equal those of a job without the package", same)
    _resume(report, first, memory, "memory", digests)
    report.must("the save before the kill becomes durable", _await_tracker(where, kept))
    end_agents(where)
    _resume(report, first, storage, "storage", digests)


def report_lost(report: Report, without: Run, first: Run, turns: list[Block]) -> None:
    """Report the time of the iterations of both jobs, and the training lost per save."""
    plain, steps = without.steps(), first.steps()
    other = [plain[n] for n in sorted(plain) if n > 5]
    spans: dict[str, list[list[float]]] = {}
    for block in turns:
        spans.setdefault(block.kind, []).append([steps[n] for n in range(block.begin, block.end)])
    own = list(itertools.chain(*spans[_PLAIN]))
    mean, deviation = statistics.fmean(own), statistics.stdev(own)
    report.figure(
        "iteration without the package", 1000 * statistics.fmean(other), "ms", _listed(other)
    )
    report.figure(
        "iteration with the package, in blocks without a save",
        *(1000 * mean, "ms"),
        "a difference of the two is no cost of saves: drift, or an idle package; "
        + " | ".join(map(_listed, spans[_PLAIN])),
    )
    start = range(2, _FIRST)
    more = sum(steps[n] for n in start) - sum(plain[n] for n in start)
    report.figure(
        f"iterations 2 to {_FIRST - 1}, before the first save: beyond those without the package",
        1000 * more,
        "ms",
        f"{_listed([steps[n] for n in start])}; without {_listed([plain[n] for n in start])}",
    )
    after = [steps[n] for n in range(_FIRST, _FIRST + _LENGTH)]
    lost = sum(after) - mean * len(after)
    report.figure("first save: training lost", 1000 * lost, "ms", _listed(after))
    for kind in [kind for kind in spans if kind != _PLAIN]:
        saves = sum(len(block.saved) for block in turns if block.kind == kind)
        count = _LENGTH * len(spans[kind])
        lost = (sum(map(sum, spans[kind])) - mean * count) / saves
        error = deviation * (count + count**2 / len(own)) ** 0.5 / saves
        detail = f"standard error {1000 * error:.0f} ms; {' | '.join(map(_listed, spans[kind]))}"
        what = f"training lost per save, {kind}"
        report.figure(what, 1000 * lost, "ms", detail, headline=kind != _EVERY)
    report.note("training lost per save", "beyond the same job's blocks without a save")
    for staged in re.findall(r"iteration \d+ staged.*", first.log())[:2]:
        report.note("the package's own line", staged)


def _listed(seconds: list[float]) -> str:
    return " ".join(f"{1000 * value:.0f}" for value in seconds)


def _report_memory(report: Report, without: Run, first: Run) -> None:
    """Report the largest host and GPU memory in use, with and without the package."""
    begins = (without.events("begin"), first.events("begin"))
    host = [min(event["host_nbytes"] for event in events) for events in begins]
    free = available_nbytes()
    report.figure(
        "peak host memory of rank and agent, beyond a job without the package",
        (host[0] - host[1]) / 2**30,
        "GiB",
        f"least memory available: {host[0] / 2**30:.1f} without, {host[1] / 2**30:.1f} with; "
        f"{free / 2**30:.1f} after the kill",
    )
    gpu = [max(event["gpu_nbytes"] for event in events) for events in begins]
    report.figure(
        "peak GPU memory in use, beyond a job without the package",
        (gpu[1] - gpu[0]) / 2**20,
        "MiB",
        f"{gpu[0] / 2**30:.2f} GiB without",
    )


def _resume(report: Report, first: Run, again: Run, source: str, digests: tuple[int, int]) -> None:
    if not again.run(report):
        return
    kept, last = digests
    match = re.search(r"flashckpt: iteration (\d+) was restored from (\w+): (.*)", again.log())
    report.must(
        f"a restart resumes from {source}, from the newest whole save",
        match is not None and (match[1], match[2]) == (str(kept), source),
        match[0] if match else again.log_end(),
    )
    if match and (rate := re.search(r"\(([\d.]+) MiB/s\)", match[3])):
        report.figure(f"load from {source}", float(rate[1]) / 1024, "GiB/s")
    for iteration in digests:
        ours, restarted = first.digests(iteration), again.digests(iteration)
        unequal = [name for name in ours if restarted.get(name) != ours[name]]
        report.must(
            f"restart from {source}: all tensors after iteration {iteration} are equal",
            bool(ours) and ours.keys() == restarted.keys() and not unequal,
            f"{len(ours)} tensors; unequal: {', '.join(unequal[:5]) or 'none'}",
        )
    ours, restarted = first.losses(kept + 1, last), again.losses(kept + 1, last)
    report.must(
        f"restart from {source}: all losses are equal",
        bool(ours) and ours == restarted,
        f"{len(ours)} micro-batches",
    )
    used = [
        max(event["gpu_nbytes"] for event in run.events("begin") if event["iteration"] == last)
        for run in (first, again)
    ]
    what = f"GPU memory in use after a restart from {source}, beyond the first job's"
    report.figure(what, (used[1] - used[0]) / 2**20, "MiB")


def _await_tracker(where: Path, iteration: int) -> bool:
    """Return whether storage names `iteration` as its newest checkpoint in the time left."""
    tracker = where / "checkpoints/latest_checkpointed_iteration.txt"
    while machine.seconds_left() > 0:
        if tracker.exists() and tracker.read_text() == str(iteration):
            return True
        time.sleep(0.05)
    return False
