"""Megatron's own unit tests of `save_checkpoint` and `load_checkpoint`, run with our functions.

`scripts/compat --upstream-tests [TAG ...]` runs every test on CPU ranks with stock first: a test
fails there because it needs a GPU, or by Megatron's own fault. Then the same tests run with our
functions, and read checkpoints back from storage. If a test passes with stock and fails with ours,
ours is wrong, or `NOT_APPLICABLE` names the test and the reason.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch.distributed as dist

from tools.compat.tree import REPO, Tree

#: Number of ranks for which Megatron's tests are written.
RANKS = 8
#: Default releases, an older and a newer one; the command line can name any other tag.
TAGS = ("core_v0.16.1", "core_v0.19.0")
ENTRY_POINTS = ("stock", "flashckpt")
PASSED, FAILED, NOT_OURS, STOCK_FAILS, SKIPPED = (
    "passed",
    "FAILED",
    "not applicable",
    "stock fails here too",
    "skipped by Megatron",
)

#: Reason that the ranks report for skipped parameter sets of a failing test (upstream_plugin.py).
NOT_TRIED = "not tried, because the first ones fail"

#: Tests that pass with stock and cannot pass with any other format: reasons by pattern of the id.
NOT_APPLICABLE = {
    r"test_checkpointing\.py::test_save_checkpoint": (
        "saves mocks of model and optimizer, and looks for the files of Megatron's formats"
    ),
    r"test_checkpointing\.py::test_load_checkpoint": "the optimizer is a mock without parameters",
    r"test_checkpointing\.py::test_dist_checkpoint_versioning": (
        "is about the metadata that Megatron keeps of its own format"
    ),
    r"test_global_metadata_reuse\.py": "is about the cached plans of torch_dist",
    r"test_finetune_doesnt_load_optimizer": (
        "wants a load under another TP and PP to be refused; ours does it"
    ),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one test, over all ranks."""

    outcome: str
    reason: str
    calls: int
    """Calls of save_checkpoint and load_checkpoint; counted with our functions only."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Verdict on our functions by one test."""

    kind: str
    reason: str = ""


def files(root: Path) -> list[str]:
    """Return the test files that import either function from Megatron's checkpointing module."""
    importing = []
    for path in sorted((root / "tests/unit_tests").rglob("test_*.py")):
        text = path.read_text()
        if "training.checkpointing" in text and re.search(r"\b(save|load)_checkpoint\b", text):
            importing.append(str(path.relative_to(root)))
    return importing


def run(tree: Tree, where: Path) -> dict[str, dict[str, Result]]:
    """Run the tests with stock, then with ours; return the results by entry point and test id."""
    path = where / "path"
    path.mkdir(parents=True, exist_ok=True)
    # The path has no root of this repository, whose package `tests` would hide Megatron's.
    ours = path / "megatron_flashckpt"
    ours.unlink(missing_ok=True)
    ours.symlink_to(REPO / "megatron_flashckpt")
    environment = {
        **tree.environment(where),
        "PYTHONPATH": os.pathsep.join(map(str, [REPO / "tests/cpu_megatron", tree.root, path])),
        # The stand-in for CUDA is installed in the process that the ranks are forked from.
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(RANKS),
        "FLASHCKPT_RUNTIME_DIR": str(where / "run"),
        "FLASHCKPT_RESTORE_FROM_MEMORY": "false",
        # The exit status must be pytest's: tests may end with a save that fails on purpose.
        "FLASHCKPT_EXIT_NONZERO_UNLESS_DURABLE": "false",
    }
    stores = {
        entry_point: dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
        for entry_point in ENTRY_POINTS
    }
    entry_points = [
        f"{entry_point}={where / entry_point}:{store.port}" for entry_point, store in stores.items()
    ]
    with open(where / "log", "w") as log:
        subprocess.run(
            [
                *(sys.executable, str(REPO / "tools/compat/ranks/upstream_ranks.py"), str(RANKS)),
                *(*entry_points, "--", *files(tree.root)),
            ],
            cwd=tree.root,
            env=environment,
            stdout=log,
            stderr=log,
            check=True,
        )
    return {entry_point: results(where / entry_point) for entry_point in ENTRY_POINTS}


def results(where: Path) -> dict[str, Result]:
    """Return the result of each test, merged over all ranks."""
    by_test = collections.defaultdict(list)
    for file in sorted(where.glob("rank_*.jsonl")):
        for line in file.read_text().splitlines():
            result = json.loads(line)
            by_test[result["test"]].append(result)
    return {test: _together(ranks) for test, ranks in by_test.items()}


def _together(ranks: list[dict]) -> Result:
    calls = sum(sum(rank["calls"].values()) for rank in ranks)
    failed = [rank for rank in ranks if rank.get("outcome", "failed") == "failed"]
    if failed:
        # The rank that failed first; on the others a collective failed in consequence.
        first = min(failed, key=lambda rank: rank.get("time", 0))
        return Result("failed", _line(first.get("reason", "the test did not end")), calls)
    if len(ranks) < RANKS:
        return Result("failed", f"only {len(ranks)} of {RANKS} ranks came to its end", calls)
    return Result(ranks[0]["outcome"], _line(ranks[0]["reason"]), calls)


def _line(reason: str) -> str:
    lines = reason.strip().splitlines()
    return (lines[0] if lines else "")[:160]


def verdict(test: str, stock: Result | None, ours: Result | None) -> Verdict:
    """Return the verdict on a test from its two results."""
    if stock is None or stock.outcome == "failed":
        return Verdict(STOCK_FAILS, stock.reason if stock else "it did not come to an end")
    if stock.outcome == "skipped" and stock.reason == NOT_TRIED:
        return Verdict(STOCK_FAILS, stock.reason)
    if stock.outcome == "skipped":
        return Verdict(SKIPPED, stock.reason)
    if ours is not None and ours.outcome == "passed":
        if not ours.calls:
            return Verdict(NOT_OURS, "calls neither function on this machine")
        return Verdict(PASSED)
    for pattern, reason in NOT_APPLICABLE.items():
        if re.search(pattern, test):
            return Verdict(NOT_OURS, reason)
    return Verdict(FAILED, ours.reason if ours else "it did not come to an end")


def table(tag: str, verdicts: dict[str, Verdict]) -> Iterable[str]:
    """Yield lines of Markdown, one for all parameter sets of a test with the same verdict."""
    counts: collections.Counter[tuple[str, Verdict]] = collections.Counter()
    for test, verdict in verdicts.items():
        counts[test.partition("[")[0].removeprefix("tests/unit_tests/"), verdict] += 1
    for (test, verdict), count in counts.items():
        reason = verdict.reason.replace("|", "/")
        yield f"| {tag} | {test} | {count} | {verdict.kind} | {reason} |"


def main(tags: Sequence[str], extract: Callable[[str], Tree]) -> int:
    """Print the table of all tags; return the number of tests that failed with ours."""
    print("| release | test | parameter sets | result | reason |\n|---|---|---|---|---|")
    totals: collections.Counter[str] = collections.Counter()
    for tag in tags:
        tree = extract(tag)
        by_entry_point = run(tree, tree.root.parent / "upstream")
        verdicts = {
            test: verdict(
                test, by_entry_point["stock"].get(test), by_entry_point["flashckpt"].get(test)
            )
            for test in sorted({*by_entry_point["stock"], *by_entry_point["flashckpt"]})
        }
        print(*table(tag, verdicts), sep="\n", flush=True)
        totals.update(f"{tag}: {result.kind}" for result in verdicts.values())
    print("; ".join(f"{kind} {count}" for kind, count in sorted(totals.items())))
    return sum(count for kind, count in totals.items() if kind.endswith(FAILED))
