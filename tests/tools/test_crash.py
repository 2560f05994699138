"""A sample of the crash matrix; `scripts/crash` runs all cells.

In most cells a job of two real Megatron ranks and their agent is stopped at a failpoint, killed in
whole or in part, and started again. Other cells have nodes that hold copies for each other, two
jobs in one save directory, or several runs of one job.
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from megatron_flashckpt.failpoints import POINTS
from tests.tiers import only_first
from tools.crash import peers, roots, trouble
from tools.crash.cells import all_cells
from tools.crash.family import AnyCell
from tools.crash.forks import Forks
from tools.crash.job import RANKS, CellError, Job
from tools.crash.peers import NODES, OWN, PeerCell, peer_cells
from tools.crash.requeues import Requeue
from tools.crash.rivals import RivalCell
from tools.crash.roots import PLAIN, S3, is_hit
from tools.crash.second_jobs import SecondJob
from tools.crash.second_starts import SecondStart
from tools.crash.start import RunPlan
from tools.crash.storage_faults import FaultyCell
from tools.crash.story import AGENT, KILLED, NODE, TRAINERS, Cell, Crash

#: Cells that cover every column of one job, loads from memory and from storage, and every kind.
SAMPLE: list[AnyCell] = [
    Cell((Crash("rank1", "stage.half", 3, TRAINERS),), step=3),
    Cell((Crash("agent", "persist.chunk", 8, TRAINERS),)),
    Cell((Crash("agent", "put.written", 8, AGENT),)),
    Cell((Crash("agent", "commit.end", 3, NODE),), step=3),
    Cell((Crash("agent", "retain.failed", 1, NODE),), step=3, retain_interval=4),
    Cell((Crash("agent", "forget.file", 1, TRAINERS),), step=3, broken=2),
    Cell(
        (Crash("rank1", "stage.rung", 4, TRAINERS), Crash("rank0", "load.half", 1, AGENT)), step=3
    ),
    Cell((Crash("rank0", "stage.copied", 3, NODE), Crash("rank1", "load.filled", 1, TRAINERS))),
    PeerCell("copy", "send.chunk", 7, OWN),
    PeerCell("xor", "send.chunk", 9, peers.AGENT),
    RivalCell("persist.chunks", 2),
    RivalCell("commit.end", 2),
    RivalCell("forget.file", 1, fails=True),
    SecondStart("persist.chunk", 2),
    SecondJob(0, "stage.half", 3, "storage"),
    Requeue(1, "persist.record", 2, "moved"),
    Forks(0, "stage.half", 2),
    FaultyCell("errors that pass", "commit.common", 2, "agent killed"),
    FaultyCell("names that come late", "commit.common", 2, "both agents killed"),
]
IN_A_BUCKET = [
    Cell((Crash("agent", "upload.chunk", 13, AGENT),)),
    RivalCell("upload.chunk", 3),
    Requeue(0, "commit.end", 2, "moved"),
]


@pytest.mark.parametrize("cell", only_first(SAMPLE), ids=str)
def test_a_killed_job_loses_no_checkpoint_and_leaves_no_files(
    cell: AnyCell, tmp_path: Path
) -> None:
    cell.run(tmp_path)


@pytest.mark.second_tier
@pytest.mark.parametrize("cell", IN_A_BUCKET, ids=str)
def test_a_job_in_a_bucket_loses_no_checkpoint_and_leaves_no_objects(
    cell: AnyCell, tmp_path: Path, s3_url: str
) -> None:
    roots.put_in_bucket(tmp_path, s3_url)
    cell.run(tmp_path)


#: Cheap cells without Megatron, each with two nodes, jobs or runs of a rank. Megatron's ranks are
#: forked from a process that the suite may have started before, without the library of faults.
FAULTY_SAMPLE = (SAMPLE[-1], SecondStart("persist.chunk", 2))


@pytest.mark.second_tier
@pytest.mark.parametrize("cell", FAULTY_SAMPLE, ids=str)
def test_faulty_storage_loses_no_checkpoint(cell: AnyCell, tmp_path: Path) -> None:
    trouble.prepare(tmp_path, 1, cell)
    with trouble.everywhere():
        cell.run(tmp_path)
    assert trouble.failed_calls(tmp_path).count("fallocate") >= 4, (
        "the agents did not run on faulty storage"
    )


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
