"""Without the optional pyzmq, jobs save and load; with `redundancy`, they stop before step 1.

In these jobs `import zmq` fails, because a failing module of that name comes first on the path.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked.nursery import CPU_MEGATRON, REPO
from tests.support.megatron_jobs import Result, await_no_agent, run_job, succeeded

MODEL = ["--num-layers", "2", "--bf16", "--use-distributed-optimizer"]
#: A `zmq` module that fails in these ranks; agents have no variable RANK.
BLOCKER = """\
import os
if os.environ.get("RANK") in {ranks}:
    raise ModuleNotFoundError("No module named 'zmq'")
"""


def run(where: Path, name: str, ranks: str, arguments: list[str], **env: str) -> Result:
    """Run two ranks; those in `ranks` (a Python expression) cannot import zmq."""
    blocker = where / f"blocker-{name}"
    blocker.mkdir()
    (blocker / "zmq.py").write_text(BLOCKER.format(ranks=ranks))
    env |= {"PYTHONPATH": os.pathsep.join(map(str, (blocker, CPU_MEGATRON, REPO)))}
    probe = [sys.executable, "-c", "import zmq"]
    assert subprocess.run(probe, env={**env, "RANK": "1"}, capture_output=True).returncode
    arguments = [*MODEL, "--train-iters", "4", "--save", str(where / "save"), *arguments]
    return run_job(where, name, arguments, ranks=2, env=env)


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("without_pyzmq")


def test_jobs_save_and_load_without_pyzmq(where: Path) -> None:
    everybody, save = "(None, '0', '1')", ["--save-interval", "2"]
    first = succeeded(run(where, "saves", everybody, [*save, "--exit-interval", "2"]))
    await_no_agent(where)
    second = succeeded(run(where, "loads", everybody, [*save, "--load", str(where / "save")]))
    await_no_agent(where)
    assert set(first.losses()) == {1, 2}
    assert set(second.losses()) == {3, 4}
    assert (where / "save/latest_checkpointed_iteration.txt").read_text() == "4"


def test_redundancy_stops_all_ranks_at_start_if_one_lacks_pyzmq(
    where: Path,
) -> None:
    arguments = ["--save-interval", "2"]
    result = run(where, "redundant", "('1',)", arguments, FLASHCKPT_REDUNDANCY="copy")
    assert result.returncode == 1
    assert not result.losses(), "an iteration began"
    errors = re.findall(r"errors\.ConfigError: .*", result.log)
    assert len(errors) == 2, result.log[-6000:]
    for line in errors:
        assert "'redundancy' needs pyzmq, which this node cannot import (No module named" in line
        assert "pip install 'megatron_flashckpt[redundancy]'" in line
        assert "or set 'redundancy: none'" in line
