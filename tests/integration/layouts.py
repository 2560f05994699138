"""Parallel layouts, and the cells of a job that saves under each and loads under every other one.

A source cell trains 3 iterations, saves, trains 2 more and saves again; its results are the
reference. A destination cell starts from other random weights, loads the source's iteration 3,
saves that iteration again at once, and trains the same 2 iterations.

The first layouts of each family (`SAMPLED`) load one other layout, and one other layout loads them.
With `EVERY_CELL=1`, as `scripts/reshard` sets it, every ordered pair of a family is a cell.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support.megatron_jobs import DECOUPLED, MUP

EVERY_CELL = bool(os.environ.get("EVERY_CELL"))
BEFORE, AFTER = 3, 5
GLOBAL_BATCH = 12
DISTRIBUTED = "--use-distributed-optimizer"

TINY = (
    f"--swiglu --seq-length 16 --global-batch-size {GLOBAL_BATCH} --hidden-dropout 0 "
    "--attention-dropout 0 --train-iters 5 --distributed-timeout-minutes 1 "
    "--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"
).split() + DECOUPLED
UNTIED = ["--num-layers", "4", *TINY, "--untie-embeddings-and-output-weights"]
MOE = [
    *("--num-layers", "2", *TINY, "--untie-embeddings-and-output-weights", "--bf16"),
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"),
    *("--disable-bias-linear", "--moe-router-score-function", "sigmoid"),
    *("--moe-router-enable-expert-bias", *MUP),
]

TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
VPP = "--num-layers-per-virtual-pipeline-stage"
FIRST = "--decoder-first-pipeline-num-layers"
STAGES = "--pipeline-model-parallel-layout"
EP = "--expert-tensor-parallel-size 1 --expert-model-parallel-size"


@dataclasses.dataclass(frozen=True)
class Layout:
    """One parallel layout of a family's model: a row and a column of the family's matrix."""

    family: str
    label: str
    world: int
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.family}/{self.label}".replace(" ", "-")

    @property
    def model_parallel(self) -> tuple[str, str]:
        """Return the tensor and pipeline parallel sizes."""
        tensor, pipeline = (
            self.arguments[self.arguments.index(name) + 1] if name in self.arguments else "1"
            for name in (TP, PP)
        )
        return tensor, pipeline


@dataclasses.dataclass(frozen=True)
class Pair:
    """A cell: `destination` loads the checkpoint of `source`."""

    source: Layout
    destination: Layout
    how: str = ""
    """Variant of the cell; empty for a cell of the matrix."""

    @property
    def name(self) -> str:
        name = f"{self.source.name}->{self.destination.label}".replace(" ", "-")
        return f"{name}:{self.how}" if self.how else name

    @property
    def resizes_vocabulary(self) -> bool:
        widths = {layout.model_parallel[0] for layout in (self.source, self.destination)}
        return self.source.family == "vocabulary" and len(widths) > 1


def _layouts(family: str, base: list[str], **described: str) -> list[Layout]:
    """Return layouts from `label="ranks, micro-batch size, further arguments"`."""
    layouts = []
    for label, text in described.items():
        world, micro_batch, *arguments = text.split()
        if not label.endswith("_plain"):
            arguments.append(DISTRIBUTED)
        arguments = [*base, "--micro-batch-size", micro_batch, *arguments]
        layouts.append(Layout(family, label.replace("_", " "), int(world), tuple(arguments)))
    return layouts


#: "plain" has no distributed optimizer. Neighbours of a family differ in what a load reshards.
FAMILIES: dict[str, list[Layout]] = {
    "dense": _layouts(
        "dense",
        [*UNTIED, "--bf16"],
        TP2_DP2=f"4 6 {TP} 2",
        PP4=f"4 3 {PP} 4",
        DP4="4 3",
        TP2_PP2=f"4 6 {TP} 2 {PP} 2",
        DP4_plain="4 3",
        PP2_VPP2_DP2=f"4 3 {PP} 2 {VPP} 1",
        TP4=f"4 12 {TP} 4",
        PP2_DP2=f"4 3 {PP} 2",
        TP2_DP2_plain=f"4 6 {TP} 2",
    ),
    "moe": _layouts(
        "moe",
        MOE,
        TP2_EP2=f"4 6 {TP} 2 --sequence-parallel {EP} 2",
        DP4_EP4=f"4 3 {EP} 4",
        DP4_EP1=f"4 3 {EP} 1",
        DP4_EP2_plain=f"4 3 {EP} 2",
        DP4_EP2=f"4 3 {EP} 2",
    ),
    "tied": _layouts(
        "tied",
        ["--num-layers", "4", *TINY, "--bf16"],
        TP2_DP2=f"4 6 {TP} 2",
        PP2_DP2=f"4 3 {PP} 2",
        TP2_PP2_plain=f"4 6 {TP} 2 {PP} 2",
    ),
    # Megatron pads 301 words to 384 rows, but to 512 rows under TP2.
    "vocabulary": _layouts(
        "vocabulary",
        [*UNTIED, "--bf16", "--vocab-size", "300"],
        TP2_DP2=f"4 6 {TP} 2",
        DP4="4 3",
    ),
    # The optimizer steps the weights themselves, so there are no masters.
    "fp32": _layouts(
        "fp32",
        [*UNTIED, *MUP],
        TP2_DP2=f"4 6 {TP} 2",
        PP2_DP2=f"4 3 {PP} 2",
        TP2_PP2_plain=f"4 6 {TP} 2 {PP} 2",
    ),
    # The same sizes, but other layers on each stage.
    "splits": _layouts(
        "splits",
        [*UNTIED, "--bf16"],
        PP2=f"2 6 {PP} 2",
        PP2_first_3=f"2 6 {PP} 2 {FIRST} 3",
        PP2_layout=f"2 6 {PP} 2 {STAGES} E|t|tt|tL",
        PP2_VPP2=f"2 6 {PP} 2 {VPP} 1",
    ),
    "worlds": _layouts(
        "worlds",
        [*UNTIED, "--bf16"],
        TP2_DP2=f"4 6 {TP} 2",
        one_rank="1 12",
        DP3="3 4",
        TP2_PP2_DP2=f"8 3 {TP} 2 {PP} 2",
        DP2="2 6",
    ),
}


#: Numbers of layouts of large families that the suite runs; the others differ in sizes alone.
SAMPLED = {"dense": 6, "moe": 4, "splits": 3, "worlds": 4}


def layouts_of(family: str) -> list[Layout]:
    return FAMILIES[family][: None if EVERY_CELL else SAMPLED.get(family)]


@dataclasses.dataclass(frozen=True)
class Job:
    """Families that one launched job runs, and the job's number of ranks."""

    ranks: int
    families: tuple[str, ...]
    fused_adam: bool = True
    """Apex's Adam counts steps per param group; torch's Adam, used otherwise, per parameter."""


JOBS = {
    "dense": Job(4, ("dense",)),
    "others": Job(4, ("moe", "fp32")),
    "torch_adam": Job(4, ("tied", "vocabulary"), fused_adam=False),
    "splits": Job(2, ("splits",)),
    "worlds": Job(8, ("worlds",)),
}


def pairs(family: str) -> list[Pair]:
    """Return the cells of a family: a ring through its layouts and one layout under itself."""
    layouts = layouts_of(family)
    if EVERY_CELL:
        return [Pair(*pair) for pair in itertools.product(layouts, layouts)]
    ring = [Pair(*pair) for pair in itertools.pairwise([*layouts, layouts[0]])]
    return [Pair(layouts[0], layouts[0]), *ring]


def interrupted_pairs(family: str) -> list[Pair]:
    """Return pairs whose source asks for a step to be run again: equal layout, then another."""
    first, second, *_ = FAMILIES[family]
    return [Pair(first, there, "interrupted") for there in (first, second) if family == "dense"]


def plan(families: Iterable[str], root: Path) -> list[dict[str, Any]]:
    """Return the cells of one job; cells of equal layout follow one another."""
    cells = []
    for family in families:
        layouts = layouts_of(family)
        cells += [_source_cell(layout, root) for layout in layouts]
        loads = [*pairs(family), *interrupted_pairs(family)]
        for layout in layouts:
            cells += [_destination_cell(pair, root) for pair in loads if pair.destination == layout]
    return cells


def _source_cell(layout: Layout, root: Path) -> dict[str, Any]:
    steps: list[list[Any]] = [["train", 1, BEFORE], ["save", str(root / layout.name), BEFORE]]
    steps += _continue(root / layout.name)
    if any(pair.source == layout for pair in interrupted_pairs(layout.family)):
        steps += [["interrupt"], ["save", f"{root / layout.name}:interrupted", AFTER]]
    return _cell(layout, layout.name, 11, steps)


def _destination_cell(pair: Pair, root: Path) -> dict[str, Any]:
    own, source = str(root / pair.name), str(root / pair.source.name)
    if pair.how == "interrupted":
        steps = [["load", f"{source}:interrupted", AFTER, own]]
    else:
        steps = [["load", source, BEFORE, own], ["hold"], ["save", own, BEFORE]]
        steps += _continue(root / pair.name)
    return _cell(pair.destination, pair.name, 99, steps)


def _continue(directory: Path) -> list[list[Any]]:
    return [["train", BEFORE + 1, AFTER], ["save", str(directory), AFTER]]


def _cell(layout: Layout, name: str, seed: int, steps: list[list[Any]]) -> dict[str, Any]:
    return {
        "name": name,
        "world": layout.world,
        "arguments": list(layout.arguments),
        "seed": seed,
        "steps": steps,
    }
