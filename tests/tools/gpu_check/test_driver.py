"""Tests of `scripts/gpu_check` without a GPU, and of its driver with made-up sections."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.trainer import eventually, is_alive
from tools.gpu_check.discovery import PACKAGE, sections

ROOT = Path(__file__).parents[3]

MADE_UP = """
LETTER = "{letter}"
TITLE = "made up"
SECONDS = {seconds}
GPUS = {gpus}
SIMULATED = {simulated}
MEGATRON = False


def run(report):
    {body}
"""


def write_section(
    package: Path,
    letter: str,
    body: str,
    *,
    seconds: float = 60.0,
    gpus: int = 0,
    simulated: bool = True,
) -> None:
    """Add a section to a package; make the package if it does not exist."""
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    text = MADE_UP.format(letter=letter, seconds=seconds, gpus=gpus, simulated=simulated, body=body)
    (package / f"section_{letter.lower()}.py").write_text(text)


class DriverResult(NamedTuple):
    """Result of a run of the driver."""

    status: int
    output: str
    lines: dict[str, list[dict[str, Any]]]
    """Lines of the report, by section."""


def run_made_up(package: Path, *arguments: str) -> DriverResult:
    """Run the sections of a made-up package."""
    file = package.parent / "lines.jsonl"
    command = ["--package", package.name, "--json", str(file), *arguments]
    ended = gpu_check(*command, PYTHONPATH=str(package.parent))
    lines: dict[str, list[dict[str, Any]]] = {}
    for line in map(json.loads, file.read_text().splitlines()):
        lines.setdefault(line.pop("section"), []).append(line)
    return DriverResult(ended.returncode, ended.stdout, lines)


def gpu_check(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts/gpu_check", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


#: A section with one child in its own session, and one in another session, like an agent.
WITH_CHILDREN = """
    import os, pathlib, signal, subprocess, sys
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    children = [subprocess.Popen(command, start_new_session=own) for own in (False, True)]
    pids = [os.getpid(), *(child.pid for child in children)]
    pathlib.Path({pids!r}).write_text(" ".join(map(str, pids)))
    report.note("first", "kept")
"""


@pytest.fixture(scope="module")
def pids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of files in which sections with children write their process ids."""
    return tmp_path_factory.mktemp("pids")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, pids: Path) -> DriverResult:
    """Run of sections that end in every possible way."""
    package = tmp_path_factory.mktemp("sections") / "made_up"
    facts = (
        'report.must("a rule", True, "held"); report.figure("speed", 52.5, "GB/s");'
        'report.note("name", "value"); report.skip("a part", "no reason")'
    )
    write_section(package, "E", facts)
    write_section(package, "D", 'report.must("a rule", False, "it was 3")')
    write_section(package, "F", 'report.note("first", "kept"); raise ValueError("broken")')
    write_section(package, "R", WITH_CHILDREN.format(pids=str(pids / "left")))
    hangs = WITH_CHILDREN.format(pids=str(pids / "hung")) + "    signal.pause()"
    write_section(package, "S", hangs, seconds=15.0)
    write_section(package, "P", "pass", gpus=99, simulated=False)
    write_section(package, "N", "report.note('ran', 'not asked for')")
    return run_made_up(package, "--only", "S,R,F,P,D,E")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the real thing runs on this machine")
def test_simulated_sections_pass_and_skipped_ones_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "gpu_check.jsonl"
    ended = gpu_check("--budget", "3000", "--json", str(file))
    assert ended.returncode == 0, ended.stdout
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    all_sections = sections(PACKAGE)
    simulated = [listed.label for listed in all_sections if listed.simulated]
    assert set(simulated) >= set("EDFRSTG")
    ran = dict.fromkeys(line["section"] for line in lines)
    assert list(ran) == simulated
    for label in simulated:
        assert any(line["ok"] for line in lines if line["section"] == label), label
    for section in all_sections:
        if not section.simulated:
            why = "needs 2 GPUs" if section.gpus == 2 else "needs a GPU"
            assert f"  {section.label} {section.title}: {why}\n" in ended.stdout
    assert ", 0 broken\n" in ended.stdout


SHAPE = {"ok": None, "value": None, "unit": None, "detail": ""}


def test_facts_are_written_as_json_lines_and_printed_in_a_table(ended: DriverResult) -> None:
    assert ended.lines["E"] == [
        {**SHAPE, "kind": "must", "what": "a rule", "ok": True, "detail": "held"},
        {**SHAPE, "kind": "figure", "what": "speed", "value": 52.5, "unit": "GB/s"},
        {**SHAPE, "kind": "note", "what": "name", "detail": "value"},
        {**SHAPE, "kind": "skip", "what": "a part", "detail": "no reason"},
    ]
    rows = [line.split() for line in ended.output.splitlines()]
    assert ["E", "speed", "52.5", "GB/s", "note"] in rows
    assert ["E", "a", "rule", "MUST", "ok", "held"] in rows
    assert "\n  E made up: a part: no reason\n" in ended.output


def test_a_broken_rule_fails_the_check_but_later_sections_still_run(ended: DriverResult) -> None:
    assert ended.status == 1
    assert list(ended.lines) == ["E", "D", "F", "R", "S"]
    assert "\nFAILED D: a rule  it was 3\n" in ended.output
    assert ended.output.endswith("4 rules checked, 3 broken\n")


def test_a_crashed_section_is_a_broken_rule_and_prints_its_traceback(ended: DriverResult) -> None:
    what = "runs to its end"
    assert ended.lines["F"] == [
        {**SHAPE, "kind": "note", "what": "first", "detail": "kept"},
        {**SHAPE, "kind": "must", "what": what, "ok": False, "detail": "exit status 1"},
    ]
    assert "| ValueError: broken\n" in ended.output


def test_a_section_that_hangs_is_killed_with_all_its_children(
    ended: DriverResult, pids: Path
) -> None:
    what, detail = "ends within 15 s", "killed, with all its children"
    assert ended.lines["S"] == [
        {**SHAPE, "kind": "note", "what": "first", "detail": "kept"},
        {**SHAPE, "kind": "must", "what": what, "ok": False, "detail": detail},
    ]
    assert_ended(pids / "hung")


def test_processes_that_a_section_leaves_running_are_killed(
    ended: DriverResult, pids: Path
) -> None:
    what = "processes that it left running and that were killed"
    assert ended.lines["R"][1:] == [{**SHAPE, "kind": "note", "what": what, "detail": "2"}]
    assert_ended(pids / "left")


def assert_ended(file: Path) -> None:
    for pid in map(int, file.read_text().split()):
        eventually(f"the end of {pid}", lambda pid=pid: not is_alive(pid))


def test_a_section_that_needs_more_gpus_is_listed_as_not_run(ended: DriverResult) -> None:
    assert "\n  P made up: needs 99 GPUs\n" in ended.output


def test_a_section_without_time_left_in_the_budget_is_listed(tmp_path: Path) -> None:
    package = tmp_path / "made_up"
    write_section(package, "D", "import signal; signal.pause()", seconds=600.0)
    write_section(package, "T", "pass")
    ended = run_made_up(package, "--only", "D,T", "--budget", "8")
    assert ended.status == 0, "no rule was broken"
    assert list(ended.lines) == ["D"]
    assert "\n  D made up: the rest of it: no time left: killed after 8 s\n" in ended.output
    assert "\n  T made up: no time left\n" in ended.output


def test_sections_run_in_the_order_of_their_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for letter in "MTDEZ":
        write_section(tmp_path / "ordered", letter, "pass")
    assert [listed.label for listed in sections("ordered")] == ["E", "D", "T", "Z", "D1", "T1", "M"]
