"""Tests of `scripts/gpu_check` without a GPU, and of its driver with made-up sections."""

from __future__ import annotations

import functools
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.trainer import eventually, is_alive
from tools.gpu_check.report import Report
from tools.gpu_check.sections import SECTIONS, megatron

ROOT = Path(__file__).parents[3]

LIST = """\
from tools.gpu_check.sections import Section

SECTIONS = []
"""


def write_section(
    package: Path,
    letter: str,
    body: str,
    *,
    seconds: float = 60.0,
    gpus: int = 0,
) -> None:
    """Add a section to a package; make the package if it does not exist."""
    package.mkdir(exist_ok=True)
    listed = package / "__init__.py"
    lines = listed.read_text() if listed.exists() else LIST
    fields = f"'section_{letter}', '{letter}', 'made up', {seconds}, {gpus}, False, True"
    listed.write_text(f"{lines}SECTIONS.append(Section({fields}))\n")
    (package / f"section_{letter}.py").write_text(f"def run(report):\n    {body}\n")


class DriverResult(NamedTuple):
    """Result of a run of the driver."""

    status: int
    output: str
    document: dict[str, Any]

    @property
    def lines(self) -> dict[str, list[dict[str, Any]]]:
        """Lines of the report without their section, by section."""
        return {
            section["section"]: [{**line, "section": None} for line in section["lines"]]
            for section in self.document["sections"]
        }


def gpu_check(file: Path, *arguments: str, path: str = "") -> DriverResult:
    ended = subprocess.run(
        [ROOT / "scripts/gpu_check", "--json", file, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert file.exists(), ended.stdout
    return DriverResult(ended.returncode, ended.stdout, json.loads(file.read_text()))


def run_made_up(package: Path, *arguments: str) -> DriverResult:
    """Run the sections of a made-up package."""
    arguments = ("--package", package.name, *arguments)
    return gpu_check(package.parent / "out.json", *arguments, path=str(package.parent))


#: A section with one child in its own session, and one in another session, like an agent.
WITH_CHILDREN = """
    import os, pathlib, signal, subprocess, sys
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    children = [subprocess.Popen(command, start_new_session=own) for own in (False, True)]
    pids = [os.getpid(), *(child.pid for child in children)]
    pathlib.Path({pids!r}).write_text(" ".join(map(str, pids)))
    report.note("first", "kept")
"""
#: A section that has a process forked, and leaves it running.
WITH_FORKED = """
    import os, pathlib
    from tools.gpu_check.forkserver import Process
    where = pathlib.Path({pids!r})
    forked = Process("pause", [], dict(os.environ), where.with_suffix(".out"))
    where.write_text(str(forked.pid))
"""
#: A section that runs later, and finds that process ended.
AFTER_FORKED = """
    import pathlib
    from tests.support.trainer import eventually, is_alive
    pid = int(pathlib.Path({pids!r}).read_text())
    eventually("the end of the forked process", lambda: not is_alive(pid))
"""


class Ended(NamedTuple):
    """Run of sections that end in every possible way, and where their children noted their ids."""

    result: DriverResult
    pids: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    pids = tmp_path_factory.mktemp("pids")
    package = tmp_path_factory.mktemp("sections") / "made_up"
    facts = (
        'report.must("a rule", True, "held"); report.figure("first", 1.0, "s");'
        'report.figure("speed", 52.5, "GB/s", headline=True); report.skip("a part", "no reason")'
    )
    write_section(package, "E", facts)
    write_section(package, "D", 'report.must("a rule", False, "it was 3")')
    write_section(package, "F", 'report.note("first", "kept"); raise ValueError("broken")')
    write_section(package, "R", WITH_CHILDREN.format(pids=str(pids / "left")))
    write_section(package, "L", WITH_FORKED.format(pids=str(pids / "forked")))
    write_section(package, "G", AFTER_FORKED.format(pids=str(pids / "forked")))
    hangs = WITH_CHILDREN.format(pids=str(pids / "hung")) + "    signal.pause()"
    write_section(package, "S", hangs, seconds=6.0)
    write_section(package, "P", "pass", gpus=99)
    write_section(package, "N", "report.note('ran', 'not asked for')")
    (package.parent / "pause.py").write_text(
        "import signal\n\n\ndef main(_):\n    signal.pause()\n"
    )
    return Ended(run_made_up(package, "--only", "S,R,L,G,F,P,D,E"), pids)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the real thing runs on this machine")
def test_every_section_passes_on_a_simulated_gpu(tmp_path: Path) -> None:
    result = gpu_check(tmp_path / "out.json", "--budget", "3000")
    assert result.status == 0, result.output
    assert list(result.lines) == [section.label for section in SECTIONS]
    for section in result.document["sections"]:
        needs_two = section["section"] in ("D1", "T1")
        assert section["verdict"].startswith("not run: needs 2" if needs_two else "ok"), section
    rules = [line["what"] for line in result.lines["M"] if line["ok"]]
    for source in ("memory", "storage"):
        assert f"a restart resumes from {source}, from the newest whole save" in rules
        assert f"restart from {source}: all losses are equal" in rules
        compared = f"restart from {source}: all tensors after iteration"
        assert sum(rule.startswith(compared) for rule in rules) == 2
    assert ", 0 broken\n" in result.output


SHAPE = {"section": None, "ok": None, "value": None, "unit": None, "detail": ""}
KEPT = {**SHAPE, "kind": "note", "what": "first", "detail": "kept"}


def broken(what: str, detail: str) -> dict[str, Any]:
    return {**SHAPE, "kind": "must", "what": what, "ok": False, "detail": detail}


def test_facts_are_written_as_json_and_printed_in_a_table(ended: Ended) -> None:
    result = ended.result
    assert result.lines["E"] == [
        {**SHAPE, "kind": "must", "what": "a rule", "ok": True, "detail": "held"},
        {**SHAPE, "kind": "figure", "what": "first", "value": 1.0, "unit": "s"},
        {**SHAPE, "kind": "headline", "what": "speed", "value": 52.5, "unit": "GB/s"},
        {**SHAPE, "kind": "skip", "what": "a part", "detail": "no reason"},
    ]
    assert "\n| E made up | ok, 1 rules, parts not run | 52.5 GB/s: speed |" in result.output
    assert "\n| E made up: a part | no reason |\n" in result.output
    assert "\n| P made up: all of it | needs 99 GPUs |\n" in result.output
    assert "torch" in result.document["about"]["versions"]


def test_a_broken_rule_or_a_crash_fails_the_check_but_later_sections_still_run(
    ended: Ended,
) -> None:
    result = ended.result
    assert result.status == 1
    assert set(result.lines) == set("EDFRSPLG")
    assert "\nFAILED D: a rule  it was 3\n" in result.output
    assert result.lines["F"] == [KEPT, broken("runs to its end", "exit status 1")]
    assert "| ValueError: broken\n" in result.output
    assert result.output.endswith("4 rules checked, 3 broken\n")


def test_processes_of_a_section_that_hangs_or_leaves_them_running_are_killed(
    ended: Ended,
) -> None:
    lines = ended.result.lines
    assert lines["S"] == [KEPT, broken("ends within 6 s", "killed, with all its children")]
    what = "processes that it left running and that were killed"
    assert lines["R"][1:] == [{**SHAPE, "kind": "note", "what": what, "detail": "2"}]
    assert lines["L"] == lines["G"] == []
    for name in ("hung", "left"):
        assert_ended(ended.pids / name)


def assert_ended(file: Path) -> None:
    for pid in map(int, file.read_text().split()):
        eventually(f"the end of {pid}", lambda pid=pid: not is_alive(pid))


def test_a_section_without_time_left_in_the_budget_is_listed(tmp_path: Path) -> None:
    package = tmp_path / "made_up"
    write_section(package, "T", "import signal; signal.pause()", seconds=600.0)
    write_section(package, "D", "pass")
    result = run_made_up(package, "--only", "D,T", "--budget", "12")
    assert result.status == 0, "no rule was broken"
    (line,) = result.lines["T"]
    assert line["detail"].startswith("no time left: killed after")
    assert "\n| D made up: all of it | no time left |\n" in result.output


def test_an_interrupt_ends_all_processes(tmp_path: Path) -> None:
    pids = tmp_path / "hung"
    hangs = WITH_CHILDREN.format(pids=str(pids)) + "    signal.pause()"
    write_section(tmp_path / "made_up", "E", hangs)
    driver = subprocess.Popen(
        [sys.executable, "-m", "tools.gpu_check", "--package", "made_up"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A suite in the background of a shell ignores the signal, and so would the driver.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    eventually("its children", lambda: pids.exists() and len(pids.read_text().split()) == 3)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(60.0) != 0
    assert_ended(pids)


def test_blocks_alternate_and_their_last_iteration_is_not_saved() -> None:
    assert megatron.blocks(6, 1, ["a variant"]) == [
        megatron.Block("no save", 6, 16, ()),
        megatron.Block("one save", 16, 26, (16,)),
        megatron.Block("a variant", 26, 36, (26,)),
        megatron.Block("a save after every step", 36, 46, tuple(range(36, 45))),
    ]


@pytest.mark.parametrize("drift_s", [0.0, 0.07])
def test_a_drift_between_jobs_is_not_booked_as_a_loss_of_saves(drift_s: float) -> None:
    turns = megatron.blocks(megatron._FIRST + megatron._LENGTH, 3)
    saved = {megatron._FIRST, *(iteration for block in turns for iteration in block.saved)}

    def job(steps: dict[int, float]) -> Any:
        return SimpleNamespace(steps=lambda: steps, log=lambda: "")

    numbers = range(1, turns[-1].end)
    noise = {n: 0.01 * (n % 2) for n in numbers}
    steps = {n: 0.3 + drift_s + noise[n] + 0.25 * (n in saved) for n in numbers}
    stream = io.StringIO()
    without = job({n: 0.3 + noise[n] for n in numbers})
    megatron.report_lost(Report("M", stream), without, job(steps), turns)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    (headline,) = [line for line in lines if line["kind"] == "headline"]
    assert headline["value"] == pytest.approx(250.0)
    # 30 steps with 3 saves against 30 without, which deviate by 5 ms.
    assert headline["detail"].startswith("standard error 13 ms; ")
