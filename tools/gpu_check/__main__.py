"""Check the package on this machine's GPU: `scripts/gpu_check`.

Every section runs in a process of its own with a time limit. The exit status is 1 if a rule (MUST)
is broken or a section has crashed. Without a GPU, sections that support it run on a simulated GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tools.gpu_check import process
from tools.gpu_check.discovery import PACKAGE, Section, sections
from tools.gpu_check.process import Line
from tools.gpu_check.report import SKIP
from tools.gpu_check.table import Output

#: Seconds without which a section is not started.
_LEAST_S = 5.0
#: Factor of the time limits on a simulated node, because its machine may have few, busy cores.
_SIMULATED_FACTOR = 5.0
_FILE = "gpu_check.jsonl"


def main(arguments: list[str]) -> int:
    """Run the sections that the arguments name; return the exit status."""
    given = _parser().parse_args(arguments)
    wanted = [
        candidate
        for candidate in sections(given.package)
        if not given.only or candidate.label in given.only
    ]
    file = given.json
    if file is not None:
        file.write_text("")
    output, lines = Output(), list[Line]()
    skipped: list[tuple[str, str]] = []
    deadline = time.monotonic() + given.budget
    gpus = _gpus() if any(section.gpus for section in wanted) else 0
    for section in wanted:
        name = f"{section.label} {section.title}"
        limit_s = _limit_s(section, deadline - time.monotonic(), gpus)
        if why := section.why_not(gpus) or ("" if limit_s >= _LEAST_S else "no time left"):
            skipped.append((name, why))
            continue
        with output.running(section, limit_s):
            outcome = process.run(section, given.package, limit_s)
        output.ended(section, outcome)
        lines += outcome.lines
        skipped += [
            (f"{name}: {line['what']}", line["detail"])
            for line in outcome.lines
            if line["kind"] == SKIP
        ]
        if file is not None:
            with file.open("a") as stream:
                stream.writelines(json.dumps(line) + "\n" for line in outcome.lines)
    output.table(lines)
    output.skipped(skipped)
    output.verdict(lines)
    return int(any(line["ok"] is False for line in lines))


def _gpus() -> int:
    """Return the number of GPUs that sections will see, without making a CUDA context."""
    import torch  # takes seconds

    return torch.cuda.device_count()


def _limit_s(section: Section, left_s: float, gpus: int) -> float:
    if section.takes_the_remaining_time:
        return left_s
    is_simulated = gpus == 0 and section.gpus > 0
    return min(section.seconds * (_SIMULATED_FACTOR if is_simulated else 1.0), left_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    parser.add_argument(
        "--budget",
        type=float,
        default=520.0,
        metavar="SECONDS",
        help="time for all sections together (%(default)s)",
    )
    parser.add_argument(
        "--only", type=lambda text: text.split(","), metavar="E,D,...", help="run these sections"
    )
    parser.add_argument(
        "--json",
        nargs="?",
        type=Path,
        const=Path(_FILE),
        metavar="FILE",
        help="write every fact as a line of JSON (%(const)s)",
    )
    parser.add_argument("--package", default=PACKAGE, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
