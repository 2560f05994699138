"""Kill of a rank while the GPU copies into its slot, and the rank's next start.

The kernel must unlock page-locked memory before a process ends, so the time from the kill to the
end is measured, too.
"""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

from tools.gpu_check import machine
from tools.gpu_check.agents import agents_ended
from tools.gpu_check.child import Child, wait
from tools.gpu_check.held import held_in
from tools.gpu_check.report import Report
from tools.gpu_check.sections.errors import place, start

LETTER = "K"
TITLE = "SIGKILL and SIGTERM in the middle of copies"
SECONDS = 60
GPUS = 1
SIMULATED = True
MEGATRON = True
ALONE = False

_GIB = 4.0
_PATIENCE_S = 50.0
_STATUS = {"SIGKILL": -signal.SIGKILL, "SIGTERM": -signal.SIGTERM}


def run(report: Report) -> None:
    """Kill two ranks in the middle of a save of 4 GiB; one resumes, another ends as planned."""
    with tempfile.TemporaryDirectory(prefix="k-") as directory, agents_ended(Path(directory)):
        where = Path(directory)
        if machine.simulated_node is not None:  # each process takes seconds of a core
            _run(report, where, ("SIGKILL",))
            _report_slots(report, "SIGKILL", place(where, "SIGKILL"), 1)
            return
        # A rank holds 8 GiB of host memory, so two ranks run at a time.
        _run(report, where, ("SIGKILL", "planned"))
        _run(report, where, ("SIGTERM", "resume"))
        _report_slots(report, "SIGTERM", place(where, "SIGTERM"), 1)
        _report_slots(report, "a restart after SIGKILL", place(where, "SIGKILL"), 3)


def _run(report: Report, where: Path, scenarios: tuple[str, ...]) -> None:
    children = {scenario: _start(where, scenario) for scenario in scenarios}
    wait(list(children.values()), _PATIENCE_S)
    for scenario, child in children.items():
        child.pass_on(report)
        expected = _STATUS.get(scenario, 0)
        detail = f"status {child.status}: {child.output}" if child.status != expected else ""
        report.must(f"{scenario}: the process ends as it should", child.status == expected, detail)
        if (seconds := child.seconds_since("the end begins")) is not None:
            report.figure(f"{scenario}: from there to the end of the process", seconds, "s")
        if (seconds := child.value("memory taken in")) is not None:
            report.figure(f"{scenario}: slots taken from the agent in", seconds, "s")


def _start(where: Path, scenario: str) -> Child:
    if scenario != "resume":
        return start(where, scenario, _GIB)
    killed = place(where, "SIGKILL")
    return Child("doomed_rank", killed, SCENARIO=scenario, GIB=str(_GIB))


def _report_slots(report: Report, scenario: str, where: Path, iteration: int) -> None:
    held = held_in(where)
    report.must(f"{scenario}: save {iteration} is whole", held.is_whole(iteration), str(held))
    torn = [number for number in held.values if not held.is_whole(number)]
    report.must(f"{scenario}: no torn save is offered", not torn, str(held))
