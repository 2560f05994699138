"""Ranks with equal plans compute one plan together, on one node and across nodes.

The first rank to arrive computes the plan, and saves report that. Each job saves after iterations 2
and 4; the dry run precedes the first save (`PREPARED`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.megatron_jobs import copies, run_job, succeeded

MODEL = ["--num-layers", "4", "--bf16", "--use-distributed-optimizer"]
#: Job -> its layout, its nodes, and the sets of ranks that share one plan.
JOBS = {
    "tensor group": (["--tensor-model-parallel-size", "4"], 1, {1, 2, 3}),
    "pipeline over nodes": (["--pipeline-model-parallel-size", "4"], 2, {1, 2}),
}


@pytest.mark.parametrize("name", JOBS)
def test_ranks_with_equal_plans_compute_one(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    layout, nodes, equal = JOBS[name]
    save = tmp_path / "saves"
    arguments = [*MODEL, *layout, "--train-iters", "4", "--save", str(save), "--save-interval", "2"]
    result = succeeded(run_job(tmp_path, "job", arguments, nodes=nodes, env={"PREPARED": "2"}))
    assert equal in templates(save, 2)
    if name == "tensor group":
        kinds = {kind for kind, _ in copies(save, 2)}
        assert {f"weight@0.{rank}" for rank in equal} <= kinds, "these ranks save their own copies"
    came = {event["rank"]: (event["misses"], event["shared"]) for event in result.named("plans")}
    others = [(0, 1)] * (len(equal) - 1)
    assert sorted(came[rank] for rank in equal) == [*others, (1, 0)], (
        "one rank computes the plan, the others find it"
    )
    assert all(came[rank] == (1, 0) for rank in came.keys() - equal)
    capsys.readouterr()
    assert main(["report", str(save), "--json"]) == 0
    start, *saves = json.loads(capsys.readouterr().out)
    assert start["state"] == "started"
    first, second = (row["cost"]["plans"] for row in saves)
    assert first == {"computed": 4 - len(others), "found": len(others), "kept": 0}
    assert second == {"computed": 0, "found": 0, "kept": 4}


def templates(save: Path, iteration: int) -> list[set[int]]:
    """Return the set of ranks that share each template of a checkpoint."""
    stored = open_checkpoint(PosixStore(save), iteration)
    ranks: dict[int, set[int]] = {}
    for source in stored.sources():
        ranks.setdefault(id(source.template), set()).add(source.rank)
    return sorted(ranks.values(), key=min)
