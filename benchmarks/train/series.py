"""Rounds of `python -m benchmarks train`: every system once in each, and what came of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import rich.progress
from rich.console import Console

from benchmarks.compare.driver import machine
from benchmarks.study import Result, turned
from benchmarks.train.figures import figures_of, objections, spreads, usual_step_s
from benchmarks.train.job import JobError, Megatron
from benchmarks.train.measure import Measured, Session
from benchmarks.train.report import table_of
from benchmarks.train.sizes import Schedule
from benchmarks.train.systems import System


class Budget:
    """Seconds that a study may take in all, from now on: a run begins only if it may end in time.

    Args:
        run_s: expected seconds of a run of which none has been measured.
    """

    def __init__(self, seconds: float, run_s: float) -> None:
        self.ends_at = time.monotonic() + seconds
        self._run_s = run_s
        self._took: dict[Hashable, float] = {}

    def has_time(self, run: Hashable) -> bool:
        """Return whether a run is expected to end in time: as long as the last of its kind took."""
        expected = self._took.get(run, self._run_s)
        return time.monotonic() + expected <= self.ends_at

    def took(self, run: Hashable, seconds: float) -> None:
        self._took[run] = seconds


class Series:
    """Rounds of a study, with their figures and errors.

    Args:
        budget: if given, a run begins only if it is expected to end in time, and every round begins
            with the runs without saves, because no other run has a result without them.
    """

    def __init__(
        self,
        systems: list[System],
        megatrons: dict[str, Megatron],
        schedule: Schedule,
        budget: Budget | None = None,
    ) -> None:
        self._systems, self._megatrons, self._schedule = systems, megatrons, schedule
        self._budget = budget
        self.errors: list[str] = []
        self._entries: dict[str, dict[str, Any]] = {}
        for system in systems:
            fields = {"label": system.label, "saves": system.saves, "baseline": system.baseline}
            self._entries[system.name] = {**fields, "rounds": [], "runs": [], "usual_step_s": []}
        self._failed: set[str] = set()
        self._reasons: dict[str, str] = {}

    def run(self, session: Session, rounds: int, **settings: Any) -> Iterator[Result]:
        """Run all rounds; yield errors, the table and the figures, even after an interruption.

        With a budget, only the first round has restarts.

        Args:
            settings: further fields of the figures.
        """
        began_at = time.time()
        interruption: BaseException | None = None
        try:
            console = Console(stderr=True, highlight=False, soft_wrap=True)
            # Drawing must not take the cores that train.
            with rich.progress.Progress(
                console=console,
                refresh_per_second=1,
                transient=True,
                disable=not console.is_terminal,
            ) as bar:
                task = bar.add_task("starting", total=rounds * len(self._systems))

                def begin(run: str) -> None:
                    if not console.is_terminal:
                        console.print(run)
                    bar.update(task, advance=1, description=run)
                    session.progress = lambda step: bar.update(task, description=f"{run}: {step}")

                for number in range(rounds):
                    session.restarts = number == 0 or self._budget is None
                    self.round(session, number, begin)
        except (KeyboardInterrupt, SystemExit) as error:
            interruption = error
        yield from self.errors
        figures = {
            "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began_at)),
            "seconds": round(time.time() - began_at),
            "machine": machine(session.root),
            **settings,
            "schedule": dataclasses.asdict(self._schedule),
            "rounds": self.most_rounds,
            "errors": self.errors,
            **self.figures(),
        }
        yield table_of(figures)
        yield figures
        if interruption:
            raise interruption

    def round(
        self, session: Session, number: int, begin: Callable[[str], None] = lambda run: None
    ) -> None:
        """Run every system once, except those that have failed before; record the figures.

        Args:
            begin: receives the name of each run before it begins.
        """
        runs: dict[str, Measured] = {}
        try:
            for system in self._order(number):
                begin(f"round {number + 1}: {system.label}")
                if system.name not in self._failed and self._has_time(session, system):
                    began_at = time.monotonic()
                    try:
                        runs[system.name] = self._measure(session, system)
                    except (JobError, OSError) as error:
                        self._fail(system, number, str(error), "; left out of later rounds")
                        self._failed.add(system.name)
                    if self._budget:
                        self._budget.took(self._kind(session, system), time.monotonic() - began_at)
        finally:
            for system in self._systems:
                if system.name in runs:
                    self._judge(system, number, runs)

    def _order(self, number: int) -> list[System]:
        order = turned(self._systems, 2 * number)
        return sorted(order, key=lambda system: system.saves) if self._budget else order

    def _has_time(self, session: Session, system: System) -> bool:
        if self._budget is None or self._budget.has_time(self._kind(session, system)):
            return True
        if not self._entries[system.name]["rounds"]:
            self._reasons.setdefault(system.name, "not run: no time was left")
        return False

    @staticmethod
    def _kind(session: Session, system: System) -> tuple[str, bool]:
        return system.name, session.restarts

    def _measure(self, session: Session, system: System) -> Measured:
        megatron = self._megatrons[system.megatron]
        try:
            return session.measure(system, megatron)
        except JobError as error:
            if not system.hangs_with or system.hangs_with not in error.log:
                raise
        return session.measure(system, megatron)

    def _judge(self, system: System, number: int, runs: dict[str, Measured]) -> None:
        run, baseline = runs[system.name], runs.get(system.baseline)
        if baseline is None:
            self._fail(system, number, f"no run '{system.baseline}' to compare with")
            return
        if reasons := objections(self._schedule, run, baseline):
            self._fail(system, number, "no result: " + "; ".join(reasons))
            return
        if run.restart_error:
            self._note(system, number, f"a restart failed: {run.restart_error}")
        entry = self._entries[system.name]
        entry["rounds"].append(figures_of(self._schedule, run, baseline))
        entry["runs"].append({"ended_at": run.ended_at, "saved": run.saved, "owed_s": run.owed_s})
        if not system.saves:
            entry["usual_step_s"].append(usual_step_s(run))
        elif missing := {*self._schedule.saved_at, self._schedule.iterations} - {*run.saved}:
            left_out = ", ".join(map(str, sorted(missing)))
            self._note(system, number, f"left out the saves of iterations {left_out}")

    def _note(self, system: System, number: int, what: str) -> None:
        self.errors.append(f"{system.label}, round {number + 1}: {what}")

    def _fail(self, system: System, number: int, what: str, more: str = "") -> None:
        self._note(system, number, what + more)
        self._reasons[system.name] = what

    @property
    def most_rounds(self) -> int:
        """Largest number of rounds in which a system has a result."""
        return max(len(entry["rounds"]) for entry in self._entries.values())

    def figures(self) -> dict[str, Any]:
        systems = {}
        for name, entry in self._entries.items():
            values = spreads(entry["rounds"])
            failed = None if values else self._reasons.get(name)
            systems[name] = {**entry, "figures": values, "failed": failed}
        return {"systems": systems}
