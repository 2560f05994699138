"""Traces of saves: their contents and place, and their cost if the setting is off."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_flashckpt.agent.trace_files import Traces
from megatron_flashckpt.config import Config, Trace
from megatron_flashckpt.tracing import Span, phase
from tests.agent.conftest import Node
from tests.support.trainer import FakeTrainer, eventually

TRACES = "traces"


def config_with_traces(node: Node, **trace: Any) -> Config:
    return msgspec.structs.replace(node.config(), trace=Trace(directory=TRACES, **trace))


def written(root: Path) -> list[Path]:
    return sorted(path for path in (root / TRACES).glob("*") if path.suffix == ".json")


def phases(path: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the events of a trace by process name and phase name."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {
        entry["pid"]: entry["args"]["name"] for entry in events if entry["name"] == "process_name"
    }
    by_phase: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] != "M":
            process = "agent" if names[event["pid"]].startswith("agent") else names[event["pid"]]
            by_phase.setdefault((process, event["name"]), []).append(event)
    return by_phase


def traced_save(trainers: list[FakeTrainer], iteration: int) -> None:
    """Save as ranks do: their phases go with the "staged" message."""
    save_id = trainers[0].new_save_id()
    for trainer in trainers:
        plan = Span("plan", "MainThread", time.monotonic(), 0.5)
        trainer.stage(iteration, save_id, spans=(plan,))
    for trainer in trainers:
        assert trainer.outcome().error is None


def test_a_trace_shows_the_phases_of_every_rank_and_of_the_agent(node: Node, root: Path) -> None:
    trainers = [node.trainer(root, rank, 2, config=config_with_traces(node)) for rank in range(2)]
    before = time.time()
    traced_save(trainers, 7)
    (path,) = eventually("the trace of the save", lambda: written(root))
    assert path.name.startswith("iter_0000007-")
    events = phases(path)
    for rank in ("rank 0", "rank 1"):
        for name in ("plan", "persist", "digest", "write", "fdatasync"):
            assert len(events[rank, name]) == 1, (rank, name)
        (persist,) = events[rank, "persist"]
        for name in ("digest", "write", "fdatasync"):
            (part,) = events[rank, name]
            assert (part["tid"] == persist["tid"]) == (name == "fdatasync")
            assert persist["ts"] <= part["ts"]
            assert part["ts"] + part["dur"] <= persist["ts"] + persist["dur"] + 1
    (plan,) = events["rank 0", "plan"]
    assert plan["dur"] == pytest.approx(0.5e6)
    assert abs(plan["ts"] - 1e6 * before) < 60e6
    for name in ("commit record", "read records", "merge", "manifest", "tracker", "report result"):
        assert len(events["agent", name]) == 1, name


def test_jobs_that_share_a_trace_directory_keep_their_own_traces(
    node: Node, root: Path, tmp_path: Path
) -> None:
    shared = msgspec.structs.replace(
        node.config(), trace=Trace(directory=str(tmp_path / "shared"), keep=1)
    )
    jobs = [node.trainer(tmp_path / name, config=shared) for name in ("one", "two")]
    for iteration in (1, 2, 3):
        for trainer in jobs:
            traced_save([trainer], iteration)

    def kept() -> list[str]:
        return sorted(path.name.partition("-")[0] for path in (tmp_path / "shared").glob("*.json"))

    eventually(
        "the removal of the oldest trace of each job",
        lambda: kept() == ["iter_0000003", "iter_0000003"],
    )


def test_without_the_setting_no_trace_is_recorded_or_written(node: Node, root: Path) -> None:
    traced_save([node.trainer(root)], 7)
    assert not (root / TRACES).exists()
    quiet = Traces(str(root), Trace())
    with quiet.recording(1, "000001-aaaa.00001.1", 0):
        assert phase("x") is not None
    quiet.add(1, "000001-aaaa.00001.1", 0, [Span("x", "MainThread", 0.0, 1.0)])
    assert quiet._saves == {}


def test_traces_that_cannot_be_written_fail_no_save(node: Node, root: Path) -> None:
    root.mkdir()
    (root / TRACES).write_text("a file")
    traced_save([node.trainer(root, config=config_with_traces(node))], 7)
    assert (root / TRACES).read_text() == "a file"
