"""A load whose optimizer keeps other states, or other types of states, names the flags to change.

Stock refuses these loads, too, or reads the states in another type.
"""

from __future__ import annotations

import pytest

from tests.integration.flag_runs import DIST, EVERY_2, Job, Runs, run_jobs

_SHARDED = f"{DIST} --use-distributed-optimizer"
_AWARE = f"{_SHARDED} --use-precision-aware-optimizer"
_BF16 = "--exp-avg-dtype bf16"
OURS = {"entry_points": ("ours",), "options": {"stand_in": "fused_adam"}}
#: Flags of the job that loads, its source, and the flags that the error names.
REFUSED = {
    "aware-to-plain": (_SHARDED, "aware-bf16", "--use-precision-aware-optimizer --exp-avg-dtype"),
    "another-type": (_AWARE, "aware-bf16", "--exp-avg-dtype bf16"),
    "plain-type": (f"{_AWARE} {_BF16}", "aware", "--exp-avg-dtype fp32"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    jobs = [
        Job("aware", f"{_AWARE} {EVERY_2}", **OURS),
        Job("aware-bf16", f"{_AWARE} {_BF16} {EVERY_2}", **OURS),
        *(
            Job(name, f"{flags} --load {{{source}}} --train-iters 6", **OURS)
            for name, (flags, source, _) in REFUSED.items()
        ),
    ]
    return run_jobs(tmp_path_factory.mktemp("flags"), jobs, ranks=1, torchrun=False)


@pytest.mark.parametrize("name", REFUSED)
def test_the_error_names_the_flags_of_the_job_that_saved(runs: Runs, name: str) -> None:
    _, source, flags = REFUSED[name]
    assert runs[source]["ours"].ended == "end", runs[source]["ours"].output[-3000:]
    ended = runs[name]["ours"].ended
    assert ended[0] == "MissingStateError", ended
    assert f"Start with {flags}" in ended[1], ended[1]
