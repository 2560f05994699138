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
    process_with,
)
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.memory.slot import COMPLETE
from megatron_flashckpt.save.node_link import NodeLink
from tests.agent.conftest import Node
from tests.support.stored import read_rank, stored
from tests.support.trainer import (
    PATIENCE_S,
    eventually,
    is_alive,
    new_save_id,
)

SECOND, THIRD = new_save_id(), new_save_id()
OLDER, NEWER = RankProcess(1, 11), RankProcess(2, 22)


def in_later_process(function: Callable[..., None], *args: object) -> None:
    """Run `function` in a process that starts now; the test fails if the process fails."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join(9 * PATIENCE_S)  # the process imports torch, perhaps on a busy machine
    assert process.exitcode == 0, "see the output above"


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
        link.client().acquire(0.0)
    lost = link.client()
    os.kill(lost.agent_pid, signal.SIGKILL)
    assert link.replace_agent(lost)
    with pytest.raises(AgentError, match=r"an earlier one .* may still"):
        link.client().acquire(0.0)  # this agent never met the former process
    made = link.ensure_slab(10, 10)
    assert not made.read_only
    assert not any(slot.header.state in COMPLETE for slot in made.slots)
    assert link.client().acquire(0.0) >= 0
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
    assert link.client().acquire(0.0) not in (-1, *held)
    link.close(leave=False)


# ---------------------------------------------------------------------- the served process


@pytest.mark.parametrize(
    "greetings",
    [
        # The first process has reconnected before the second one started.
        [(OLDER, None), (OLDER, None), (NEWER, OLDER), (OLDER, "refused"), (NEWER, None)],
        [(NEWER, None), (OLDER, "refused"), (OLDER, "refused")],
    ],
    ids=["in order", "at a new agent, in any order"],
)
def test_the_process_that_started_last_is_served(
    greetings: list[tuple[RankProcess, RankProcess | str | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even after it has ended."""
    alive = {OLDER, NEWER}
    monkeypatch.setattr(RankProcess, "is_alive", property(lambda process: process in alive))
    incarnations = Incarnations()
    for process, former in greetings:
        if former == "refused":
            with pytest.raises(ReplacedError, match="process 22 "):
                incarnations.greet(process, left=False)
        else:
            assert incarnations.greet(process, left=False) == former
    alive.remove(NEWER)
    with pytest.raises(ReplacedError):
        incarnations.greet(OLDER, left=False)
    assert incarnations.greet(RankProcess(3, 33), left=False) is None


def test_a_process_that_ended_as_planned_does_not_count_as_former(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RankProcess, "is_alive", True)
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


def test_the_name_of_a_program_may_hold_any_bytes() -> None:
    name = Path("/proc/self/comm")
    former = name.read_bytes()
    name.write_bytes(b"\xff) R 1")
    try:
        process = process_with(os.getpid())
    finally:
        name.write_bytes(former)
    assert process is not None
    assert process.is_alive


def test_a_zombie_counts_as_ended() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    eventually("a zombie", lambda: not is_alive(pid))
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    assert not RankProcess(started, pid).is_alive
    os.waitpid(pid, 0)
