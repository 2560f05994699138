"""`python -m benchmarks train`: its arithmetic, the runs that it refuses, and its cleanup."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.train import chart, figures, gpu, report, sizes, study
from benchmarks.train.job import JobError, Megatron
from benchmarks.train.measure import RESUMED_STEPS, Measured, Restart, Session
from benchmarks.train.progress import Progress
from benchmarks.train.series import Budget, Series
from benchmarks.train.sizes import Schedule
from benchmarks.train.systems import System

REPO = Path(__file__).resolve().parents[1]
SCHEDULE = Schedule(interval=5, saves=4)
FIRST_S, LATER_S, STEP_S, BLOCKED_S, DURABLE_S, OWED_S = 10.0, 0.5, 2.0, 0.3, 4.0, 0.25


def run_of(saved: list[int] | None = None, *, slower: float = 0.0, exit_s: float = 1.0) -> Measured:
    """Return a run with steps of 2 s, whose first save costs 10 s and later ones 0.5 s."""
    at, ended_at = 100.0, {}
    for iteration in range(1, SCHEDULE.iterations + 1):
        if iteration - 1 in (saved or []):
            at += FIRST_S if iteration - 1 == SCHEDULE.interval else LATER_S
        at += STEP_S + slower
        ended_at[iteration] = at
    losses = {iteration: [f"0:{iteration}", f"1:{iteration}"] for iteration in ended_at}
    made = saved or []
    blocked_s = [FIRST_S if iteration == SCHEDULE.interval else BLOCKED_S for iteration in made]
    return Measured(
        ended_at,
        exit_s,
        losses,
        owed_s=OWED_S,
        saved=[*made, SCHEDULE.iterations],
        blocked_s=blocked_s,
        durable_s=[seconds + DURABLE_S for seconds in blocked_s],
    )


@pytest.mark.parametrize("size", [*sizes.SIZES.values(), *sizes.GPU_SIZES.values()])
def test_a_job_saves_once_after_a_restart(size: sizes.Size) -> None:
    """Otherwise memory may hold a newer save than the one that was waited for (seen on a GPU)."""
    schedule = size.schedule
    every = schedule.saved_after(schedule.resumed_from)
    assert schedule.resumed_from < every <= schedule.iterations - RESUMED_STEPS < 2 * every


def test_the_figures_of_a_run_are_compared_with_a_run_without_saves() -> None:
    """A save is durable after the tracker, and the fsync that the system omits."""
    assert SCHEDULE.saved_at == [5, 10, 15, 20]
    assert SCHEDULE.iterations == 24, "the last save is off the interval"
    run = run_of([5, 10, 15, 20], exit_s=4.0)
    expected = {
        "lost_per_save_s": LATER_S,
        "first_save_step_s": FIRST_S + STEP_S,
        "lost_in_all_s": FIRST_S + 3 * LATER_S + 3.0,
        "exit_s": 4.0,
        "blocked_s": BLOCKED_S,
        "durable_s": BLOCKED_S + DURABLE_S + OWED_S,
    }
    result = figures.figures_of(SCHEDULE, run, run_of())
    assert {name: result[name] for name in expected} == pytest.approx(expected)
    late = {iteration: at + 6.0 for iteration, at in run.ended_at.items()}
    started_later = dataclasses.replace(run, ended_at=late)
    expected_s = expected["lost_in_all_s"] + 6.0
    assert figures.lost_in_all(started_later, run_of()) == pytest.approx(expected_s)
    assert figures.usual_step_s(run_of()) == pytest.approx(STEP_S)
    only_first = figures.figures_of(SCHEDULE, run_of([5]), run_of())
    later = ("blocked_s", "durable_s", "lost_per_save_s")
    assert [only_first[name] for name in later] == [None] * 3, "the first save counts"


def test_neither_skipped_saves_nor_slow_steps_make_a_save_cheaper() -> None:
    assert figures.lost_per_save(SCHEDULE, run_of([5, 10, 20]), run_of()) == pytest.approx(LATER_S)
    slower = figures.lost_per_save(SCHEDULE, run_of([5, 10, 15, 20], slower=0.3), run_of())
    assert slower == pytest.approx(LATER_S + 14 * 0.3 / 3)


def test_figures_are_medians_over_rounds_with_minimum_and_maximum() -> None:
    spreads = figures.spreads([{"exit_s": value, "gb": None} for value in (3.0, 1.0, 2.5)])
    assert {name: str(spread) for name, spread in spreads.items()} == {
        "exit_s": "2.50 (1.00 to 3.00)"
    }


@pytest.mark.parametrize("losses", [{16: ["0:16", "1:9"], 17: ["0:17", "1:17"]}, {}], ids=str)
def test_a_run_that_trains_or_resumes_with_other_losses_is_rejected(losses: dict) -> None:
    run, baseline = run_of([5, 10, 15, 20]), run_of()
    good = {iteration: baseline.losses[iteration] for iteration in (16, 17)}
    run.restarts["storage"] = Restart(15, 1.0, 2.0, good)
    assert figures.objections(SCHEDULE, run, baseline) == []
    run.restarts["memory"] = Restart(15, 1.0, 2.0, losses)
    run.losses[7] = ["0:7", "1:7.5"]
    trained, resumed = figures.objections(SCHEDULE, run, baseline)
    assert "trained otherwise than without saves from iteration 7 on" in trained
    assert resumed == "resumed from memory with another loss in iteration 16"
    del run.losses[7]
    assert trained in figures.objections(SCHEDULE, run, baseline)


# ---------------------------------------------------------------------- rounds

NONE, OURS, OTHER = (
    System("none", "no saves", saves=False),
    System("flashckpt", "ours"),
    System("other", "another"),
)


class FakeSession(Session):
    """Measures nothing: returns the result of a function."""

    def __init__(self, measured: Callable[[System], Measured]) -> None:
        super().__init__(SCHEDULE, Path(), 1.0, lambda _: None)
        self.order: list[str] = []
        self._measured = measured

    def measure(self, system: System, megatron: Megatron) -> Measured:
        self.order.append(system.name)
        return self._measured(system)


def series_of(session: FakeSession, rounds: int, budget: Budget | None = None) -> Series:
    """Run rounds of all three systems."""
    systems, megatron = [OURS, NONE, OTHER], Megatron(Path(), (), {}, Path())
    series = Series(systems, {"installed": megatron}, SCHEDULE, budget)
    with Progress(rounds * len(systems)) as progress:
        for number in range(rounds):
            session.restarts = number == 0
            series.round(session, number, rounds, progress)
    return series


def saving(system: System) -> Measured:
    return run_of([5, 10, 15, 20] if system.saves else None)


def test_a_failed_system_is_named_and_the_others_continue() -> None:
    def measured(system: System) -> Measured:
        if system is OTHER:
            raise JobError("ended with 1\n  RuntimeError: no space")
        return saving(system)

    session = FakeSession(measured)
    series = series_of(session, 2)
    (error,) = series.errors
    assert error.startswith("another, round 1: ended with 1\n  RuntimeError: no space; left out")
    assert session.order.count("other") == 1, "the failed system is tried again"
    systems_ = series.figures()["systems"]
    assert len(systems_["flashckpt"]["rounds"]) == 2
    assert systems_["other"]["figures"] == {}


def test_other_losses_and_skipped_saves_are_reported() -> None:
    def measured(system: System) -> Measured:
        run = run_of([5, 10, 20]) if system is OTHER else saving(system)
        if system is OURS:
            run.losses[24] = ["0:nan"]
        return run

    series = series_of(FakeSession(measured), 1)
    ours, other = series.errors
    assert "ours, round 1: no result: trained otherwise" in ours
    assert other == "another, round 1: left out the saves of iterations 15"
    systems_ = series.figures()["systems"]
    assert (systems_["flashckpt"]["rounds"], systems_["flashckpt"]["figures"]) == ([], {})


def test_a_limited_study_begins_each_round_with_the_run_without_saves() -> None:
    session = FakeSession(saving)
    series = series_of(session, 3, Budget(1000.0, 1.0))
    rounds = [session.order[at : at + 3] for at in (0, 3, 6)]
    assert [order[0] for order in rounds] == ["none"] * 3
    assert len({tuple(order) for order in rounds}) > 1, "the others take turns"
    assert series.most_rounds == 3


def test_a_run_that_would_not_end_in_time_is_left_out() -> None:
    """It is expected to take as long as the last one of its kind."""
    budget = Budget(100.0, 10.0)
    budget.took("a system", 200.0)
    assert (budget.has_time("a system"), budget.has_time("another")) == (False, True)

    def measured(system: System) -> Measured:
        if system is OURS:
            budget.ends_at = time.monotonic()
        return saving(system)

    session = FakeSession(measured)
    series = series_of(session, 2, budget)
    assert session.order == ["none", "flashckpt"]
    systems_ = series.figures()["systems"]
    assert systems_["other"]["failed"] == "not run: no time was left"
    assert systems_["flashckpt"]["failed"] is None
    assert series.errors == []


def test_an_interrupted_round_keeps_its_results() -> None:
    def measured(system: System) -> Measured:
        if system is OTHER:
            raise SystemExit(1)
        return saving(system)

    series = Series([NONE, OURS, OTHER], {"installed": Megatron(Path(), (), {}, Path())}, SCHEDULE)
    with pytest.raises(SystemExit), Progress(3) as progress:
        series.round(FakeSession(measured), 0, 1, progress)
    assert len(series.figures()["systems"]["flashckpt"]["rounds"]) == 1


# ---------------------------------------------------------------------- output


def results_of(measured: Callable[[System], Measured] = saving, **fields: Any) -> dict:
    """Return the results of a study."""
    machine = {"cpu": "a CPU", "cores": 2, "memory_gib": 4.0, "file_system": "ext4", "kernel": "6"}
    return {
        "ranks": 2,
        "rounds": 3,
        "started": "today",
        "seconds": 600,
        "schedule": {"interval": 5, "saves": 4},
        "machine": {**machine, "gpu": "a card, driver 1", "versions": {"torch": "2"}},
        "left_out": {"DLRover": "no clone"},
        **fields,
        **series_of(FakeSession(measured), 3).figures(),
    }


def test_a_chart_shows_the_measured_figures(tmp_path: Path) -> None:
    path, results = tmp_path / "train.png", results_of()
    chart.draw_figures(["a line", report.table_of(results), results], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    path.unlink()
    chart.draw_figures([{**results, "systems": {}}], path)
    assert not path.exists(), "a chart without data is drawn"


def test_the_table_of_a_document_is_made_from_the_json_file(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    file.write_text(json.dumps(["a line", results_of()]))
    parser = argparse.ArgumentParser()
    study.STUDY.add_to(parser.add_subparsers())
    options = parser.parse_args(["train", "--markdown", str(file)])
    printed = io.StringIO()
    options.command(Console(file=printed, soft_wrap=True), options)
    lines = printed.getvalue().splitlines()
    assert lines[0].startswith("|  | blocked per save | lost per save | first save's step |")
    (ours,) = [line for line in lines if line.startswith("| ours |")]
    assert ours.split(" | ")[1:4] == ["0.30", "0.50", "12.00"]
    for part in (
        "| no saves | - | - | 2.00 |",
        "a CPU, 2 cores",
        "DLRover was left out: no clone.",
    ):
        assert part in printed.getvalue()
    (tmp_path / "other.json").write_text('["a line"]')
    with pytest.raises(SystemExit, match="not the figures of"):
        report.read_figures(tmp_path / "other.json")


def test_a_system_that_hangs_is_a_row_and_a_brief_table_leaves_out_its_last_lines() -> None:
    def measured(system: System) -> Measured:
        if system is OTHER:
            raise JobError("took too long: it did not end\n  waiting for process 12")
        return saving(system)

    results = results_of(measured, columns=gpu.COLUMNS, size="0.4b")
    text = report.markdown(results)
    header, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert header.count("|") == len(rows[-1].strip().split("|")) - 1
    assert rows[-1].startswith("| another | took too long: it did not end | - |")
    assert rows[-1].endswith("| 0 |")
    assert text.endswith(
        "another, took too long: it did not end:\n\n```text\nwaiting for process 12\n```"
    )
    brief = report.document([results, results], brief=True)
    assert brief.startswith("|  | lost per save | first save's step | durable | exit | rounds |")
    assert (brief.count("| ours |"), brief.count("waiting for process")) == (1, 0)
    assert report.document([results, results]).count("| ours |") == 2


#: Published runs.
PUBLISHED = sorted((REPO / "benchmarks/results").glob("train*.json"))
#: Documents with their tables.
DOCUMENTS = ("README.md", "benchmarks/README.md", "docs/understanding/benchmarks.md")
#: Table in a document that `python -m benchmarks train --markdown FILE` printed.
GENERATED = re.compile(
    r"<!-- python -m benchmarks train --markdown(?: (\S+))?( --brief)? -->\n(.*?)\n<!-- end -->",
    re.DOTALL,
)


def test_generated_tables_are_those_of_the_published_files() -> None:
    whole = set()
    for document in DOCUMENTS:
        for file, brief, table in GENERATED.findall((REPO / document).read_text()):
            path = REPO / (file or "benchmarks/results/train.json")
            assert table == report.document(report.read_figures(path), brief=bool(brief)), document
            if not brief:
                whole.add((document, path))
            assert path.with_suffix(".png").exists()
    assert whole >= {("benchmarks/README.md", path) for path in PUBLISHED}


def test_the_documents_of_slow_storage_show_the_published_figures() -> None:
    page = (REPO / "docs/understanding/benchmarks.md").read_text()
    readme = " ".join((REPO / "README.md").read_text().split())
    shown = ("blocked_s", "first_save_step_s", "storage_load_s", "memory_load_s")
    for name in ("train-100mb-s-replicated", "train-100mb-s"):
        published = report.read_figures(REPO / f"benchmarks/results/{name}.json")[0]
        medians = {}
        for key in ("flashckpt", "torch", "dlrover"):
            system = published["systems"][key]
            figures_ = {name: spread["median"] for name, spread in system["figures"].items()}
            medians[key] = figures_
            cells = [f"{figures_[name]:.2f}" if name in figures_ else "-" for name in shown]
            assert f"\n| {' | '.join([system['label'], *cells])} |" in page
    ours, torch, dlrover = medians.values()
    assert (
        f"a save blocked for {ours['blocked_s']:.2f} s; Megatron's `torch` for "
        f"{torch['blocked_s']:.2f}, DLRover for {dlrover['blocked_s']:.2f}. A restart took "
        f"{ours['memory_restart_s']:.0f} s from memory, the others "
        f"{torch['storage_restart_s']:.0f} and {dlrover['storage_restart_s']:.0f} from storage."
    ) in readme
    assert f"(load {published['load_before']:.1f})" in page


@pytest.mark.parametrize("document", ["README.md", "docs/understanding/benchmarks.md"])
def test_a_document_shows_the_published_medians(document: str) -> None:
    """Compares tables of `results/train.json` in the document, whatever columns they show."""
    published = report.read_figures(REPO / "benchmarks" / "results" / "train.json")[0]
    medians = {
        system["label"]: {
            figures.LABELS[name]: f"{spread['median']:.2f}"
            for name, spread in system["figures"].items()
        }
        for system in published["systems"].values()
    }
    header: list[str] = []
    compared = 0
    for line in GENERATED.sub("", (REPO / document).read_text()).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if "first save's step" in cells:
            header = cells
        elif header and cells[0] in medians:
            for column, cell in zip(header[1:], cells[1:], strict=True):
                if cell != "-" and column in figures.LABELS.values():
                    assert cell.split(" (")[0] == medians[cells[0]][column], (line, column)
                    compared += 1
        elif not line.startswith("|"):
            header = []
    assert compared > 20
