"""`scripts/bench save --quick` measures and reports; the measured figures are not tested."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import resources, study
from benchmarks.compare import report, targets
from benchmarks.studies import redundancy, writers
from tests.support.processes import run_within
from tests.support.trainer import eventually, is_alive

REPO = Path(__file__).resolve().parents[1]
MEASURED = (
    *("blocked_s", "settled_s", "complete_s", "owed_s", "durable_s", "memcpy_s", "cpu_s"),
    *("cold_s", "warm_s"),
)


@pytest.mark.parametrize(
    ("figures", "page", "count"),
    [
        ("redundancy", "benchmarks/README.md", 11),
        ("objects", "docs/understanding/benchmarks.md", 8),
    ],
)
def test_a_page_shows_the_published_figures(figures: str, page: str, count: int) -> None:
    published = json.loads((REPO / f"benchmarks/results/{figures}.json").read_text())
    rows = [f"| {' | '.join(row)} |" for table in published for row in study.Table(**table).cells()]
    assert len(rows) == count
    assert not {*rows} - {*(REPO / page).read_text().splitlines()}


def test_a_file_that_an_agent_has_replaced_meanwhile_ends_no_study(tmp_path: Path) -> None:
    stays = tmp_path / "stays"
    stays.write_bytes(b"1")
    resources.drop_from_cache([tmp_path / ".alive.12345678.tmp", stays])


def test_a_late_study_leaves_no_rank_behind(tmp_path: Path) -> None:
    """The ranks of torchrun have sessions of their own."""
    pid = tmp_path / "pid"
    script = f"setsid sh -c 'echo $$ > {pid}; exec sleep 1000' & wait"
    with pytest.raises(subprocess.TimeoutExpired):
        run_within(1.0, ["sh", "-c", script])
    rank = int(pid.read_text())
    eventually("the end of the rank", lambda: not is_alive(rank))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    """Run `--quick` with a state of 2 MiB on one rank; return its output and its JSON figures."""
    where = tmp_path_factory.mktemp("bench")
    size = "--quick --mib 2 --pieces 100 --ranks 1 --saves 1 --first-saves 2 --step-ms 5".split()
    paths = ["--dir", str(where), "--json", str(where / "figures.json")]
    done = run_within(
        240,
        [sys.executable, "-m", "benchmarks", "save", *size, *paths],
        env={**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": str(where)},
        cwd=REPO,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((where / "figures.json").read_text())
    return done.stdout, next(result for result in results if "systems" in result)


def test_ours_and_torch_save_are_measured_without_an_error(quick: tuple[str, dict]) -> None:
    _, figures = quick
    for name in ("flashckpt", "torch.save"):
        measured = figures["systems"][name]
        assert measured["errors"] == []
        assert set(MEASURED) <= measured.keys()
        assert all(len(measured[key]) == 1 and measured[key][0] >= 0 for key in MEASURED)
        assert measured["first"].keys() >= {"blocked_s", "durable_s"}
        (other,) = measured["more_jobs"]
        assert other["first"]["blocked_s"] != measured["first"]["blocked_s"]
        assert len(other["blocked_s"]) == 3
        assert measured["disk_nbytes"] >= figures["rank_nbytes"] > 0
    ours = figures["systems"]["flashckpt"]
    assert ours["busy"]["said"] == ["saved"] * 3
    assert ours["busy"]["latest"] == 3
    assert {"training_lost_s", "memory_s", "agent_nbytes", "agent_start_s"} <= ours.keys()
    assert {
        "raw_direct_s",
        "raw_buffered_s",
        "read_cold_s",
        "read_warm_s",
        "memcpy_by_tensor_s",
    } <= figures["limits"].keys()


def saves(first_ms: float, *later_ms: float) -> dict:
    """Return the part of one job's results that concerns the time for which saves block."""
    blocked = {"blocked_s": [ms / 1000 for ms in later_ms]}
    return {"first": {"blocked_s": first_ms / 1000, "phases": {}}, **blocked, "errors": []}


def figures(systems: dict[str, dict]) -> dict:
    """Return the results of a run that a report needs."""
    return {
        "size": {"ranks": 1, "saves": 2, "train_saves": 0, "loads": 0},
        "seconds": 1.0,
        "rank_nbytes": 10**6,
        "pieces": 1,
        "labels": {},
        "limits": {},
        "systems": systems,
    }


def test_a_first_save_is_compared_with_later_ones_of_its_own_job() -> None:
    """The report shows the median of the jobs' ratios 2, 1 and 4, not a ratio over all saves."""
    ours = saves(10, 4, 5, 6)
    ours["more_jobs"] = [saves(40, 38, 40, 90), saves(12, 3, 3, 3)]
    row = report.summary(figures({"flashckpt": ours}), "flashckpt")
    assert row["first_blocked_s"] == pytest.approx(0.012)
    assert row["first_over_later"] == pytest.approx(2.0)
    assert row["blocked_s"] == pytest.approx(0.005), "later saves are those of the main job"
    assert reached(figures({"flashckpt": ours}), "first save against") == ("2 x", "missed")


def reached(results: dict, what: str) -> tuple[str | None, str]:
    """Return the figure and the verdict of a target."""
    (table,) = targets.targets(results)
    ((_, _, figure, verdict, _),) = [row for row in table.rows if row[0].startswith(what)]
    return figure, verdict


def test_the_target_of_a_durable_save_is_memcpy_plus_raw_write() -> None:
    ours = {"errors": [], "durable_s": [0.4, 0.3, 0.5], "memcpy_s": [0.03, 0.05, 0.09]}
    results = figures({"flashckpt": ours})
    assert reached(results, "durable, ") == (None, "not measured")
    results["limits"] = {"raw_direct_s": [0.2, 0.9, 0.1], "raw_buffered_s": [0.7]}
    assert reached(results, "durable, ") == (f"{0.4 / (0.05 + 0.2):.4g} x", "missed")


def test_a_job_in_which_a_system_failed_does_not_count() -> None:
    ours = saves(10, 5, 5)
    failed_at_start, failed_after_the_first = {}, saves(20)
    ours["more_jobs"] = [failed_at_start, failed_after_the_first]
    assert report.first_saves(ours) == ([0.010, 0.020], [pytest.approx(2.0)])
    none = report.summary(figures({"flashckpt": {"errors": ["start: no"]}}), "flashckpt")
    assert none["first_blocked_s"] is none["first_over_later"] is None


def carry_out(made: study.Study, printed: io.StringIO, *arguments: str) -> None:
    """Run a study through its subcommand."""
    parser = argparse.ArgumentParser()
    made.add_to(parser.add_subparsers())
    options = parser.parse_args([made.name, *arguments])
    options.command(Console(file=printed, width=140), options)


def test_a_study_that_ends_early_keeps_its_results_and_no_files(tmp_path: Path) -> None:
    table = study.Table("times", {"": "", "s": ".2f", "ratio": ".1f"}, [("a", 1.5, None)])

    def measure(options: argparse.Namespace, directory: Path) -> Iterator[study.Result]:
        (directory / "shard").touch()
        yield "a line [/of] it"
        yield table
        yield {"every": [options.rounds]}
        raise SystemExit(1)

    made = study.Study("made", "", lambda parser: parser.add_argument("--rounds"), measure)
    figures, chart, scratch = (tmp_path / name for name in ("it.json", "it.png", "scratch"))
    scratch.mkdir()
    files = ["--dir", str(scratch), "--json", str(figures), "--png", str(chart)]
    printed = io.StringIO()
    with pytest.raises(SystemExit):
        carry_out(made, printed, "--rounds", "7", *files)
    lines = [line.split() for line in printed.getvalue().splitlines()]
    assert lines == [["a", "line", "[/of]", "it"], ["times"], ["s", "ratio"], ["a", "1.50", "-"]]
    line, as_json, more = json.loads(figures.read_text())
    assert (line, more) == ("a line [/of] it", {"every": ["7"]})
    assert as_json["rows"] == [["a", 1.5, None]]
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert not list(scratch.iterdir())


def test_writers_are_compared_on_every_kind_of_storage() -> None:
    printed = io.StringIO()
    carry_out(writers.STUDY, printed, "--mib", "1", "--rounds", "1")
    rows = printed.getvalue().splitlines()[2:]
    assert len(rows) == len(writers.KINDS)
    for kind, row in zip(writers.KINDS, rows, strict=True):
        assert kind.name in row
        assert all(float(seconds) > 0 for seconds in row.split()[-len(writers.POLICIES) :])


def test_redundancy_is_measured_by_scheme_and_number_of_nodes() -> None:
    """Parity needs at least three nodes; every scheme costs the agents more CPU than none."""
    printed = io.StringIO()
    carry_out(redundancy.STUDY, printed, "--mib", "8", "--rounds", "1", "--nodes", "2", "3")
    rows = [row.split() for row in printed.getvalue().splitlines()[-5:]]  # the title may fold
    assert [tuple(row[:2]) for row in rows] == [
        *(("2", "none"), ("2", "copy")),
        *(("3", "none"), ("3", "copy"), ("3", "xor")),
    ]
    assert all(float(row[2]) > 0 for row in rows)
    cpu = {tuple(row[:2]): float(row[3]) for row in rows}
    assert cpu["2", "none"] < cpu["2", "copy"]
    assert cpu["3", "none"] < min(cpu["3", "copy"], cpu["3", "xor"])


def test_every_write_policy_covers_each_element_once() -> None:
    for policy in writers.POLICIES:
        parts = sorted(
            writers.part_of(replica, 1001, policy) for replica in range(writers.REPLICAS)
        )
        written = [part for part in parts if part[0] < part[1]]
        assert [start for start, _ in written] == [0, *(end for _, end in written[:-1])]
        assert written[-1][1] == 1001
