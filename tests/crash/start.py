"""What a forked rank of the crash tests starts with.

Imports nothing of megatron_flashckpt before the environment is set.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.crash.helpers import fork_at
from tests.support.forked.nursery import settle_in


@dataclasses.dataclass(frozen=True)
class Life:
    """What the ranks do from one start to the next."""

    save: str
    seed: int
    """Of the contents."""
    saves: int
    """How many iterations are saved after the load, one after the other."""
    step: int = 1
    """How far these iterations lie apart."""
    hurried: bool = False
    """Go on after a save without waiting for what becomes of it."""
    broken: int = -1
    """Which of the saves rank 1 has no part in, for its doorbell is broken."""
    retain_interval: int | None = None
    loads: int | None = None
    """Seed of the contents that are loaded, if another life has saved them."""
    recovers: bool = False
    """Storage has no more faults before the last save."""
    forks: str = ""
    """POINT:COUNT at which each rank forks helpers; see `helpers.fork_at`."""


def start(environment: dict[str, str], log: str, life: Life, *arguments: Any) -> None:
    """Set the environment, then import what reads it. Returns when the rank has ended."""
    settle_in(environment, log)
    if life.forks:
        fork_at(life.forks, Path(life.save).parent)
    if "FAULTY_STORAGE" in environment:
        from tests.crash.trouble import retry_at_once

        retry_at_once()
    from tests.crash.rank import main

    try:
        main(life, *arguments)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # As after an unhandled exception in a script, but the exit hooks have to see it too.
        os._exit(1)
    sys.stdout.flush()
