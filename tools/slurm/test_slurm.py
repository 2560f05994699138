"""Tests of the sbatch script on real Slurm: real Megatron on two nodes with a CPU rank each.

`scripts/install` does not install Slurm. `scripts/test_slurm` installs Debian's package and runs
these tests. Without Slurm they are skipped, and `tests/integration/test_launch_scripts.py` runs the
script with a double of Slurm.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_launch_scripts import (
    ON_CPU,
    SCRIPTS,
    TINY_JOB,
    assert_repeated,
    losses_in,
)
from tests.support.megatron_jobs import REPO
from tools.slurm.cluster import Cluster, running, why_no_cgroups, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no Slurm: {why_not()}")

#: Longest wait for a job, which starts its ranks twice: about 40 s on two idle cores.
PATIENCE_S = 400.0
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


class Job:
    """A job that runs the unchanged script."""

    def __init__(self, cluster: Cluster, directory: Path, *options: str, **variables: str) -> None:
        self._cluster = cluster
        self.directory = directory
        self._log = directory / "log"
        directory.mkdir()
        variables = {
            **TINY_JOB,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "GPUS_PER_NODE": "1",
            "TENSOR_PARALLEL": "1",
            "CHECKPOINT_PATH": str(directory / "checkpoints"),
            "LOSS_LOG": str(directory / "losses"),
            "FLASHCKPT_RUNTIME_DIR": str(cluster.runtime_dir),
            **variables,
        }
        script = ["pretrain_gpt_slurm.sbatch", *ON_CPU]
        self.number = cluster.run(
            *("sbatch", "--parsable", f"--output={self._log}", *options),
            *(str(SCRIPTS / script[0]), *script[1:]),
            SLURM_SUBMIT_DIR=str(REPO),
            SCRIPTS=str(SCRIPTS),
            **variables,
        )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def facts(self) -> dict[str, str]:
        return self._cluster.job(self.number)

    def ended(self) -> dict[str, str]:
        """Wait until the job has ended; return its fields."""
        self.until("the end of the job", lambda: self.facts()["JobState"] in ENDED)
        facts = self.facts()
        print(f"job {self.number}: {facts['JobState']}, {facts['RunTime']}, {facts['ExitCode']}")
        return facts

    def until(self, what: str, probe: Any) -> Any:
        """Return the first true value of `probe`; poll rarely, as each poll starts processes."""
        deadline = time.monotonic() + PATIENCE_S
        while not (result := probe()):
            logs = f"{self.log[-8000:]}\n{self._cluster.log()}"
            assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}\n{logs}"
            time.sleep(0.5)
        return result

    def runs_again(self) -> bool:
        """Return whether the requeued job runs; end the delay before it becomes eligible."""
        facts = self.facts()
        if facts["JobState"] == "PENDING":
            self._cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now")
        return facts["JobState"] == "RUNNING" and facts["Restarts"] == "1"

    @property
    def tracker(self) -> str:
        path = self.directory / "checkpoints/latest_checkpointed_iteration.txt"
        return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def pgid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("pgid") / "slurm", "pgid") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cgroup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if (reason := why_no_cgroups()) is not None:
        pytest.skip(f"proctrack/cgroup cannot run here: {reason}")
    with running(tmp_path_factory.mktemp("cgroup") / "slurm", "cgroup") as cluster:
        yield cluster


@pytest.fixture(params=["pgid", "cgroup"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    job = request.getfixturevalue(request.param)
    assert isinstance(job, Cluster)
    return job


def killing(job_directory: Path) -> str:
    """Return the fault that kills rank 1 in its second save, once."""
    return f"rank1:save.granted:2:KILL:{job_directory / 'killed'}"


def assert_resumed_from_memory(job: Job, facts: dict[str, str]) -> None:
    assert facts["JobState"] == "COMPLETED", job.log[-8000:]
    assert (job.directory / "killed").exists(), "no rank was killed"
    assert "iteration 2 was restored from memory" in job.log, job.log[-8000:]
    assert job.tracker == "5"
    assert_repeated(losses_in(job.directory))


def test_a_job_with_a_killed_rank_resumes_from_memory(pgid: Cluster, tmp_path: Path) -> None:
    directory = tmp_path / "job"
    job = Job(pgid, directory, FLASHCKPT_FAULT=killing(directory))
    assert_resumed_from_memory(job, job.ended())
    assert "it is started again" not in job.log, (
        "the script started a second step, although torchrun restarts ranks within the step"
    )


def test_a_second_slurm_step_resumes_from_memory(cluster: Cluster, tmp_path: Path) -> None:
    """The whole first step fails, because torchrun does not restart its ranks."""
    directory = tmp_path / "job"
    job = Job(cluster, directory, FLASHCKPT_FAULT=killing(directory), MAX_RESTARTS="0")
    facts = job.ended()
    assert_resumed_from_memory(job, facts)
    assert len(re.findall("the training step failed with status .* started again", job.log)) == 1
    # The agents end only when the script of the job ends.
    assert re.search(
        r"agent \d+ of this node, a foreground one.*its memory holds iteration", job.log
    )
    assert len(re.findall(r"foreground: agent \d+ ends$", job.log, re.MULTILINE)) == 2


def test_sigterm_before_the_time_limit_leaves_a_checkpoint_in_storage(
    pgid: Cluster, tmp_path: Path
) -> None:
    """The script requests SIGTERM 3 min before the limit, which is set once the ranks train."""
    job = Job(pgid, tmp_path / "job", TRAIN_ITERS="100000", SAVE_INTERVAL="100000")
    job.until("a training step", lambda: re.search(r"iteration +2/", job.log))
    hours, minutes, _ = map(int, job.facts()["RunTime"].split(":"))
    limit = 60 * hours + minutes + 3
    pgid.run("scontrol", "update", f"JobId={job.number}", f"TimeLimit={limit}")
    facts = job.ended()
    assert re.search("exiting program after receiving SIGTERM", job.log), job.log[-8000:]
    saved = re.findall(r"flashckpt: iteration (\d+) durable after", job.log)
    assert saved
    assert job.tracker == saved[-1]
    assert "it is started again" not in job.log
    print(facts["JobState"], facts["ExitCode"], facts["RunTime"])
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "143:0"), (
        "docs/how-to/slurm.md documents this state and exit code"
    )


def test_a_job_that_lost_a_node_is_requeued_and_resumes_from_storage(
    cgroup: Cluster, tmp_path: Path
) -> None:
    job = Job(cgroup, tmp_path / "job", TRAIN_ITERS="100000", SAVE_INTERVAL="20")
    job.until("a checkpoint in storage", lambda: job.tracker)
    cgroup.lose_node("node2")
    resumable = int(job.tracker)
    job.until("the end of the first run", lambda: job.facts()["JobState"] != "RUNNING")
    cgroup.start_node("node2")
    job.until("the second run", job.runs_again)
    match = job.until(
        "a restart from storage",
        lambda: re.search(r"iteration (\d+) was restored from storage", job.log),
    )
    assert int(match[1]) >= resumable
    before = int(job.tracker)
    job.until("a later checkpoint", lambda: int(job.tracker) > before)
    cgroup.run("scancel", job.number)
    assert job.ended()["JobState"] == "CANCELLED"
