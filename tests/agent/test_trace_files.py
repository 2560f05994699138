"""Traces of saves: their contents and place, and their cost if the setting is off."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_flashckpt.agent.trace_files import Traces
from megatron_flashckpt.config import Config, Trace
from megatron_flashckpt.tracing import EARLY, SAVE, WAIT, OpenTraces, Recorder, Span, phase
from tests.agent.conftest import Node
from tests.support.trainer import FakeTrainer, eventually, new_save_id

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
    """Save as ranks do: some phases go with the "staged" message, others with the poll."""
    save_id = trainers[0].new_save_id()
    now = time.monotonic()
    for trainer in trainers:
        trainer.stage(iteration, save_id, spans=(Span("plan", "MainThread", now, 0.5),))
    for trainer in trainers:
        later = {save_id: (Span(WAIT, "MainThread", now + 0.5, 0.25),)}
        finished: tuple[Any, ...] = trainer.client.poll(0.0, later).finished
        assert (finished or (trainer.outcome(),))[0].error is None


def test_a_trace_shows_the_phases_of_every_rank_and_of_the_agent(node: Node, root: Path) -> None:
    trainers = [node.trainer(root, rank, 2, config=config_with_traces(node)) for rank in range(2)]
    before = time.time()
    traced_save(trainers, 7)
    (path,) = eventually("the trace of the save", lambda: written(root))
    assert path.name.startswith("iter_0000007-")
    last = [("rank 0", "result reported"), ("rank 1", "result reported")]
    events = eventually(
        "the results of both ranks", lambda: (seen := phases(path)).keys() >= set(last) and seen
    )
    for rank in ("rank 0", "rank 1"):
        for name in ("plan", WAIT, "persist", "digest", "write", "fdatasync"):
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
    for name in ("commit record", "read records", "merge", "manifest", "tracker"):
        assert len(events["agent", name]) == 1, name


def test_removed_traces_are_forgotten(tmp_path: Path) -> None:
    traces = Traces(str(tmp_path), Trace(directory=TRACES, keep=2))
    for number in range(6):
        save_id = new_save_id()
        traces.add(number, save_id, 0, [Span("copy", "MainThread", 0.0, 0.0)])
        traces.write(save_id)
    assert len(list((tmp_path / TRACES).iterdir())) == 2
    assert len(traces._known) <= 3


def test_jobs_that_share_a_trace_directory_keep_their_own_traces(
    node: Node, root: Path, tmp_path: Path
) -> None:
    shared = msgspec.structs.replace(
        node.config(), trace=Trace(directory=str(tmp_path / "shared"), keep=1)
    )
    jobs = [node.trainer(tmp_path / name, config=shared) for name in ("one", "two")]
    (tmp_path / "shared").mkdir()
    link = tmp_path / "shared" / f"iter_0000001-{new_save_id()}-rank_00000.trace.json"
    link.symlink_to("nowhere")
    for iteration in (1, 2, 3):
        for trainer in jobs:
            traced_save([trainer], iteration)

    def kept() -> list[str]:
        return sorted(path.name.partition("-")[0] for path in (tmp_path / "shared").glob("*.json"))

    eventually(
        "the removal of the oldest trace of each job",
        lambda: kept() == ["iter_0000001", "iter_0000003", "iter_0000003"],
    )
    assert link.is_symlink()


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


def test_a_recorder_counts_blocked_time_once() -> None:
    recorder = Recorder()
    recorder.spans += [
        Span(EARLY, "MainThread", 0.0, 1.0),
        Span(WAIT, "MainThread", 1.0, 2.0),
        Span(SAVE, "MainThread", 0.0, 4.0),
        Span(WAIT, "MainThread", 9.0, 0.5),
    ]
    recorder.seconds[SAVE] = 4.0
    assert recorder.blocked_s == 4.5


def test_waits_of_other_threads_do_not_count_as_blocked_time() -> None:
    """The thread that searches for another agent also waits for copies."""
    recorder = Recorder()
    with recorder.phase(SAVE):
        pass
    saved_s = recorder.blocked_s

    def wait() -> None:
        with recorder.phase(WAIT):
            pass

    replacing = threading.Thread(target=wait, name="flashckpt-replace")
    replacing.start()
    replacing.join()
    assert [span.name for span in recorder.spans] == [SAVE, WAIT]
    assert recorder.blocked_s == saved_s
    wait()
    assert recorder.blocked_s == saved_s + recorder.spans[-1].seconds


def test_the_measured_wait_of_the_training_loop_is_the_blocked_time() -> None:
    recorder = Recorder(in_loop=True)
    recorder.spans += [
        Span(EARLY, "MainThread", 0.0, 1.0),
        Span(SAVE, "MainThread", 0.0, 4.0),
        Span(WAIT, "MainThread", 5.0, 2.0),
        Span(WAIT, "MainThread", 9.0, 0.5),
    ]
    recorder.seconds[SAVE] = 4.0
    recorder.seen_by_loop(-1.0, 8.0)
    assert recorder.blocked_s == 8.5
    cost = recorder.staged_cost(20.0, "computed", blocking=False)
    assert (cost.blocked_s, cost.staged_s) == (8.0, 20.0)


def test_chunks_of_a_large_shard_are_counted_but_not_listed() -> None:
    recorder = Recorder()
    with recorder.recording():
        for _ in range(1000):
            with phase("write"):
                pass
    assert len(recorder.spans) < 300
    assert recorder.seconds["write"] > sum(span.seconds for span in recorder.spans)


def test_spans_are_sent_once_and_those_of_forgotten_saves_are_dropped() -> None:
    traces = OpenTraces()
    recorder = Recorder()
    traces.begin("a", recorder)
    with recorder.phase("one"):
        pass
    assert traces.unsent() == {}, "an agent drops spans of a save before its staged message"
    assert [span.name for span in recorder.first_sent()] == ["one"]
    with recorder.phase("two"):
        pass
    assert [span.name for span in traces.unsent()["a"]] == ["two"]
    assert traces.unsent() == {}
    for n in range(100):
        traces.begin(str(n), Recorder())
    assert traces.end("a") is None
    assert traces.end("99") is not None
