"""A sample of the crash matrix; `scripts/crash` runs all cells.

In most cells a job of two real Megatron ranks and their agent is stopped at a failpoint, killed in
whole or in part, and started again. Other cells have nodes that hold copies for each other, or two
jobs in one save directory. Cells of a family run their own scenario.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_flashckpt.failpoints import POINTS
from tests.tiers import only_first
from tools.crash import job, roots, second_starts, storage_faults, trouble
from tools.crash.cells import all_cells, sample
from tools.crash.families import family_sample
from tools.crash.family import FamilyCell
from tools.crash.job import RANKS, CellError, Job
from tools.crash.peers import (
    NODES,
    PeerCell,
    peer_cells,
    peer_sample,
    run_peer_cell,
)
from tools.crash.requeues import Requeue
from tools.crash.rivals import RivalCell, rival_sample, run_rival_cell
from tools.crash.roots import PLAIN, S3, is_hit
from tools.crash.second_starts import SecondStart
from tools.crash.start import RunPlan
from tools.crash.story import AGENT, KILLED, Cell, Crash, run_cell


@pytest.mark.parametrize("cell", only_first(sample()), ids=str)
def test_a_killed_job_loses_no_checkpoint_and_leaves_no_files(cell: Cell, tmp_path: Path) -> None:
    assert len(run_cell(cell, tmp_path)) == len(cell.crashes)


@pytest.mark.second_tier
def test_a_job_in_a_bucket_loses_no_checkpoint_and_leaves_no_objects(
    tmp_path: Path, s3_url: str
) -> None:
    roots.put_in_bucket(tmp_path, s3_url)
    assert len(run_cell(Cell((Crash("agent", "upload.chunk", 13, AGENT),)), tmp_path)) == 1


@pytest.mark.second_tier
@pytest.mark.parametrize("cell", peer_sample(), ids=str)
def test_a_job_resumes_from_the_newest_complete_copies_on_other_nodes(
    cell: PeerCell, tmp_path: Path
) -> None:
    assert len(run_peer_cell(cell, tmp_path)) == 1


@pytest.mark.second_tier
@pytest.mark.parametrize("cell", rival_sample(), ids=str)
def test_an_agent_that_wakes_after_a_takeover_changes_no_file(
    cell: RivalCell, tmp_path: Path
) -> None:
    run_rival_cell(cell, tmp_path)


@pytest.mark.second_tier
def test_an_agent_that_wakes_after_a_takeover_changes_no_object(
    tmp_path: Path, s3_url: str
) -> None:
    roots.put_in_bucket(tmp_path, s3_url)
    run_rival_cell(RivalCell("upload.chunk", 3), tmp_path)


@pytest.mark.second_tier
def test_a_requeued_job_in_a_bucket_loses_no_checkpoint(tmp_path: Path, s3_url: str) -> None:
    roots.put_in_bucket(tmp_path, s3_url)
    Requeue(0, "commit.end", 2, "moved").run(tmp_path)


@pytest.mark.second_tier
@pytest.mark.parametrize("cell", family_sample(), ids=str)
def test_runs_of_a_job_are_never_mixed_or_lost(cell: FamilyCell, tmp_path: Path) -> None:
    cell.run(tmp_path)


#: Cheap cells without Megatron, each with two nodes, jobs or runs of a rank. Megatron's ranks are
#: forked from a process that the suite may have started before, without the library of faults.
FAULTY_SAMPLE = (
    *storage_faults.faulty_sample()[-1:],
    SecondStart("persist.chunk", 2),
)


@pytest.mark.second_tier
@pytest.mark.parametrize("cell", FAULTY_SAMPLE, ids=str)
def test_faulty_storage_loses_no_checkpoint(cell: FamilyCell, tmp_path: Path) -> None:
    trouble.prepare(tmp_path, 1, cell)
    with trouble.everywhere():
        cell.run(tmp_path)
    assert trouble.failed_calls(tmp_path).count("fallocate") >= 4, (
        "the agents did not run on faulty storage"
    )


@pytest.mark.second_tier
def test_a_second_start_waits_only_for_what_a_stopped_agent_cannot_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that an error kept from its step serves the second process, and drops the first."""
    awaited = []

    def eventually(what: str, probe: Callable[[], bool]) -> bool:
        awaited.append(what)
        return job.eventually(what, probe)

    monkeypatch.setattr(second_starts, "eventually", eventually)
    cell = SecondStart("commit.done", 99)
    trouble.prepare(tmp_path, 1, cell)
    with trouble.everywhere():
        cell.run(tmp_path)
    assert trouble.has_missed_step(tmp_path), "nobody learns that the agent was not stopped"
    assert not [what for what in awaited if "connects" in what]


@pytest.mark.second_tier
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
        assert f"(agent {agent} on {platform.node()}, last sign of life 2" in second.log()
        assert second.reports("loaded") == [[]] * RANKS
        assert set(first.save.rglob("*")) == before
    finally:
        second.close()
        first.close()


@pytest.mark.parametrize("storage", [PLAIN, S3])
def test_the_full_matrix_kills_every_process_at_every_failpoint(storage: str) -> None:
    cells = all_cells(60, storage)
    assert len(set(cells)) == len(cells) >= 200
    crashes = {(crash.point, crash.killed) for cell in cells for crash in cell.crashes}
    of_peers = {point for point in POINTS if point.split(".")[0] in ("send", "hold", "recover")}
    others = {point for point in POINTS if is_hit(point, storage)} - of_peers
    assert crashes == {(point, killed) for point in others for killed in KILLED}
    assert {(cell.scheme, cell.point) for cell in peer_cells()} == {
        (scheme, point) for scheme in NODES for point in of_peers
    }
    for rank in ("rank0", "rank1"):
        at = {crash.point for cell in cells for crash in cell.crashes if crash.who == rank}
        own = ("stage", "load", "run") if rank == "rank0" else ("stage", "load")
        assert at == {point for point in POINTS if point.split(".")[0] in own} | {
            "save.granted",
            "save.staging",
            "save.told",
        }
