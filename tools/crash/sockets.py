"""Cells of lost sockets: a cleaner of temporary files removes an agent's files during a save.

The agent is stopped at its step while its socket, or every file of its directory, is removed. Then
the agent and its trainer continue; or (`at_once`) the trainer dies first, and its successor starts
before the agent has noticed the missing files. Both trainers must find the same agent with its
memory; an iteration that only memory holds proves this. A trainer that finds no socket waits for
one, and kills the agent after 10 s. So a different agent means that the files were not restored.

Steps of trainers are left out, because a connected trainer needs no file of the agent. Steps of
agents that hold copies for each other are left out, because those agents communicate over ports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from pathlib import Path

from megatron_flashckpt.agent.socket_dir import LOCK, LOG, SOCKET, holder
from megatron_flashckpt.config import Retention
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.file_format.file_names import MANIFEST, iteration_dir
from tests.agent.conftest import Node
from tests.agent.test_shard_writer import read_rank, stored
from tests.support.trainer import FakeTrainer, content, is_alive, new_save_id
from tools.crash import trouble
from tools.crash.family import FamilyCell
from tools.crash.job import CellError, agent_at, eventually, wake
from tools.crash.peers import agent_fault
from tools.crash.rivals import COUNTS, FAILING
from tools.crash.truth import await_tidy, check_left, check_storage, committed

SOCKET_GONE, ALL_GONE = "socket removed", "all files removed"
_BEFORE = {"agent.attached": (1,), "agent.granted": (2,), "agent.enqueued": (2,)}
_RETENTION = Retention(latest=1)
#: Longest wait of a start for the end of the previous run.
_AWAIT_S = 20.0


@dataclasses.dataclass(frozen=True)
class LostSocket(FamilyCell):
    """The agent loses its files at the `count`th hit of `point`."""

    point: str
    count: int
    gone: str
    at_once: bool
    """The trainer dies at the same time, and a successor starts."""
    fails: bool = False
    """The manifest of iteration 2 cannot be stored."""

    @property
    def place(self) -> tuple[tuple[str, str], str]:
        return ("agent, files removed", self.point), self.gone

    def __str__(self) -> str:
        then = "trainer dies" if self.at_once else "trainer goes on"
        return f"lost socket: agent:{self.point}:{self.count}, {self.gone}, {then}"

    def run(self, home: Path) -> None:
        node = Node(home / "run")
        try:
            _run_scenario(self, home, node)
        finally:
            node.close()


def lost_sockets() -> list[FamilyCell]:
    """Return all cells: both losses at every step; `at_once` alternates."""
    steps = [
        (point, count, fails)
        for points, fails in ((_BEFORE, False), (COUNTS, False), (FAILING, True))
        for point, counts in points.items()
        for count in counts[-1:]
    ]
    return [
        LostSocket(point, count, gone, (number + turn) % 2 == 0, fails)
        for number, (point, count, fails) in enumerate(steps)
        for turn, gone in enumerate((SOCKET_GONE, ALL_GONE))
    ]


def _run_scenario(cell: LostSocket, home: Path, node: Node) -> None:
    root = home / "save"
    config = node.config(answer_timeout_s=600.0)
    with agent_fault(f"agent:{cell.point}:{cell.count}:STOP:{home / 'reached'}"):
        trainer = node.trainer(root, config=config, retention=_RETENTION)
    (agent,) = node.agents()
    trainer.claim()
    training = threading.Thread(target=_train, args=(cell, trainer), daemon=True)
    training.start()
    stopped = agent_at(cell.point, agent, root, 2)
    if cell.fails:
        (root / iteration_dir(2) / MANIFEST).rmdir()
    directory = node.directory(root)
    for name in [SOCKET] if cell.gone == SOCKET_GONE else [SOCKET, LOCK, LOG]:
        (directory / name).unlink()
    if cell.at_once:
        trainer.client._sock.shutdown(socket.SHUT_RDWR)
    wake(stopped)
    training.join()
    last = 2
    if not cell.at_once:
        _saved(trainer, last := 3)
        _kept(trainer, last := 4)
        eventually("the agent restores its files", lambda: _is_reachable(directory, agent))
    trainer.hang_up()

    with agent_fault(None):  # an agent started here must not get the fault of another cell
        again = node.trainer(root, config=config, retention=_RETENTION)
    again.claim(wait_s=_AWAIT_S)
    least = {"agent.attached": 0, "agent.granted": 1}.get(cell.point, 2) if cell.at_once else last
    if again.client.agent_pid == agent:
        eventually("only one agent runs", lambda: node.agents() == [agent])
        _check_memory(again, least)
    elif cell.gone == SOCKET_GONE or not cell.at_once:
        raise CellError(f"agent {again.client.agent_pid} has replaced agent {agent}")
    # Otherwise no file named the old agent: a new agent serves, and storage is restored.
    newest = _restored(again)
    if again.client.agent_pid != agent and newest < min(least, 1):
        raise CellError(f"iteration {newest} was restored")
    _saved(again, newest + 1)
    trouble.end(root)
    _saved(again, newest + 2)
    check_storage(root)
    await_tidy(root, newest + 2)
    serving = again.client.agent_pid
    again.hang_up(leave=True)
    eventually("the agent leaves", lambda: not is_alive(serving))
    # An agent that logged an error keeps its log, but the cleaner has removed the error.
    if not node.agents() and not (cell.fails and cell.gone == ALL_GONE):
        check_left(node.runtime_dir)


def _is_reachable(directory: Path, agent: int) -> bool:
    return (directory / SOCKET).exists() and holder(directory) == agent


def _check_memory(trainer: FakeTrainer, least: int) -> None:
    """Fail if memory does not hold the iteration `least` or a newer one."""
    newest = max((offer.iteration for offer in trainer.take()), default=0)
    if newest < least:
        raise CellError(f"iteration {newest} is the newest in memory, expected {least}")


def _restored(trainer: FakeTrainer) -> int:
    """Resume from the newest checkpoint, in memory or storage; return its iteration."""
    offers = trainer.take()
    newest = max(offers, key=lambda offer: offer.iteration, default=None)
    done = max(committed(trainer.root), default=0)
    save_id, data = None, None
    if newest is not None and newest.iteration >= done:
        done, save_id = newest.iteration, newest.save_id
        data = trainer.bytes_in(newest.slot)
    elif done:
        checkpoint = stored(trainer.root, done)
        save_id = checkpoint.manifest.save_id
        data = read_rank(checkpoint, trainer)
    if data is not None and data != content(0, done, trainer.layout.nbytes):
        raise CellError(f"iteration {done} has other bytes")
    trainer.client.resume_from(save_id, done)
    return done


def _train(cell: LostSocket, trainer: FakeTrainer) -> None:
    with contextlib.suppress(AgentError):  # the trainer dies
        _saved(trainer, 1)
        trouble.begin(trainer.root)  # earlier errors would shift the hits that `cell.count` counts
        if cell.fails:
            (trainer.root / iteration_dir(2) / MANIFEST).mkdir(parents=True)
        error = trainer.save(2, new_save_id()).error
        if (error is not None) != cell.fails:
            raise CellError(f"iteration 2: {error}")


def _saved(trainer: FakeTrainer, iteration: int) -> None:
    if error := trainer.save(iteration).error:
        raise CellError(f"iteration {iteration}: {error}")


def _kept(trainer: FakeTrainer, iteration: int) -> None:
    if error := trainer.keep(iteration).error:
        raise CellError(f"iteration {iteration} for memory only: {error}")
