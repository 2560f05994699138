"""`flashckpt save-now`: every rank learns of one iteration in time, without asking another rank."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_flashckpt.agent import alive, save_requests
from megatron_flashckpt.agent.save_requests import Progress, SaveRequests
from megatron_flashckpt.checkpointer import Checkpointer
from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.config import Config
from megatron_flashckpt.file_format.end import decode_failure
from megatron_flashckpt.file_format.file_names import (
    ALIVE,
    first_sequence,
    iteration_dir,
    request_file,
    save_name,
)
from megatron_flashckpt.save.node_link import NodeLink
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.store import Pace
from megatron_flashckpt.waits import Wait
from tests.agent.conftest import Node
from tests.support.agents import agent_here
from tests.support.stored import names_in
from tests.support.trainer import FakeTrainer, eventually, new_save_id, save_all


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


def asked_name(trainers: list[FakeTrainer], iteration: int) -> str:
    run = trainers[0].run
    assert run is not None
    return save_name(run.name, first_sequence(iteration))


def save_as_asked(trainers: list[FakeTrainer], iteration: int) -> None:
    for trainer in trainers:
        trainer.stage(iteration, asked_name(trainers, iteration))
    assert [trainer.outcome().error for trainer in trainers] == [None, None]


def save_at(trainer: FakeTrainer) -> int:
    assert trainer.slab is not None
    return trainer.slab.signals.save_at


def test_ranks_of_all_nodes_learn_of_one_request_after_the_other(
    trainers: list[FakeTrainer], root: Path
) -> None:
    store, run = PosixStore(root), trainers[0].run
    assert run is not None

    def shown() -> alive.Alive:
        sign = alive.read(store, run.name)
        assert sign is not None
        return sign

    for iteration in (900, 700):
        store.create(request_file(run.name, iteration), b"")
    for trainer in trainers:
        eventually("the request", lambda t=trainer: save_at(t) == 700)
        assert trainer.slab is not None
        trainer.slab.signals.trained = 700
        eventually("the later request", lambda t=trainer: save_at(t) == 900)
    eventually("how far rank 0 has trained", lambda: shown().trained == 700)
    assert shown().looks_every_s > 0
    later = trainers[0].open_run()
    eventually("the end of the request with its run", lambda: save_at(trainers[0]) == 0)
    trainers[1].join(later)
    assert save_all(trainers, 2) == [None, None]
    eventually("the removal", lambda: not list((root / ALIVE).glob(f"{run.name}.*")))


def test_no_pause_makes_an_iteration_seem_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the command would name an iteration that comes too soon."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(save_requests, "time", clock)
    progress = Progress()
    for clock.now, trained in ((0.0, 0), (2.0, 4), (4.0, 8)):
        progress.note("a run", trained)
        assert progress.step_s == 0.0, "the first iterations take longer"
    for clock.now, trained in ((6.0, 12), (66.0, 13), (68.0, 17)):
        progress.note("a run", trained)
        assert progress.step_s == 0.5
    progress.note("another run", 4000)
    assert progress.step_s == 0.0


@pytest.mark.parametrize(
    "setting", [{"busy": "skip"}, {"on_failure": "raise"}, {"failures_in_a_row": 3}]
)
def test_no_request_is_taken_that_could_part_the_ranks(
    node: Node, root: Path, setting: dict[str, Any]
) -> None:
    link = NodeLink(str(root), 0, msgspec.structs.replace(node.config(), **setting))
    slab = link.ensure_slab(4096, 4096)
    slab.signals.save_at = 5
    assert not link.save_requested(5)
    assert slab.signals.trained == 0, "the command says that none is taken"
    link.close(leave=True)


@pytest.mark.parametrize(("wait", "takes"), [("none", True), ("durable", False)])
def test_a_loop_of_its_own_that_waits_for_commits_takes_no_request(
    wait: Wait, *, takes: bool
) -> None:
    """The rank would wait in its save for a late one, which waits in the next step for it."""
    link = SimpleNamespace(save_requested=lambda iteration: iteration == 5)
    loop: Any = SimpleNamespace(_config=Config(wait=wait), _saves=SimpleNamespace(link=link))
    assert Checkpointer.save_requested(loop, 5) == takes


def test_a_trainer_asks_its_slab(node: Node, root: Path) -> None:
    link = NodeLink(str(root), 0, node.config())
    assert not link.save_requested(3), "there is no slab yet"
    slab = link.ensure_slab(4096, 4096)
    slab.signals.save_at = 5
    assert [link.save_requested(iteration) for iteration in (4, 5, 6)] == [False, True, False]
    assert slab.signals.trained == 6
    link.close(leave=False)
    again = NodeLink(str(root), 0, node.config())
    kept, _ = again.take_slab()
    assert kept is not None
    assert kept.signals.trained == 0, "the job may resume from an earlier iteration"
    again.close(leave=True)


@contextlib.contextmanager
def training(trainers: list[FakeTrainer], save: Callable[[int], object]) -> Iterator[None]:
    """Complete 20 iterations a second in a thread, and call `save` after the requested one."""
    ended = threading.Event()

    def train() -> None:
        iteration = 1
        while not ended.wait(0.05):
            iteration += 1
            for trainer in trainers:
                if trainer.slab is None:
                    return
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


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("fail", " was not saved: rank 1: no memory for it\n"),
        ("leave", "has ended without this save"),
        ("train on", " heard of the request too late"),
        ("train on unheard", "the request came too late"),
        ("stand still", "its loop does not take requests"),
    ],
)
def test_a_command_ends_whatever_the_ranks_do(
    trainers: list[FakeTrainer],
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ranks: str,
    message: str,
) -> None:
    def act(iteration: int) -> None:
        if ranks == "fail":
            trainers[1].call_off(iteration, asked_name(trainers, iteration), "no memory for it")
        elif ranks == "leave":
            for trainer in trainers:
                trainer.hang_up()

    monkeypatch.setattr("megatron_flashckpt.cli.save_now._PATIENCE_S", 1.0)
    if ranks == "train on unheard":
        monkeypatch.setattr(SaveRequests, "look", lambda _: None)
    with training(trainers, act) if ranks != "stand still" else contextlib.nullcontext():
        assert main(["save-now", str(root)]) == 1
    assert message in capsys.readouterr().err


def test_a_request_stays_until_every_rank_of_the_node_has_trained_its_iteration(
    node: Node, root: Path
) -> None:
    """Ranks complete an iteration one after the other; the last one must still find the request."""
    with agent_here(node, root):
        first, last = ranks = [node.trainer(root, rank, 2) for rank in range(2)]
        run = first.open_run()
        last.join(run)
        assert save_all(ranks, 1) == [None, None]
        assert first.slab is not None
        assert last.slab is not None
        first.slab.signals.trained, last.slab.signals.trained = 50, 49
        for iteration in (50, 70):
            PosixStore(root).create(request_file(run.name, iteration), b"")
        eventually("the request", lambda: save_at(last) == 50)
        last.slab.signals.trained = 50
        eventually("the next request", lambda: save_at(last) == 70)


@pytest.mark.parametrize("keeps", [False, True], ids=["nothing", "a save in memory"])
def test_an_agent_ends_a_save_that_lacks_the_part_of_its_rank(
    trainers: list[FakeTrainer], root: Path, other_node: Node, *, keeps: bool
) -> None:
    """The rank has trained on; the others may wait for the save before they do."""
    heard, late = trainers
    departed = other_node.trainer(root, 5, 6)
    departed.stage(1, new_save_id())
    departed.hang_up()
    run = heard.run
    assert run is not None
    assert heard.slab is not None
    assert late.slab is not None
    PosixStore(root).create(request_file(run.name, 50), b"")
    eventually("the request", lambda: save_at(late) == 50)
    heard.stage(50, asked_name(trainers, 50))
    heard.slab.signals.trained = late.slab.signals.trained = 50
    time.sleep(0.5)
    assert heard.client.poll().finished == (), "the rank may be about to save"
    if keeps:  # the memory interval comes at this iteration
        assert late.keep(50, save_name(run.name, 50_002)).error is None
    late.slab.signals.trained = 51
    assert heard.outcome().error == "rank 1 heard of the request too late"
    ends = [name for name in names_in(root) if name.endswith(".end") and "0000050" in name]
    assert ends == [f"{iteration_dir(50)}/{asked_name(trainers, 50)}.end"]
    assert decode_failure((root / ends[0]).read_bytes()).is_final, "no later attempt has the part"
    heard.slab.signals.trained = 51
    assert save_all(trainers, 60) == [None, None]


def test_a_second_command_waits_for_the_save_of_the_first(
    trainers: list[FakeTrainer], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with training(trainers, lambda iteration: save_as_asked(trainers, iteration)):
        assert main(["save-now", str(root), "--no-wait"]) == 0
        assert main(["save-now", str(root)]) == 0
    first, second, saved = capsys.readouterr().out.splitlines()
    iteration = first.split()[1]
    assert first.startswith(f"iteration {iteration} will be saved, in ")
    assert second == f"iteration {iteration} is requested already"
    assert saved == f"iter_{int(iteration):07d}: saved"


def test_nothing_is_requested_where_no_job_trains(
    node: Node, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root.mkdir(exist_ok=True)
    assert main(["save-now", str(root)]) == 1
    assert "no job trains and saves there" in capsys.readouterr().err
    assert not list(root.rglob("*"))
