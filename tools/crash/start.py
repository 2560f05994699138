"""Start of a forked rank of the crash tests.

Imports nothing of megatron_flashckpt before the environment is set.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.support.forked.nursery import settle_in
from tools.crash.helpers import fork_at


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Plan of a run: the steps of the ranks from one start to the next."""

    save: str
    seed: int
    """Seed of the contents that this run saves."""
    saves: int
    """Number of iterations that are saved after the load."""
    step: int = 1
    """Distance between these iterations."""
    hurried: bool = False
    """Continue after a save without waiting for its result."""
    broken: int = -1
    """Number of the save for which rank 1 sends no "staged" message; -1: none."""
    retain_interval: int | None = None
    loads: int | None = None
    """Seed of the contents that are loaded; None: the seed of this run."""
    recovers: bool = False
    """End the faults of the storage before the last save."""
    forks: str = ""
    """Step (POINT:COUNT) at which each rank forks helpers; see `helpers.fork_at`."""


def start(environment: dict[str, str], log: str, plan: RunPlan, *arguments: Any) -> None:
    """Set the environment, then import the package. Returns when the rank has ended."""
    settle_in(environment, log)
    if plan.forks:
        fork_at(plan.forks, Path(plan.save).parent)
    if "FAULTY_STORAGE" in environment:
        from tools.crash.trouble import expect_faults

        expect_faults()
    from tools.crash.rank import main

    try:
        main(plan, *arguments)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # Exit like a script with an unhandled exception, without running exit hooks.
        os._exit(1)
    sys.stdout.flush()
