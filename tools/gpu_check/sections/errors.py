"""Rules for a GPU that fails or hangs: the process ends, and its next start gets no torn save."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tools.gpu_check import machine
from tools.gpu_check.agents import agents_ended
from tools.gpu_check.child import Child, wait
from tools.gpu_check.held import held_in
from tools.gpu_check.report import Report

LETTER = "X"
TITLE = "a GPU that fails or hangs"
SECONDS = 70
GPUS = 1
SIMULATED = True
MEGATRON = True
ALONE = False

BREAKING = ("broken before a save", "broken during copies", "broken at exit")
BUSY = "busy for ever"
#: Longest time from the failure to the end of the process.
END_S = 10.0
_PATIENCE_S = 50.0


def run(report: Report) -> None:
    """Let the GPU fail under ranks in processes with agents of their own."""
    with tempfile.TemporaryDirectory(prefix="x-") as directory, agents_ended(Path(directory)):
        where = Path(directory)
        # On a GPU a hanging process takes time from the others, so it runs in a round of its own.
        # On the simulated node a process takes seconds of a core, so there is only one.
        rounds = machine.pick([BREAKING, (BUSY, "control")], [(BREAKING[1],)])
        children: dict[str, Child] = {}
        for scenarios in rounds:
            started = {scenario: start(where, scenario) for scenario in scenarios}
            wait(list(started.values()), _PATIENCE_S)
            children |= started
        control = children.pop("control", None)
        for scenario, child in children.items():
            _report(report, scenario, child, control)
            _report_slots(report, scenario, place(where, scenario))


def place(where: Path, scenario: str) -> Path:
    """Return the directory of a scenario's child; its name is short for the path of a socket."""
    return where / scenario.title().replace(" ", "")


def start(where: Path, scenario: str, gib: float = 2.0) -> Child:
    """Start a rank for a scenario."""
    return Child("doomed_rank", place(where, scenario), SCENARIO=scenario, GIB=str(gib))


def _report(report: Report, scenario: str, child: Child, control: Child | None) -> None:
    child.pass_on(report)
    seconds = child.seconds_since("the end begins")
    limit = machine.pick(END_S, 3 * END_S)  # the simulated node may run on two slow cores
    if scenario == BUSY and control is not None:
        # The driver may make any process wait for a kernel; our exit must not wait longer.
        plain = control.seconds_since("the end begins") or 0.0
        report.figure("GPU busy for ever: end of a process without saves", plain, "s")
        limit = max(END_S, plain + 2.0)
    report.must(
        f"GPU {scenario}: the process ends within {limit:.0f} s",
        seconds is not None and seconds <= limit,
        f"status {child.status}: {child.output}" if seconds is None else f"{seconds:.2f} s",
    )
    if (abandoned := child.value("abandoned in")) is not None:
        report.figure(f"GPU {scenario}: given up by our exit in", abandoned, "s")


def _report_slots(report: Report, scenario: str, where: Path) -> None:
    held = held_in(where)
    if scenario == "broken at exit":
        report.must(f"GPU {scenario}: the staged save is whole", held.is_whole(2), str(held))
        return
    report.must(f"GPU {scenario}: the older save is whole", held.is_whole(1), str(held))
    torn = [iteration for iteration in held.values if not held.is_whole(iteration)]
    report.must(f"GPU {scenario}: no torn save is offered", not torn, str(held))
