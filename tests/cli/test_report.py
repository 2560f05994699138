"""`flashckpt report`: every save in a directory, with its result."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import msgspec
import pytest

from megatron_flashckpt.catalog.history import PastSave, PastStart, append
from megatron_flashckpt.file_format.file_names import HISTORY, event_name, save_name
from megatron_flashckpt.layout.save_cost import Plans, SaveCost
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.cli.conftest import Run, only_line
from tests.support import terminal
from tests.support.checkpoints import RUN, fail, make
from tests.support.histories import history

REASON = "iter_0000003: cannot write (No space left on device); free space there"
PLANS = {1: Plans(computed=1, found=0, kept=0), 2: Plans(computed=0, found=1, kept=0), 4: None}


def cost_of(iteration: int) -> SaveCost:
    return SaveCost(
        nbytes=10**6,
        started_at=float(iteration),
        blocked_s=0.25,
        staged_s=0.5,
        persisted_s=0.7,
        slowest=0,
        durable_s=0.8,
        plans=PLANS[iteration],
    )


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    """Return a directory in which save 1 was removed, 3 failed, and 2 and 4 are kept."""
    root = tmp_path / "save"
    for iteration in (1, 2, 3, 4):
        save_id = save_name(RUN, iteration)
        failed = iteration == 3
        past = PastSave(
            iteration=iteration,
            save_id=save_id,
            ended_at=float(iteration),
            seconds=1.0,
            error=REASON if failed else None,
            world_size=4,
            cost=None if failed else cost_of(iteration),
        )
        append(PosixStore(root), past)
        if failed:
            fail(root, iteration, save_id, REASON)
            continue
        fields = {"committed_at": float(iteration), "cost": msgspec.to_builtins(past.cost)}
        made = make(root, iteration, save_id)
        made.change_manifest(lambda manifest, fields=fields: manifest.update(fields))
    shutil.rmtree(root / "iter_0000001")
    return root


def test_every_save_is_listed_with_its_timings(
    run: Run, saves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_RETENTION__LATEST", "2")
    rows = json.loads(run("report", saves, "--json").out)
    assert [(row["iteration"], row["state"]) for row in rows] == [
        (1, "removed"),
        (2, "committed"),
        (3, "failed"),
        (4, "committed"),
    ]
    assert [row["cost"] and row["cost"]["blocked_s"] for row in rows] == [0.25, 0.25, None, 0.25]
    assert "iter_0000003" in rows[2]["error"]
    assert rows[3]["kept_by"] == ["tracker", "latest 2"]
    assert rows[3]["gb_per_s"] > 0
    assert [row["cost"] and row["cost"]["plans"] for row in rows] == [
        {"computed": 1, "found": 0, "kept": 0},
        {"computed": 0, "found": 1, "kept": 0},
        None,
        None,
    ]
    table = run("report", saves).out
    assert "4 saves, 1 failed, median blocked 250.0 ms" in table
    assert "latest 2" in table
    assert "1 computed" in table
    assert "1 found" in table
    assert "iter_0000003" in table


def test_unreadable_incomplete_and_replaced_saves_have_their_own_state(
    run: Run, saves: Path
) -> None:
    next((saves / "iter_0000002").glob("*.end")).write_text("{")
    shard = next((saves / "iter_0000004").glob("*.rank_00001.safetensors"))
    shard.unlink()
    # A conversion in the same directory leaves such a file.
    (saves / "iter_0000001/mp_rank_00").mkdir(parents=True)
    ran = run("report", saves, "--json")
    assert ran.err == "", "no retention is configured, so no warning is due"
    states = {row["iteration"]: row["state"] for row in json.loads(ran.out)}
    assert states == {1: "replaced", 2: "unreadable", 3: "failed", 4: "damaged"}
    table = run("report", saves).out
    assert f"missing: {shard.name}" in table
    assert "is not a manifest" in table
    assert "is in Megatron's own format 'torch'" in table
    assert "4 saves, 1 failed, 2 damaged or unreadable, median blocked" in table
    shutil.rmtree(saves / HISTORY)
    states = {
        row["iteration"]: row["state"] for row in json.loads(run("report", saves, "--json").out)
    }
    assert states == {2: "unreadable", 4: "damaged"}


def test_starts_and_replaced_saves_are_listed(run: Run, saves: Path) -> None:
    origin = {"save_id": save_name(RUN, 2), "iteration": 2, "source": "memory"}
    start = PastStart(run="000002-beef", started_at=2.5, world_size=4, **origin)
    append(PosixStore(saves), start)
    make(saves, 4, save_name(RUN, 5)).change_manifest(
        lambda manifest: manifest.update(committed_at=5.0)
    )
    rows = json.loads(run("report", saves, "--json").out)
    assert [row["state"] for row in rows] == (
        ["removed", "committed", "started", "failed", "replaced", "committed"]
    )
    assert (rows[2]["iteration"], rows[2]["save_id"]) == (2, save_name(RUN, 2))
    table = run("report", saves).out
    assert "run 000002-beef, 4 ranks, resumed from memory" in table
    assert "5 saves, 1 failed" in table


@pytest.mark.parametrize(
    ("interruptions", "told", "proposed"),
    [
        # Daly: sqrt(2 * 0.1 s * 413 s) = 9.1 s, which is 5 iterations of 2 s.
        (3, "3 interruptions in 20.7 min of training, one in 6.9 min", "--save-interval 5 "),
        # 50,000 h / 16 ranks: sqrt(2 * 0.1 s * 1.125e7 s) = 1500 s.
        (2, "2 interruptions in 15.5 min of training, too few to tell", "--save-interval 750 "),
    ],
)
def test_the_interval_that_loses_least_follows_from_the_history(
    run: Run, tmp_path: Path, interruptions: int, told: str, proposed: str
) -> None:
    for event in history(interruptions):
        append(PosixStore(tmp_path), event)
    measured, advice = run("report", tmp_path).lines[-2:]
    assert "an iteration takes 2.0 s, a save blocks 100.0 ms and is durable after 5.0 s" in measured
    assert told in measured
    assert advice.startswith(proposed)
    assert "the present 50 (every 100.0 s) loses" in advice


def test_a_directory_without_any_record_of_a_save_is_an_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "iter_0000001/mp_rank_00").mkdir(parents=True)  # Megatron's own format
    for output in ([], ["--json"], ["--png", tmp_path / "x.png"]):
        only_line(
            run("report", tmp_path, *output),
            rf"{tmp_path}: holds no checkpoint in flashckpt format and no history of saves; "
            "give Megatron's --save directory",
        )
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("ended_at", ["1e300", "-1e300", "1e18"])
def test_a_time_beyond_the_calendar_in_a_damaged_history_is_not_shown(
    run: Run, tmp_path: Path, ended_at: str
) -> None:
    fields = '"iteration": 5, "save_id": "aaaaaaaaaaaa", "seconds": 1, "world_size": 1'
    line = f'{{"event": "save", {fields}, "error": "full", "ended_at": {ended_at}}}\n'
    (tmp_path / HISTORY).mkdir(parents=True)
    (tmp_path / event_name(1.0, save_name(RUN, 1))).write_text(line)
    assert re.search(r"^ +5  failed  .*full", run("report", tmp_path).out, re.MULTILINE)
    assert json.loads(run("report", tmp_path, "--json").out)[0]["ended_at"] == float(ended_at)


def test_a_drawing_is_a_png_and_replaces_only_png_files(
    run: Run, saves: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = next((saves / "iter_0000004").glob("*.end"))
    before = manifest.read_bytes()
    ran = run("report", saves, "--png", manifest)
    only_line(ran, rf"{manifest}: exists and is not a PNG, so it was not replaced; .*")
    assert manifest.read_bytes() == before
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        patch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
        only_line(run("report", saves, "--png", saves / "x.png"), ".*pip install matplotlib.*")
    assert not (saves / "x.png").exists()
    pytest.importorskip("matplotlib")
    for _ in range(2):
        assert "drawn" in run("report", saves, "--png", tmp_path / "x.png").out
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    ran = run("report", saves, "--json", "--png", tmp_path / "no/x.png")
    only_line(ran, ".* cannot be written .*name a file in another directory with --png.*")


def test_a_narrow_terminal_gets_one_line_per_save(
    run: Run, saves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_RETENTION__LATEST", "2")
    everything = re.split(r"\s{2,}", run("report", saves).out.splitlines()[0])
    for width in (70, 120, 160):
        terminal.pretend(monkeypatch, width)
        lines = [line.rstrip() for line in run("report", saves).out.splitlines()]
        assert len(lines) == 9, "titles, a line per save, the error, the sum, and the advice"
        assert REASON in lines.pop(4), "the error is below its save"
        assert all(len(line) <= width for line in lines[:6]), width
        titles = re.split(r"\s{2,}", lines[0])
        assert [title for title in everything if title in titles] == titles, "no title is folded"
        assert {"iteration", "state", "blocked", "durable", "kept by"} <= set(titles)
        assert ("slowest rank" in titles) == (width > 120)
    assert titles == everything[:-1], "a wide terminal has all columns, and remarks below"
