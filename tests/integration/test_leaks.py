"""Memory of a real Megatron rank and its agent: 200 saves leave both as large as before."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.support.megatron_jobs import run_job, succeeded

#: By iteration WARM, permanent memory is allocated; from SAVES on, the trainer leaks on purpose.
WARM, SAVES, LEAKY = 150, 350, 400
#: Bytes per save above which growth is a leak; bytes per save that the trainer leaks on purpose.
TOLERATED, MADE = 4096, 16384
Used = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Used]:
    """Return the resources of trainer and agent by iteration; `SAVES` on has a deliberate leak."""
    where = tmp_path_factory.mktemp("leaks")
    arguments = [
        *("--num-layers", "1", "--bf16", "--use-distributed-optimizer", "--log-interval", "100"),
        *("--global-batch-size", "2", "--save-interval", "1", "--save-retain-interval", "1000"),
        *("--train-iters", str(LEAKY), "--save", str(where / "save")),
    ]
    env = {"MEASURE": "1", "LEAK": f"{MADE}:{SAVES}", "PYTHONMALLOC": "malloc"}
    env["AGENT_METER"] = str(where / "meter")
    env["FLASHCKPT_AGENT__ENVIRONMENT"] = "[AGENT_METER]"
    os.mkfifo(where / "meter")
    job = succeeded(run_job(where, "leaks", arguments, ranks=1, env=env, torchrun=True))
    events = sorted(job.named("resources"), key=lambda event: event["iteration"])
    assert [event["iteration"] for event in events] == list(range(1, LEAKY + 1))
    return {
        who: {
            resource: np.array([event[who][resource] for event in events])
            for resource in events[0][who]
        }
        for who in ("trainer", "agent")
    }


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


@pytest.mark.parametrize("who", ["trainer", "agent"])
def test_200_saves_leave_no_memory_descriptor_memfd_or_thread(
    used: dict[str, Used], who: str
) -> None:
    flat = {resource: values[WARM:SAVES] for resource, values in used[who].items()}
    growth = slope(flat["nbytes"])
    print(f"{who}: {growth:.0f} bytes per save, {flat['nbytes'][-1] / 2**20:.0f} MiB of its own")
    assert growth < TOLERATED
    # The median of the quarters ignores a single jump; 1 MiB allows one such table.
    whole = float(np.median(flat["nbytes"][-20:]) - np.median(flat["nbytes"][:20]))
    print(f"{who}: {whole:.0f} bytes more in all")
    assert whole < 2**20 + (SAVES - WARM) * TOLERATED
    for resource in ("files", "memfds", "threads"):
        print(f"{who}: {flat[resource][-1]} {resource}, {slope(flat[resource])} more per save")
        assert slope(flat[resource]) < 0.01, resource


def test_a_deliberate_leak_is_detected(used: dict[str, Used]) -> None:
    assert slope(used["trainer"]["nbytes"][SAVES:]) > MADE / 2 > TOLERATED
