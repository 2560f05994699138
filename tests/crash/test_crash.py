"""A sample of the crash matrix; `scripts/crash` runs all cells.

In most cells a job of two real Megatron ranks and their agent is stopped at a failpoint, killed in
whole or in part, and started again. Other cells have nodes that hold copies for each other, or two
jobs in one save directory. Cells of a family run their own scenario.
"""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_flashckpt.agent.peers.redundancy import Redundancy
from megatron_flashckpt.error_classes import TABLE
from megatron_flashckpt.failpoints import POINTS
from tests.crash import storage_faults, trouble
from tests.crash.cells import all_cells, sample
from tests.crash.families import FAMILIES, family_cells, family_sample
from tests.crash.family import FamilyCell
from tests.crash.job import RANKS, CellError, Job
from tests.crash.peers import (
    NODES,
    REQUESTED_AGAIN,
    PeerCell,
    peer_cells,
    peer_sample,
    run_peer_cell,
)
from tests.crash.rivals import RivalCell, rival_cells, rival_sample, run_rival_cell
from tests.crash.sockets import SOCKET_GONE, LostSocket
from tests.crash.start import RunPlan
from tests.crash.storage_faults import RULES, faulty_cells
from tests.crash.story import KILLED, Cell, run_cell
from tests.crash.truth import await_tidy, check_storage, check_tidy
from tests.faulty_storage.preload import CALLS

#: Modules whose failpoints are hit by ranks.
OF_RANKS = (
    *(
        "save.slot_acquisition",
        "save.hand_over",
        "save.stager",
        "save.outcomes",
        "load.memory_checkpoints",
        "load.loader",
        "load.resume",
    ),
    "load.rank_exchange",
)


@pytest.mark.parametrize("cell", sample(), ids=str)
def test_a_killed_job_loses_no_checkpoint_and_leaves_no_files(cell: Cell, tmp_path: Path) -> None:
    assert len(run_cell(cell, tmp_path)) == len(cell.crashes)


@pytest.mark.parametrize("cell", peer_sample(), ids=str)
def test_a_job_resumes_from_the_newest_complete_copies_on_other_nodes(
    cell: PeerCell, tmp_path: Path
) -> None:
    assert len(run_peer_cell(cell, tmp_path)) == 1


@pytest.mark.parametrize("cell", rival_sample(), ids=str)
def test_an_agent_that_wakes_after_a_takeover_changes_no_file(
    cell: RivalCell, tmp_path: Path
) -> None:
    run_rival_cell(cell, tmp_path)


@pytest.mark.parametrize("cell", family_sample(), ids=str)
def test_runs_of_a_job_are_never_mixed_or_lost(cell: FamilyCell, tmp_path: Path) -> None:
    cell.run(tmp_path)


#: Cheap cells without Megatron, each with two nodes, jobs or runs of a rank. Megatron's ranks are
#: forked from a process that the suite may have started before, without the library of faults.
FAULTY_SAMPLE = (
    *storage_faults.faulty_sample()[-1:],
    LostSocket("persist.chunk", 2, SOCKET_GONE, at_once=True),
)


@pytest.mark.parametrize("cell", FAULTY_SAMPLE, ids=str)
def test_faulty_storage_loses_no_checkpoint(cell: FamilyCell, tmp_path: Path) -> None:
    trouble.prepare(tmp_path, 1, cell)
    with trouble.everywhere():
        cell.run(tmp_path)
    assert trouble.failed_calls(tmp_path).count("fallocate") >= 4, (
        "the agents did not run on faulty storage"
    )


def test_every_storage_call_gets_every_transient_error(tmp_path: Path) -> None:
    """The call close(2) gets fewer errors, and a cell without `prepare` gets none."""
    assert trouble.errors(tmp_path / "save") == []
    trouble.prepare(tmp_path, 0, "a cell")
    rules = [rule.split() for rule in trouble.errors(tmp_path / "save")]
    numbers = {words[1]: words[4].split(",") for words in rules if words[0] == "sometimes"}
    passing = {str(number) for number, error in TABLE.items() if error.may_pass}
    assert numbers.keys() == set(CALLS) - {"fallocate"}
    assert all(passing == set(of) for call, of in numbers.items() if call != "close")
    assert set(numbers["close"]) <= passing
    before = (tmp_path / "faults").read_text()
    trouble.begin(tmp_path / "save")
    assert "sometimes " in (tmp_path / "faults").read_text()
    trouble.end(tmp_path / "save")
    assert (tmp_path / "faults").read_text() == before


def test_the_full_matrix_runs_each_family_at_every_step_of_its_process() -> None:
    cells = family_cells()
    assert len(set(cells)) == len(cells)
    assert {type(cell) for cell in family_sample()} == {type(made()[0]) for made in FAMILIES}
    assert set(family_sample()) <= set(cells)
    of_peers = {point for point in POINTS if point.split(".")[0] in ("send", "hold", "recover")}
    of_ranks = {point for point in POINTS if POINTS[point][0] in OF_RANKS}
    steps: dict[str, set[str]] = {}
    for cell in cells:
        steps.setdefault(type(cell).__name__, set()).add(cell.place[0][1])
    of_agents = POINTS.keys() - of_peers - of_ranks
    assert steps["SecondJob"] == steps["Forks"] == of_ranks
    assert steps["SecondStart"] == steps["LostSocket"] == of_agents
    # A requeue resumes from a committed save, so the save before the requeue must not fail.
    assert steps["Requeue"] == of_agents - {"agent.attached", "save.failed", "forget.file"}


def test_the_full_matrix_kills_commits_under_every_storage_trouble() -> None:
    cells = faulty_cells()
    assert len(set(cells)) == len(cells)
    assert {(cell.trouble, cell.killed) for cell in cells} == {
        (trouble, killed) for trouble in RULES for killed in storage_faults.KILLED
    }
    points = {cell.point for cell in cells}
    assert {
        "put.written",
        "put.renamed",
        "commit.common",
        "commit.manifest",
        "commit.tracker",
    } <= points


def test_the_full_matrix_wakes_agents_at_every_step_visible_to_others() -> None:
    seen = ("persist", "file", "put", "commit", "retain", "leftover", "save", "forget")
    of_trainers = {"save.granted", "save.staging", "save.told"}
    assert {cell.point for cell in rival_cells()} == {
        point for point in POINTS if point.split(".")[0] in seen
    } - of_trainers


def test_a_second_job_is_refused_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    first, second = Job(tmp_path), Job(tmp_path / "second")
    second.runtime_dir = tmp_path / "run2"  # the path of a socket must be short
    try:
        plan = RunPlan(save=str(first.save), seed=1, saves=1)
        first.start(plan, None, linger=True)
        first.await_all("ended")
        (agent,) = first.agents
        before = {path for path in first.save.rglob("*") if path.suffix != ".tmp"}
        second.start(plan, None, linger=False)
        with pytest.raises(CellError, match=r"exit codes \[1, 1\]"):
            second.join()
        assert second.log().count("OtherWriterError") >= RANKS, "not all ranks refused to start"
        assert f"(agent {agent} on {platform.node()}, claim renewed 2" in second.log()
        assert second.reports("loaded") == [[]] * RANKS
        assert set(first.save.rglob("*")) == before
    finally:
        second.close()
        first.close()


def test_the_full_matrix_kills_every_process_at_every_failpoint() -> None:
    cells = all_cells(60)
    assert len(set(cells)) == len(cells) >= 200
    crashes = {(crash.point, crash.killed) for cell in cells for crash in cell.crashes}
    of_peers = {point for point in POINTS if point.split(".")[0] in ("send", "hold", "recover")}
    others = POINTS.keys() - of_peers
    assert crashes == {(point, killed) for point in others for killed in KILLED}
    assert {(cell.scheme, cell.point) for cell in peer_cells()} == {
        (scheme, point) for scheme in NODES for point in of_peers
    }
    for rank in ("rank0", "rank1"):
        at = {crash.point for cell in cells for crash in cell.crashes if crash.who == rank}
        assert at == {point for point in POINTS if point.split(".")[0] in ("stage", "load")} | {
            "save.granted",
            "save.staging",
            "save.told",
        }


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


def test_the_checks_of_a_cell_read_which_parts_a_holder_requests_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    holder = SimpleNamespace(_lock=threading.Lock(), _plan=None)
    Redundancy._gave_up(holder, 3, {1, 2})  # type: ignore[arg-type]
    assert REQUESTED_AGAIN.findall(caplog.text) == ["1, 2"]


def test_the_checks_of_a_cell_report_every_kind_of_damage(job: Job) -> None:
    """The checks report damage, a tracker that is ahead, a stray file, and other contents."""
    plan = RunPlan(save=str(job.save), seed=1, saves=2)
    job.start(plan, None, linger=False)
    job.join()
    check_storage(job.save)
    await_tidy(job.save, 2)
    tracker = job.save / "latest_checkpointed_iteration.txt"
    tracker.write_text("3")
    with pytest.raises(CellError, match="tracker says '3'"):
        check_storage(job.save)
    tracker.write_text("2")
    stray = job.save / "iter_0000002/.manifest.json.01234567.tmp"
    stray.touch()
    with pytest.raises(CellError, match=stray.name):
        check_tidy(job.save, 2)
    stray.unlink()
    job.start(RunPlan(save=str(job.save), seed=2, saves=0), None, linger=False)
    job.join()
    for (event,) in job.reports("loaded"):
        assert event["loaded"] == 2
        assert {name.split("/")[0] for name in event["wrong"]} == {
            *("weight", "master", "exp_avg", "exp_avg_sq", "random state")
        }
    shard = next((job.save / "iter_0000001").glob("rank_00001*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CellError, match="iteration 1 has a manifest, but"):
        check_storage(job.save)
