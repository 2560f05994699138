"""Memory of a real Megatron rank: 120 saves leave it as large as before.

`tests/agent/test_resources.py` does the same for an agent.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.megatron_jobs import run_job, succeeded

#: By iteration WARM, permanent memory is allocated; from SAVES on, the trainer leaks on purpose.
WARM, SAVES, LEAKY = 150, 270, 320
#: Bytes per save above which growth is a leak; bytes per save that the trainer leaks on purpose.
TOLERATED, MADE = 4096, 16384


def slope(values: np.ndarray) -> float:
    """Return the steady growth per save: the median over most pairs in most quarters of the run.

    A leak grows in every quarter. A table that doubles its size once, as Python's table of interned
    strings does (0.6 MB), grows in one quarter only.
    """
    return float(np.median([_growth(quarter) for quarter in np.array_split(values, 4)]))


def _growth(values: np.ndarray) -> float:
    """Return the Theil-Sen slope."""
    first, second = np.triu_indices(len(values), len(values) // 4)
    return float(np.median((values[second] - values[first]) / (second - first)))


def test_120_saves_leave_no_memory_descriptor_memfd_or_thread(tmp_path: Path) -> None:
    arguments = [
        *("--num-layers", "1", "--bf16", "--use-distributed-optimizer", "--log-interval", "100"),
        *("--global-batch-size", "2", "--save-interval", "1", "--save-retain-interval", "1000"),
        *("--train-iters", str(LEAKY), "--save", str(tmp_path / "save")),
    ]
    env = {"LEAK": f"{MADE}:{SAVES}", "PYTHONMALLOC": "malloc"}
    job = succeeded(run_job(tmp_path, "leaks", arguments, ranks=1, env=env, torchrun=True))
    events = sorted(job.named("resources"), key=lambda event: event["iteration"])
    assert [event["iteration"] for event in events] == list(range(1, LEAKY + 1))
    used = {
        resource: np.array([event[resource] for event in events])
        for resource in ("nbytes", "files", "memfds", "threads")
    }
    flat = {resource: values[WARM:SAVES] for resource, values in used.items()}
    assert slope(flat["nbytes"]) < TOLERATED
    # The median of the quarters ignores a single jump; 1 MiB allows one such table.
    whole = float(np.median(flat["nbytes"][-20:]) - np.median(flat["nbytes"][:20]))
    assert whole < 2**20 + (SAVES - WARM) * TOLERATED
    for resource in ("files", "memfds", "threads"):
        assert slope(flat[resource]) < 0.01, resource
    assert slope(used["nbytes"][SAVES:]) > MADE / 2 > TOLERATED, "the deliberate leak is detected"
