"""A job of two Megatron ranks and their agent: started, stopped at a point, killed, restarted."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatron_flashckpt.agent.process import of_stores
from tests.support import trainer
from tests.support.forked.nursery import nursery
from tests.support.stored import tracked
from tests.support.trainer import agents_under, end_agents, is_alive
from tools.crash import trouble
from tools.crash.roots import root_of
from tools.crash.start import RunPlan, start

RANKS = 2
#: Longest wait for any event; the cell fails after it.
PATIENCE_S = 60.0
#: Seconds that an agent has to hit its failpoint after its ranks have ended.
_LAST_S = 5.0


class CellError(AssertionError):
    """A check of a cell failed."""


eventually = functools.partial(trainer.eventually, within_s=PATIENCE_S)


def state_of(pid: int) -> str:
    """Return the letter of proc(5); `X` if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _stopped(
    what: str, pids: Callable[[], list[int]], root: Path | str, is_over: Callable[[], bool]
) -> int:
    """Wait until one of some processes is stopped at a failpoint; return its pid.

    On faulty storage an agent may hit a failpoint (of a removal, for example) once less, because
    of an error. In that case return 0 some seconds after `is_over()`.
    """
    over_at = math.inf

    def probe() -> list[int]:
        nonlocal over_at
        if stopped := [pid for pid in pids() if state_of(pid) == "T"]:
            return stopped
        if trouble.is_on_faulty_storage(root) and is_over():
            over_at = min(over_at, time.monotonic())
            if time.monotonic() > over_at + _LAST_S:
                trouble.note_missed_step(root)
                return [0]
        return []

    return eventually(what, probe)[0]


def agent_at(step: str, agent: int, root: Path | str, iteration: int) -> int:
    """Wait until an agent is stopped at its step in the save of `iteration`; return its pid.

    Return 0 if an error has kept it from that step, and wake the agent if it stops there later.
    """
    stopped = _stopped(
        f"the agent hits {step}", lambda: [agent], root, lambda: tracked(root) == str(iteration)
    )
    if not stopped:
        threading.Thread(target=_wake_at_its_step, args=(agent,), daemon=True).start()
    return stopped


def _wake_at_its_step(agent: int) -> None:
    while (state := state_of(agent)) not in "TXZ":
        time.sleep(0.05)
    if state == "T":
        wake(agent)


class Job:
    """Ranks in the directory `home`, restartable any number of times, and their agent."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.save = root_of(home)
        self.runtime_dir = home / "run"
        self._nursery = nursery()
        self._ranks: list[BaseProcess] = []
        self._runs = 0

    def start(self, plan: RunPlan, fault: str | None, *, linger: bool) -> None:
        """Start all ranks; `fault` is WHO:POINT:COUNT and stops that process there.

        With `linger` the ranks wait for SIGKILL instead of ending by themselves.
        """
        self._runs += 1
        trouble.await_names(self.save)
        for rank in range(RANKS):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "FLASHCKPT_RUNTIME_DIR": str(self.runtime_dir),
                "FLASHCKPT_AGENT__GRACE_S": "60",
                "FLASHCKPT_AGENT__KEEP_UNWRITTEN_S": "0",  # no agent outlives its test
                "FLASHCKPT_OTHER_WRITER_WAIT_S": "0",
                **trouble.environment(self.save),
                **of_stores(os.environ),
            }
            if fault is not None:
                environment["FLASHCKPT_FAULT"] = f"{fault}:STOP:{self.reached}"
            process = self._nursery.Process(
                target=start,
                args=(environment, str(self._log(rank)), plan, self._report(rank), linger),
                daemon=True,
            )
            process.start()
            self._ranks.append(process)

    @property
    def reached(self) -> Path:
        """The file that a process creates when it hits the fault of this run."""
        return self.home / f"run-{self._runs}.reached"

    def _log(self, rank: int) -> Path:
        return self.home / f"run-{self._runs}-rank-{rank}.log"

    def _report(self, rank: int) -> Path:
        return self.home / f"run-{self._runs}-rank-{rank}.jsonl"

    def log(self) -> str:
        """Return the output of the ranks of this run."""
        return "".join(self._log(rank).read_text(errors="replace") for rank in range(RANKS))

    def reports(self, name: str) -> list[list[dict[str, Any]]]:
        """Return, by rank, the events of this run that have the key `name`."""
        events = []
        for rank in range(RANKS):
            with contextlib.suppress(FileNotFoundError):
                lines = self._report(rank).read_text().splitlines()
                events.append([event for event in map(json.loads, lines) if name in event])
        return events + [[]] * (RANKS - len(events))

    # ------------------------------------------------------------------ processes

    @property
    def trainers(self) -> list[int]:
        return [process.pid or 0 for process in self._ranks]

    @property
    def agents(self) -> list[int]:
        return agents_under(self.runtime_dir)

    def stopped(self, who: str) -> int:
        """Wait until the fault has happened; return the stopped process, or 0 (see `_stopped`)."""

        def pids() -> list[int]:
            if self.reached.exists():
                return self.agents if who == "agent" else [self.trainers[int(who[4:])]]
            self._fail_if_a_rank_ended()
            return []

        return _stopped(
            f"{who} hits its failpoint",
            pids,
            self.save,
            lambda: who == "agent" and all(self.reports("ended")),
        )

    def await_all(self, name: str) -> None:
        """Wait until all ranks have reported `name`."""

        def probe() -> bool:
            if all(self.reports(name)):
                return True
            self._fail_if_a_rank_ended()
            return False

        eventually(f"all ranks report '{name}'", probe)

    def _fail_if_a_rank_ended(self) -> None:
        if any(not is_alive(pid) for pid in self.trainers):
            raise CellError(f"a rank ended by itself: {self.log()[-3000:]}")

    def join(self) -> None:
        """Wait until the ranks have ended as planned, and the agent after them."""
        for process in self._ranks:
            process.join(PATIENCE_S)
        codes = [process.exitcode for process in self._ranks]
        if codes != [0] * RANKS:
            raise CellError(f"exit codes {codes}: {self.log()[-3000:]}")
        self._ranks = []
        eventually("the agent leaves", lambda: not self.agents)

    def kill_trainers(self) -> None:
        """Kill the ranks as torchrun or a scheduler does, but without a delay."""
        for pid in self.trainers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._ranks:
            process.join(PATIENCE_S)
        self._ranks = []

    def kill_agents(self) -> None:
        end_agents(self.runtime_dir)

    @contextlib.contextmanager
    def agent_at_rest(self) -> Iterator[None]:
        """Stop the agent inside the `with` block."""
        woken = []
        for pid in self.agents:
            if state_of(pid) != "T":
                os.kill(pid, signal.SIGSTOP)
                woken.append(pid)
                eventually("the agent is stopped", lambda pid=pid: state_of(pid) in "TXZ")  # type: ignore[misc]
        try:
            yield
        finally:
            for pid in woken:
                wake(pid)

    def close(self) -> None:
        """Leave no process behind."""
        self.kill_trainers()
        self.kill_agents()


def wake(pid: int) -> None:
    """Continue a stopped process; do nothing if `pid` is 0."""
    if not pid:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
