"""Jobs that save the same cases under several layouts, and load what two layouts have saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.support.megatron_jobs import REPO, run_job, succeeded

Layouts = Mapping[str, tuple[int, list[str]]]
"""Ranks and flags by the name of a layout."""


def sources(layouts: Layouts) -> dict[str, tuple[str, str]]:
    """Return the layouts whose saves each layout loads: its own, and the one before it in a ring.

    `layout/test_read_plan.py` reads the shards of any layout as those of any other one.
    """
    names = list(layouts)
    return {name: (name, names[at - 1]) for at, name in enumerate(names)}


Wrong = dict[tuple[str, str, str], list[str]]
"""Differences by case, layout and event; for an error its text."""


def run_layouts(
    where: Path, script: str, layouts: Layouts, cases: Mapping[str, str], iterations: int
) -> Wrong:
    """Run `script` under each layout for the modes `save` and `load`; return what differed.

    Args:
        script: file name in `tests/support/jobs`.
        cases: file name in `where` with the cases, by mode.
    """
    wrong: Wrong = {}
    for mode, file in cases.items():
        for layout, (ranks, flags) in layouts.items():
            size = ["--num-layers", "2", "--train-iters", str(iterations)]
            done = run_job(
                *(where, f"{mode}-{layout}", [*size, *flags]),
                ranks=ranks,
                entry_point="stock",
                script=REPO / "tests/support/jobs" / script,
                env={
                    "CASES": str(where / file),
                    "ROOT": str(where),
                    "MODE": mode,
                    "LAYOUT": layout,
                    "SAVED_BY": " ".join(dict.fromkeys(sources(layouts)[layout])),
                },
            )
            for event in succeeded(done).events:
                errors = wrong.setdefault((event["case"], layout, event["event"]), [])
                errors += [event["error"]] if "error" in event else event["wrong"]
    return wrong
