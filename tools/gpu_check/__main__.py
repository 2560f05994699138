"""Check the package on this machine's GPU: `scripts/gpu_check`.

Sections are processes with time limits, forked from one that has imported torch and Megatron. The
most telling sections come first. Sections that measure times run alone, the others side by side.
The last lines are a table for an issue. The exit status is 1 if a rule (MUST) is broken or a
section has crashed. Without a GPU, sections run on a simulated GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import itertools
import json
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tools.gpu_check import process, table
from tools.gpu_check.about import about
from tools.gpu_check.forkserver import ENVIRONMENT, ROOT, forkserver
from tools.gpu_check.sections import Section

#: Seconds without which a section is not started.
_LEAST_S = 5.0
#: Seconds of the budget that are kept for killing the last section and for the table.
_RESERVE_S = 3.0
#: Factor of the time limits on a simulated node, because its machine may have few, busy cores.
_SIMULATED_FACTOR = 5.0
#: Sections that run side by side have so many cores each.
_CORES_PER_SECTION = 4
#: Modules that most sections import, in addition to their own ones.
_IMPORTED = (
    *("megatron.training.training", "tests.simulated_gpu", "scripts.pretrain_gpt_tiny"),
    "tools.gpu_check.doomed_rank",
)


def main(arguments: list[str]) -> int:
    given = _parser().parse_args(arguments)
    wanted = [
        section
        for section in importlib.import_module(given.package).SECTIONS
        if not given.only or section.label in given.only
    ]
    run = Run(given, time.monotonic() + given.budget - _RESERVE_S)
    os.environ.update(ENVIRONMENT)
    for name in [name for name in os.environ if name.startswith("FLASHCKPT_")]:
        del os.environ[name]  # no settings come from outside
    path = (str(ROOT), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    started = time.monotonic()
    modules = _imported(given.package, wanted)
    with forkserver(modules, dict(os.environ)) as (found, kill_all):
        how = "" if found["forks"] else "; an import has started CUDA, so every section imports"
        print(f"imports: {time.monotonic() - started:.1f} s{how}", flush=True)
        run.gpus = found["gpus"]
        for alone, group in itertools.groupby(wanted, lambda section: section.alone):
            with concurrent.futures.ThreadPoolExecutor(1 if alone else given.jobs) as pool:
                try:
                    list(pool.map(run.section, group))
                except KeyboardInterrupt:
                    kill_all()  # then the threads of the pool tidy up and end
                    raise
    run.results.sort(key=lambda result: wanted.index(result[0]))
    print(f"\n{table.summary(run.about, run.results)}")
    return int(any(outcome.failed for _, outcome in run.results))


class Run:
    """Results of the sections that have ended; used by several threads."""

    def __init__(self, given: argparse.Namespace, deadline: float) -> None:
        self.gpus = 0
        self.about = about(given.commit)
        self.results: table.Results = []
        self._given = given
        self._deadline = deadline
        self._lock = threading.Lock()

    def section(self, section: Section) -> None:
        """Run a section if it can run; print its result and write the JSON file."""
        limit_s = min(self._limit_s(section), self._deadline - time.monotonic())
        if why := section.why_not(self.gpus) or ("" if limit_s >= _LEAST_S else "no time left"):
            outcome = process.not_run(section, why)
        else:
            outcome = process.run(section, self._given.package, limit_s)
        with self._lock:
            self.results.append((section, outcome))
            print(table.ended(section, outcome), flush=True)
            if self._given.json is not None:
                self._given.json.write_text(json.dumps(self._document(), indent=1))

    def _limit_s(self, section: Section) -> float:
        if self._given.only == [section.label]:
            return math.inf  # then the budget limits it
        is_simulated = self.gpus == 0 and section.gpus > 0
        return section.seconds * (_SIMULATED_FACTOR if is_simulated else 1.0)

    def _document(self) -> dict[str, Any]:
        return {
            "about": self.about,
            "sections": [
                {
                    "section": section.label,
                    "title": section.title,
                    "verdict": table.verdict(outcome),
                    "seconds": outcome.seconds,
                    "lines": outcome.lines,
                }
                for section, outcome in self.results
            ],
        }


def _imported(package: str, wanted: list[Section]) -> list[str]:
    """Return the modules that the processes of these sections of a package import."""
    if all(section.gpus == 0 for section in wanted):
        return []
    sections = (f"{package}.{section.name}" for section in wanted)
    return ["torch", *_IMPORTED, *dict.fromkeys(sections)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    parser.add_argument(
        "--budget",
        type=float,
        default=240.0,
        metavar="SECONDS",
        help="time for all sections together (%(default)s)",
    )
    parser.add_argument(
        "--only", type=lambda text: text.split(","), metavar="C,M,...", help="run these sections"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=max(1, len(os.sched_getaffinity(0)) // _CORES_PER_SECTION),
        metavar="N",
        help="sections that run side by side, if they measure nothing (here: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all facts as JSON")
    parser.add_argument("--commit", metavar="NAME", help="the commit, where git does not know it")
    parser.add_argument("--package", default="tools.gpu_check.sections", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
