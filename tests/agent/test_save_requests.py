"""`flashckpt save-now`: every rank learns of one iteration in time, without asking another rank."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_flashckpt.agent import alive, save_requests
from megatron_flashckpt.agent.save_requests import SaveRequest
from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.file_format.file_names import request_file
from megatron_flashckpt.save.node_link import NodeLink
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.store import Pace
from tests.agent.conftest import Node
from tests.support.agents import agent_here
from tests.support.trainer import FakeTrainer, eventually, save_all


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "idle_s", lambda pace, nodes: 0.1)


@pytest.fixture
def trainers(node: Node, other_node: Node, root: Path) -> Iterator[list[FakeTrainer]]:
    """A rank on each of two nodes, which have saved once, so that they have slabs."""
    with agent_here(node, root), agent_here(other_node, root):
        made = [where.trainer(root, rank, 2) for rank, where in enumerate((node, other_node))]
        run = made[0].open_run()
        made[1].join(run)
        assert save_all(made, 1) == [None, None]
        yield made


def save_at(trainer: FakeTrainer) -> int:
    assert trainer.slab is not None
    return trainer.slab.signals.save_at


def test_ranks_of_all_nodes_learn_of_the_newest_request(
    trainers: list[FakeTrainer], root: Path
) -> None:
    store, run = PosixStore(root), trainers[0].run
    assert run is not None
    for iteration in (700, 900):
        save_requests.put(store, run.name, SaveRequest(iteration=iteration))
        for trainer in trainers:
            eventually("the request", lambda t=trainer, i=iteration: save_at(t) == i)
    store.put(request_file(run.name), b'{"iteration": -1}')
    later = trainers[0].open_run()
    eventually("the end of the request with its run", lambda: save_at(trainers[0]) == 0)
    assert later.name != run.name
    assert save_requests.read(store, run.name) is None, "no iteration"
    trainers[1].join(later)
    assert save_all(trainers, 2) == [None, None]
    eventually("the removal of the request", lambda: not (root / request_file(run.name)).exists())


def test_a_sign_of_life_tells_how_far_and_how_fast_rank_0_trains(
    trainers: list[FakeTrainer], root: Path
) -> None:
    store, run = PosixStore(root), trainers[0].run
    assert run is not None

    def shown() -> alive.Alive:
        sign = alive.read(store, run.name)
        assert sign is not None
        return sign

    assert trainers[0].slab is not None
    for trained in (100, 150):
        trainers[0].slab.signals.trained = trained
        eventually("the iteration", lambda n=trained: shown().trained == n)
    # 50 iterations in one interval of renewals, or two.
    assert 0.5 * alive.INTERVAL_S / 50 < shown().step_s < 5 * alive.INTERVAL_S / 50
    assert shown().looks_every_s > 0


def test_a_trainer_asks_its_slab(node: Node, root: Path) -> None:
    link = NodeLink(str(root), 0, node.config())
    assert not link.save_requested(3), "there is no slab yet"
    slab = link.ensure_slab(4096, 4096)
    slab.signals.save_at = 5
    assert [link.save_requested(iteration) for iteration in (4, 5, 6)] == [False, True, False]
    assert slab.signals.trained == 6
    link.close(leave=True)


@contextlib.contextmanager
def training(trainers: list[FakeTrainer], save: Callable[[int], object]) -> Iterator[None]:
    """Complete 20 iterations a second in a thread, and call `save` after the requested one."""
    ended = threading.Event()

    def train() -> None:
        iteration = 1
        while not ended.wait(0.05):
            iteration += 1
            for trainer in trainers:
                assert trainer.slab is not None
                trainer.slab.signals.trained = iteration
            if iteration == save_at(trainers[0]):
                save(iteration)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_the_command_returns_when_the_checkpoint_is_durable(
    trainers: list[FakeTrainer], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved: list[int] = []

    def save(iteration: int) -> None:
        saved.append(iteration)
        assert save_all(trainers, iteration) == [None, None]

    with training(trainers, save):
        assert main(["save-now", str(root)]) == 0
    (iteration,) = saved
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"iteration {iteration} will be saved, in ")
    assert lines[1:] == [f"iter_{iteration:07d}: saved"]


def test_the_command_tells_why_the_save_failed(
    trainers: list[FakeTrainer], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(iteration: int) -> None:
        trainers[1].call_off(iteration, trainers[0].new_save_id(), "no memory for it")

    with training(trainers, fail):
        assert main(["save-now", str(root)]) == 1
    assert capsys.readouterr().err.endswith(" was not saved: rank 1: no memory for it\n")


def test_a_request_that_no_rank_has_seen_ends_the_command(
    trainers: list[FakeTrainer],
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron_flashckpt.cli.save_now._PATIENCE_S", 1.0)
    with training(trainers, lambda _: None):
        assert main(["save-now", str(root)]) == 1
    assert "the request came too late, or the loop does not look for it" in capsys.readouterr().err


def test_nothing_is_requested_where_no_job_trains(
    node: Node, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root.mkdir(exist_ok=True)
    assert main(["save-now", str(root)]) == 1
    assert "no job trains and saves there" in capsys.readouterr().err
    assert not (root / "flashckpt/requests").exists()
