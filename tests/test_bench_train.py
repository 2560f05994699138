"""`python -m benchmarks train`: its arithmetic, the runs that it refuses, and its cleanup."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.train import chart, figures, report, sizes, study
from benchmarks.train.job import JobError, Megatron
from benchmarks.train.measure import RESUMED_STEPS, Measured, Restart, Session
from benchmarks.train.series import Series
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


def test_a_schedule_ends_with_a_save_off_its_interval() -> None:
    assert SCHEDULE.saved_at == [5, 10, 15, 20]
    assert SCHEDULE.iterations == 24
    assert SCHEDULE.resumed_from == 15


@pytest.mark.parametrize("size", [*sizes.SIZES.values(), *sizes.GPU_SIZES.values()])
def test_a_job_saves_once_after_a_restart(size: sizes.Size) -> None:
    """Otherwise memory may hold a newer save than the one that was waited for (seen on a GPU)."""
    schedule = size.schedule
    every = schedule.saved_after(schedule.resumed_from)
    assert schedule.resumed_from < every <= schedule.iterations - RESUMED_STEPS < 2 * every


def test_training_lost_per_save_leaves_out_the_first_save_and_the_last() -> None:
    run = run_of([5, 10, 15, 20], exit_s=4.0)
    assert figures.lost_per_save(SCHEDULE, run, run_of()) == pytest.approx(LATER_S)
    assert figures.first_save_step_s(SCHEDULE, run) == pytest.approx(FIRST_S + STEP_S)
    assert figures.lost_in_all(run, run_of()) == pytest.approx(FIRST_S + 3 * LATER_S + 3.0)
    late = {iteration: at + 6.0 for iteration, at in run.ended_at.items()}
    assert figures.lost_in_all(dataclasses.replace(run, ended_at=late), run_of()) == pytest.approx(
        FIRST_S + 3 * LATER_S + 9.0
    ), "a slower start counts as lost"
    assert figures.usual_step_s(run_of()) == pytest.approx(STEP_S)


def test_blocked_time_is_the_median_of_later_saves() -> None:
    def blocked(saved: list[int]) -> float | None:
        return figures.figures_of(SCHEDULE, run_of(saved), run_of())["blocked_s"]

    assert blocked([5, 10, 15, 20]) == BLOCKED_S
    assert blocked([5]) is None, "the first save counts"


def test_a_save_is_durable_after_the_tracker_and_the_fsync_that_the_system_omits() -> None:
    run = run_of([5, 10, 15, 20])
    expected = BLOCKED_S + DURABLE_S + OWED_S
    assert figures.figures_of(SCHEDULE, run, run_of())["durable_s"] == pytest.approx(expected)
    assert figures.figures_of(SCHEDULE, run_of([5]), run_of())["durable_s"] is None


def test_skipped_saves_do_not_make_the_others_cheaper() -> None:
    run = run_of([5, 10, 20])
    assert figures.lost_per_save(SCHEDULE, run, run_of()) == pytest.approx(LATER_S)
    assert figures.lost_per_save(SCHEDULE, run_of([5]), run_of()) is None


def test_slower_steps_during_a_save_count_as_lost_time() -> None:
    run = run_of([5, 10, 15, 20], slower=0.3)
    expected = LATER_S + 14 * 0.3 / 3
    assert figures.lost_per_save(SCHEDULE, run, run_of()) == pytest.approx(expected)


def test_figures_are_medians_over_rounds_with_minimum_and_maximum() -> None:
    rounds = [{"exit_s": value, "gb": None} for value in (3.0, 1.0, 2.5)]
    assert figures.spreads(rounds) == {"exit_s": {"median": 2.5, "least": 1.0, "most": 3.0}}


def test_a_run_with_other_losses_is_rejected() -> None:
    run = run_of([5, 10, 15, 20])
    assert figures.objections(SCHEDULE, run, run_of()) == []
    run.losses[7] = ["0:7", "1:7.5"]
    (reason,) = figures.objections(SCHEDULE, run, run_of())
    assert "trained otherwise than without saves from iteration 7 on" in reason
    del run.losses[7]
    assert figures.objections(SCHEDULE, run, run_of()) == [reason]


@pytest.mark.parametrize("losses", [{16: ["0:16", "1:9"], 17: ["0:17", "1:17"]}, {}], ids=str)
def test_a_checkpoint_that_does_not_resume_the_run_is_rejected(losses: dict) -> None:
    run, baseline = run_of([5, 10, 15, 20]), run_of()
    good = {iteration: baseline.losses[iteration] for iteration in (16, 17)}
    run.restarts["storage"] = Restart(15, 1.0, 2.0, good)
    assert figures.objections(SCHEDULE, run, baseline) == []
    run.restarts["memory"] = Restart(15, 1.0, 2.0, losses)
    (reason,) = figures.objections(SCHEDULE, run, baseline)
    assert reason == "resumed from memory with another loss in iteration 16"


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


def series_of(session: FakeSession, rounds: int) -> Series:
    all_systems = [NONE, OURS, OTHER]
    megatron = Megatron(Path(), (), {}, Path())
    series = Series(all_systems, {"installed": megatron}, SCHEDULE)
    for number in range(rounds):
        series.round(session, number)
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


def test_a_system_with_other_losses_has_no_figures_for_that_round() -> None:
    def measured(system: System) -> Measured:
        run = saving(system)
        if system is OURS:
            run.losses[24] = ["0:nan"]
        return run

    series = series_of(FakeSession(measured), 1)
    (error,) = series.errors
    assert "ours, round 1: no result: trained otherwise" in error
    ours = series.figures()["systems"]["flashckpt"]
    assert (ours["rounds"], ours["figures"]) == ([], {})


def test_skipped_saves_are_reported() -> None:
    def measured(system: System) -> Measured:
        run = run_of([5, 10, 20]) if system is OTHER else saving(system)
        return dataclasses.replace(run, saved=run.saved[:-1]) if system is OURS else run

    series = series_of(FakeSession(measured), 1)
    assert series.errors == [
        "ours, round 1: left out the saves of iterations 24",
        "another, round 1: left out the saves of iterations 15",
    ]


# ---------------------------------------------------------------------- output


@pytest.fixture
def results() -> dict:
    """Return the results of a run."""
    series = series_of(FakeSession(saving), 3)
    machine = {"cpu": "a CPU", "cores": 2, "memory_gib": 4.0, "file_system": "ext4", "kernel": "6"}
    return {
        "ranks": 2,
        "rounds": 3,
        "started": "today",
        "seconds": 600,
        "schedule": {"interval": 5, "saves": 4},
        "machine": {**machine, "versions": {"torch": "2"}},
        "left_out": {"DLRover": "no clone"},
        **series.figures(),
    }


def test_a_chart_shows_the_measured_figures(results: dict, tmp_path: Path) -> None:
    path = tmp_path / "train.png"
    chart.draw_figures(["a line", report.table_of(results), results], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    path.unlink()
    chart.draw_figures([{**results, "systems": {}}], path)
    assert not path.exists(), "a chart without data is drawn"


def test_the_table_of_a_document_is_made_from_the_json_file(
    results: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.json"
    file.write_text(json.dumps(["a line", results]))
    before = file.stat().st_mtime_ns
    parser = argparse.ArgumentParser()
    study.STUDY.add_to(parser.add_subparsers())
    options = parser.parse_args(["train", "--markdown", str(file)])
    printed = io.StringIO()
    options.command(Console(file=printed, soft_wrap=True), options)
    lines = printed.getvalue().splitlines()
    assert lines[0].startswith("|  | blocked per save | lost per save | first save's step |")
    (ours,) = [line for line in lines if line.startswith("| ours |")]
    assert ours.split(" | ")[1:4] == ["0.30", "0.50", "12.00"]
    assert "| no saves | - | - | 2.00 |" in printed.getvalue()
    assert "a CPU, 2 cores" in printed.getvalue()
    assert "DLRover was left out: no clone." in printed.getvalue()
    assert file.stat().st_mtime_ns == before
    (tmp_path / "other.json").write_text('["a line"]')
    with pytest.raises(SystemExit, match="not the figures of"):
        report.read_figures(tmp_path / "other.json")


#: Published runs.
PUBLISHED = sorted((REPO / "benchmarks/results").glob("train*.json"))
#: Documents with their tables.
DOCUMENTS = ("README.md", "benchmarks/README.md", "docs/understanding/benchmarks.md")
#: Table in a document that `python -m benchmarks train --markdown FILE` printed.
GENERATED = re.compile(
    r"<!-- python -m benchmarks train --markdown(?: (\S+))? -->\n(.*?)\n<!-- end -->",
    re.DOTALL,
)


def without_generated_tables(text: str) -> str:
    return GENERATED.sub("", text)


def test_generated_tables_are_those_of_the_published_files() -> None:
    whole = set()
    for document in DOCUMENTS:
        for file, table in GENERATED.findall((REPO / document).read_text()):
            path = REPO / (file or "benchmarks/results/train.json")
            assert table == report.document(report.read_figures(path)), document
            whole.add((document, path))
            assert path.with_suffix(".png").exists()
    assert whole >= {("benchmarks/README.md", path) for path in PUBLISHED}


@pytest.mark.parametrize("name", ["train-100mb-s", "train-100mb-s-replicated"])
def test_the_document_of_slow_storage_shows_the_published_figures(name: str) -> None:
    published = report.read_figures(REPO / f"benchmarks/results/{name}.json")[0]
    shown = ("blocked_s", "first_save_step_s", "storage_load_s", "memory_load_s")
    lines = (REPO / "docs/understanding/benchmarks.md").read_text().splitlines()
    for key in ("flashckpt", "torch", "dlrover"):
        system = published["systems"][key]
        values = [system["figures"].get(figure) for figure in shown]
        cells = [f"{value['median']:.2f}" if value else "-" for value in values]
        row = f"| {' | '.join([system['label'], *cells])} |"
        assert any(line.startswith(row) for line in lines)


def test_the_readme_has_the_published_figures_of_slow_storage() -> None:
    published = report.read_figures(REPO / "benchmarks/results/train-100mb-s.json")[0]
    ours, torch, dlrover = (
        {name: spread["median"] for name, spread in published["systems"][key]["figures"].items()}
        for key in ("flashckpt", "torch", "dlrover")
    )
    text = " ".join((REPO / "README.md").read_text().split())
    assert (
        f"a save blocked for {ours['blocked_s']:.2f} s; Megatron's `torch` for "
        f"{torch['blocked_s']:.2f}, DLRover for {dlrover['blocked_s']:.2f}. A restart took "
        f"{ours['memory_restart_s']:.0f} s from memory, the others "
        f"{torch['storage_restart_s']:.0f} and {dlrover['storage_restart_s']:.0f} from storage."
    ) in text
    page = (REPO / "docs/understanding/benchmarks.md").read_text()
    assert f"(load {published['load_before']:.1f})" in page


@pytest.mark.parametrize("document", ["README.md", "docs/understanding/benchmarks.md"])
def test_a_document_shows_the_published_medians(document: str) -> None:
    """Compares tables of `results/train.json` in the document, whatever columns they show.

    README may show the table of a GPU in its place, which another test compares.
    """
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
    for line in without_generated_tables((REPO / document).read_text()).splitlines():
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
    replaced = document == "README.md" and "train-gpu.json" in (REPO / document).read_text()
    assert replaced or compared > 20
