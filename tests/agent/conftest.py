"""Fixtures for the nodes of a job; the end of a test removes every trace of a node."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.agent import commit_core, saves
from megatron_flashckpt.agent.held_directory import ensure
from megatron_flashckpt.agent.place import Place, place_of
from megatron_flashckpt.config import Config
from tests.support.trainer import (
    FakeTrainer,
    TrainerProcess,
    agents_under,
    config_of,
    end_agents,
)
from tests.tiers import only_first


class Node:
    """The runtime directory where trainers of a node meet their agent; `close` ends all of them."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        self._trainers: list[FakeTrainer] = []
        self._processes: list[TrainerProcess] = []

    def config(self, **agent: Any) -> Config:
        return config_of(self.runtime_dir, **agent)

    def trainer(
        self,
        root: Path | str,
        rank: int = 0,
        world_size: int = 1,
        *,
        config: Config | None = None,
        **more: Any,
    ) -> FakeTrainer:
        """Return a connected rank in this process."""
        trainer = FakeTrainer(root, config or self.config(), rank, world_size, **more)
        self._trainers.append(trainer)
        return trainer

    def process(self, root: Path | str, **more: Any) -> TrainerProcess:
        """Return a started rank in a process of its own."""
        process = TrainerProcess(root, self.runtime_dir, **more)
        self._processes.append(process)
        return process

    def place(self, root: Path | str) -> Place:
        """Return the place of the agent for `root`."""
        ensure(str(root))
        return place_of(str(root), str(self.runtime_dir))

    def log(self, root: Path | str) -> Path:
        """Return the log of the agent for `root`, in a directory that exists."""
        place = self.place(root)
        place.prepare()
        return place.log

    def agents(self) -> list[int]:
        return agents_under(self.runtime_dir)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for trainer in self._trainers:
            trainer.hang_up()
        end_agents(self.runtime_dir)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "run")
    yield made
    made.close()


@pytest.fixture
def other_node(tmp_path: Path) -> Iterator[Node]:
    """Another node of the same job, whose agent shares only the storage with the first."""
    made = Node(tmp_path / "run2")
    yield made
    made.close()


#: For tests whose `root` is a save directory, and then the URL of one.
ALSO_IN_A_BUCKET = pytest.mark.parametrize(
    "root", only_first(["directory", "bucket"]), indirect=True
)


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """The path of a save directory that is still to be made; see `ALSO_IN_A_BUCKET`."""
    if getattr(request, "param", "directory") == "bucket":
        url: str = request.getfixturevalue("s3_url")
        return url
    return tmp_path / "save"


@pytest.fixture
def make_job(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make ranks with tensors and a `Checkpointer`; see `tests.support.rank_job`."""
    from tests.support.rank_job import Job  # needs torch; others import this file for `Node`

    made: list[Job] = []

    def job(config: Config) -> Job:
        made.append(Job(root, config, monkeypatch))
        return made[-1]

    yield job
    for created in made:
        created.checkpointer.close(leave=False)


@pytest.fixture
def job(node: Node, make_job: Any) -> Any:
    return make_job(node.config())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB. Request this fixture before `node`, whose agents write to it."""
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"this machine refuses to mount a tmpfs: {made.stderr.strip()}")
    yield path
    # An agent of the test holds its directory open and may end a moment later.
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up soon on storage that does not take names, and write shards again at once."""
    monkeypatch.setattr(commit_core, "PATIENCE_S", 0.5)
    monkeypatch.setattr(commit_core, "_LASTING_S", 0.5)
    monkeypatch.setattr(commit_core, "_RETRY_S", (0.02, 0.1))
    monkeypatch.setattr(saves, "_WRITE_RETRIES_S", (0.01, 0.01))
