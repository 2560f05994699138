"""Rules for the end of a rank: the process ends in time, and its next start gets no torn save.

A rank is killed while the GPU copies into its slot, or its GPU fails or hangs. The kernel must
unlock page-locked memory before a process ends, so the time until the end is measured, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import tempfile
from pathlib import Path

from tests.support.trainer import end_agents
from tools.gpu_check import machine
from tools.gpu_check.process import Child, wait
from tools.gpu_check.rank import held_in
from tools.gpu_check.report import Report


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Scenario of `doomed_rank`, and what its next start must find."""

    name: str
    status: int | None = 0
    """Exit status; None: any."""
    whole: int | None = 1
    """Iteration of the save that must be whole in the slots; None: the slots are not looked at."""


_KILLED = Scenario("SIGKILL", -signal.SIGKILL)
_BREAKS = Scenario("broken during copies", None)
#: A process without saves on a busy GPU: the driver may let any process wait for a kernel.
_CONTROL = Scenario("control", None, None)
#: Rounds of scenarios that run side by side; a rank holds 6 GiB of host memory. A hanging process
#: takes time from the others, so it comes last.
_ROUNDS = (
    (
        _KILLED,
        Scenario("broken before a save", None),
        _BREAKS,
        Scenario("broken at exit", None, whole=2),
    ),
    (Scenario("resume", whole=3), Scenario("busy for ever", None), _CONTROL),
)
_GIB = 3.0
_PATIENCE_S = 30.0
#: Figure of a rank: the time at which its end begins.
_BEGIN = "the end begins"
#: Longest time from the event to the end of the process.
_END_S = 10.0


def run(report: Report) -> None:
    """End ranks in all ways, in processes with agents of their own; one rank resumes."""
    # On the simulated node a process takes seconds of a core.
    rounds = machine.pick(_ROUNDS, ((_KILLED, _BREAKS),))
    with tempfile.TemporaryDirectory(prefix="k-") as directory, contextlib.ExitStack() as stack:
        where = Path(directory)
        stack.callback(end_agents, where)
        for scenarios in rounds:
            children = {scenario: _start(where, scenario) for scenario in scenarios}
            wait(list(children.values()), _PATIENCE_S)
            control = children.pop(_CONTROL, None)
            plain_s = (control.seconds_since(_BEGIN) if control else None) or 0.0
            for scenario, child in children.items():
                _report_end(report, scenario, child, max(_END_S, plain_s + 2.0))
                # The agent of the killed rank serves the rank that resumes in the next round.
                if scenario.whole and (scenario is not _KILLED or scenarios is rounds[-1]):
                    _report_slots(report, scenario, _place(where, scenario))


def _place(where: Path, scenario: Scenario) -> Path:
    """Return the directory of a scenario; its name is short for the path of a socket."""
    name = _KILLED.name if scenario.name == "resume" else scenario.name
    return where / name.title().replace(" ", "")


def _start(where: Path, scenario: Scenario) -> Child:
    place = _place(where, scenario)
    return Child(
        "tools.gpu_check.doomed_rank", place, {"SCENARIO": scenario.name, "GIB": str(_GIB)}
    )


def _report_end(report: Report, scenario: Scenario, child: Child, limit: float) -> None:
    name = scenario.name
    child.pass_on(report)
    if scenario.status is not None:
        detail = "" if child.status == scenario.status else f"status {child.status}: {child.output}"
        what = f"{name}: the process ends as it should"
        report.must(what, child.status == scenario.status, detail)
    seconds = child.seconds_since(_BEGIN)
    limit *= machine.pick(1, 3)  # the simulated node may run on two slow cores
    report.must(
        f"{name}: the process ends within {limit:.0f} s",
        seconds is not None and seconds <= limit,
        f"status {child.status}: {child.output}" if seconds is None else f"{seconds:.2f} s",
    )
    if seconds is not None:
        what = f"{name}: from there to the end of the process"
        report.figure(what, seconds, "s", headline=scenario is _KILLED)
    for what in ("memory taken in", "abandoned in"):
        if (value := child.value(what)) is not None:
            report.figure(f"{name}: {what}", value, "s")


def _report_slots(report: Report, scenario: Scenario, where: Path) -> None:
    held = held_in(where)
    what = f"{scenario.name}: save {scenario.whole} is whole"
    report.must(what, held.is_whole(scenario.whole or 0), str(held))
    torn = [iteration for iteration in held.values if not held.is_whole(iteration)]
    report.must(f"{scenario.name}: no torn save is offered", not torn, str(held))
