"""A second start of a rank while its first process runs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_flashckpt.agent.incarnations import (
    Incarnations,
    RankProcess,
    ReplacedError,
    process_of,
)
from megatron_flashckpt.agent.slot_table import RankSlots
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import COMPLETE, SlotHeader, SlotState
from megatron_flashckpt.save.agent_link import NodeLink
from tests.agent.conftest import Node
from tests.agent.test_shard_writer import read_rank, stored
from tests.support.trainer import (
    PATIENCE_S,
    FakeTrainer,
    eventually,
    is_alive,
    new_save_id,
    suspend,
)

SECOND, THIRD = new_save_id(), new_save_id()
OLDER, NEWER = RankProcess(1, 11), RankProcess(2, 22)


def in_later_process(function: Callable[..., None], *args: object) -> None:
    """Run `function` in a process that starts now; the test fails if the process fails."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join(9 * PATIENCE_S)  # the process imports torch, perhaps on a busy machine
    assert process.exitcode == 0, "see the output above"


def test_a_slot_that_the_first_process_copies_is_never_committed(node: Node, root: Path) -> None:
    first = node.process(root, iterations=[1, 2], save_id=SECOND, stop="staging")
    first.stopped()
    second = node.process(root, iterations=[3, 4], save_id=THIRD, stop="committed")
    second.stopped()
    assert first.process.poll() is None, "the first process still runs"
    assert stored(root, 4).manifest.save_id == THIRD
    assert not (root / file_names.iteration_dir(2)).exists()


def test_the_first_process_is_refused_with_the_reason(node: Node, root: Path) -> None:
    first = node.trainer(root)
    data = first.stage(1, new_save_id())
    second = node.process(root, iterations=[2], save_id=SECOND, stop="committed")
    second.stopped()
    assert read_rank(stored(root, 1), first) == data, (
        "the staged slot of the first process is committed"
    )
    # Not "killed by the kernel, see dmesg": the agent runs.
    with pytest.raises(AgentError, match="has closed the connection of this rank") as closed:
        first.client.poll()
    assert "dmesg" not in str(closed.value)
    with pytest.raises(AgentError, match=f"process {second.process.pid} .*end it"):
        first.find_agent()
    assert stored(root, 2).manifest.save_id == SECOND
    second.kill()
    with pytest.raises(AgentError, match="end it"):
        node.trainer(root)


def test_the_next_agent_refuses_the_first_process_while_the_second_runs(
    node: Node, root: Path
) -> None:
    """The only agent that met the first process is gone before the second process connects."""
    first = node.trainer(root)
    _kill(first.client.agent_pid)
    second = node.process(root, iterations=[2], save_id=SECOND, stop="committed")
    second.stopped()
    with pytest.raises(AgentError, match=f"process {second.process.pid} .*end it"):
        first.find_agent()


def test_the_next_agent_commits_nothing_of_a_process_whose_run_was_overtaken(
    node: Node, root: Path
) -> None:
    """Only the former agent knew that the second process had replaced the first one."""
    first = node.trainer(root)
    run = first.open_run()
    assert first.save(1).error is None
    in_later_process(_take_over, root, node.config())
    first.find_agent()
    first.slab = None
    first.client.open_run(run)
    assert "has taken over" in (first.save(3).error or "")
    assert stored(root, 2)
    assert (root / file_names.TRACKER).read_text() == "2"


def _take_over(root: Path, config: Config) -> None:
    later = FakeTrainer(root, config)
    later.open_run(policy="take_over")
    assert later.save(2).error is None
    _kill(later.client.agent_pid)


def _kill(agent: int) -> None:
    os.kill(agent, signal.SIGKILL)
    eventually("the end of the agent", lambda: not is_alive(agent))


def test_a_link_saves_into_a_new_slab_while_the_former_process_runs(node: Node, root: Path) -> None:
    first = node.process(root, iterations=[1, 2], save_id=new_save_id(), stop="staging")
    first.stopped()
    in_later_process(_save_beside, root, node.config(), first.process.pid)
    assert first.process.poll() is None, "the first process still runs"


def _save_beside(root: Path, config: Config, former: int) -> None:
    link = NodeLink(str(root), 0, config)
    taken, offers = link.take_slab()
    assert taken is not None
    assert taken.read_only
    assert [offer.iteration for offer in offers] == [1]
    with pytest.raises(AgentError, match=f"process {former}, an earlier one .* may still"):
        link.client().acquire(3, new_save_id(), 0.0)
    made = link.ensure_slab(10, 10)
    assert not made.read_only
    assert not any(slot.header.state in COMPLETE for slot in made.slots)
    assert link.client().acquire(3, new_save_id(), 0.0) >= 0
    link.close(leave=False)


def test_a_link_reuses_the_slab_of_a_former_process_that_has_ended(node: Node, root: Path) -> None:
    """Otherwise the node would need two slabs for the rest of the job."""
    first = node.process(root, iterations=[1, 2], save_id=new_save_id(), stop="staging")
    first.stopped()
    in_later_process(_save_after, root, node.config(), first.process.pid)


def _save_after(root: Path, config: Config, former: int) -> None:
    link = NodeLink(str(root), 0, config)
    taken, offers = link.take_slab()
    assert taken is not None
    assert taken.read_only
    assert not link.has_slab, "the link needs a new slab"
    geometry = taken.geometry
    os.kill(former, signal.SIGKILL)
    eventually("the end of the former process", lambda: not is_alive(former))
    link.reclaim()
    assert link.has_slab
    made = link.ensure_slab(geometry.data_capacity, geometry.meta_capacity)
    held = [slot.index for slot in made.slots if slot.header.state in COMPLETE]
    assert held == [offer.slot for offer in offers], "the slots that the load used are still there"
    assert link.client().acquire(3, new_save_id(), 0.0) not in (-1, *held)
    link.close(leave=False)


def test_an_agent_that_never_met_the_former_process_protects_its_slab(
    node: Node, root: Path
) -> None:
    first = node.process(root, iterations=[1, 2], save_id=new_save_id(), stop="staging")
    first.stopped()
    in_later_process(_save_after_the_agent, root, node.config())
    assert first.process.poll() is None, "the first process still runs"


def _save_after_the_agent(root: Path, config: Config) -> None:
    link = NodeLink(str(root), 0, config)
    taken, _ = link.take_slab()
    assert taken is not None
    lost = link.client()
    os.kill(lost.agent_pid, signal.SIGKILL)
    assert link.replace_agent(lost)
    with pytest.raises(AgentError, match=r"an earlier one .* may still"):
        link.client().acquire(3, new_save_id(), 0.0)
    made = link.ensure_slab(10, 10)
    assert not made.read_only
    assert not any(slot.header.state in COMPLETE for slot in made.slots), "the link made a new slab"
    link.close(leave=False)


def test_a_start_warns_of_the_former_process(node: Node, root: Path) -> None:
    first = node.process(root, iterations=[1], save_id=new_save_id(), stop="committed")
    first.stopped()
    in_later_process(_read_the_warning, root, node.config(), first.process.pid)


def _read_the_warning(root: Path, config: Config, former: int) -> None:
    import logging

    lines: list[str] = []

    class _Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("megatron_flashckpt").addHandler(_Lines())
    FakeTrainer(root, config).hang_up()
    assert [line for line in lines if f"process {former}, an earlier one of this rank" in line]


def test_a_former_process_that_has_ended_has_no_effect(node: Node, root: Path) -> None:
    first = node.process(root, iterations=[1, 2], save_id=new_save_id(), stop="staging")
    first.stopped()
    first.kill()
    trainer = node.trainer(root)
    (offer,) = trainer.take()
    assert offer.iteration == 1
    assert trainer.slab is not None
    assert not trainer.slab.read_only
    assert trainer.save(3).error is None


def test_a_suspended_process_counts_as_running(node: Node, root: Path) -> None:
    first = node.process(root, iterations=[1, 2], save_id=new_save_id(), stop="staging")
    first.stopped()
    suspend(first.process.pid)
    try:
        in_later_process(_save_beside, root, node.config(), first.process.pid)
    finally:
        os.kill(first.process.pid, signal.SIGCONT)


# ---------------------------------------------------------------------- the served process


@pytest.fixture
def all_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankProcess, "is_alive", True)


@pytest.mark.usefixtures("all_alive")
def test_the_process_that_started_last_is_served() -> None:
    incarnations = Incarnations()
    assert incarnations.greet(OLDER, left=False) is None
    assert incarnations.greet(OLDER, left=False) is None, "the older process has reconnected"
    assert incarnations.greet(NEWER, left=False) == OLDER
    with pytest.raises(ReplacedError, match="process 22 "):
        incarnations.greet(OLDER, left=False)
    assert incarnations.greet(NEWER, left=False) is None


def test_a_replaced_process_is_refused_even_after_its_successor_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive = {OLDER, NEWER}
    monkeypatch.setattr(RankProcess, "is_alive", property(lambda process: process in alive))
    incarnations = Incarnations()
    incarnations.greet(OLDER, left=False)
    incarnations.greet(NEWER, left=False)
    alive.remove(NEWER)
    with pytest.raises(ReplacedError):
        incarnations.greet(OLDER, left=False)
    assert incarnations.greet(RankProcess(3, 33), left=False) is None


def test_a_slab_is_free_after_its_last_former_process_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots that the process left without handing them over are dropped; accepted ones stay."""
    alive = {OLDER, NEWER}
    monkeypatch.setattr(RankProcess, "is_alive", property(lambda process: process in alive))
    kept = [SlotState.STAGED, SlotState.DURABLE]
    states = [SlotState.STAGING, SlotState.STAGED, SlotState.KEPT, *kept]
    slots = RankSlots(Slab.create(len(states), 0, 100, "0"))
    slots.note_former(OLDER)
    slots.note_former(NEWER)
    for iteration, (slot, state) in enumerate(zip(slots.slab.slots, states, strict=True)):
        slot.set_header(SlotHeader(state, iteration, f"000001-aaaa.{iteration:05d}.1", 0, 100))
    slots.infos[3].accepted_at = 0.0
    alive.remove(NEWER)
    assert slots.formers() == (OLDER,)
    assert [slot.header.state for slot in slots.slab.slots] == states
    alive.remove(OLDER)
    assert slots.formers() == ()
    assert [slot.header.state for slot in slots.slab.slots] == [SlotState.EMPTY] * 3 + kept
    slots.slab.close()


@pytest.mark.usefixtures("all_alive")
def test_processes_may_connect_to_a_new_agent_in_any_order() -> None:
    incarnations = Incarnations()
    assert incarnations.greet(NEWER, left=False) is None
    for left in (False, True):
        with pytest.raises(ReplacedError):
            incarnations.greet(OLDER, left=left)


@pytest.mark.usefixtures("all_alive")
def test_a_process_that_ended_as_planned_does_not_count_as_former() -> None:
    incarnations = Incarnations()
    incarnations.greet(OLDER, left=False)
    assert incarnations.greet(NEWER, left=True) is None


def test_a_process_with_a_reused_pid_counts_as_another() -> None:
    left, right = socket.socketpair()
    with left, right:
        process = process_of(left)
    assert process is not None
    assert process.pid == os.getpid()
    assert process.is_alive
    assert not process._replace(started=process.started + 1).is_alive


def test_a_zombie_counts_as_ended() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    eventually("a zombie", lambda: not is_alive(pid))
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    assert not RankProcess(started, pid).is_alive
    os.waitpid(pid, 0)
