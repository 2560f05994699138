"""With `redundancy`, a job stops before its first step if a rank cannot import pyzmq.

`tests/test_imports.py` lists the modules that need it: without `redundancy` none of them is used.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.support.forked.nursery import CPU_MEGATRON, REPO
from tests.support.megatron_jobs import run_job

#: A `zmq` module that fails in rank 1; agents have no variable RANK.
BLOCKER = """\
import os
if os.environ.get("RANK") == "1":
    raise ModuleNotFoundError("No module named 'zmq'")
"""


def test_redundancy_stops_all_ranks_at_start_if_one_lacks_pyzmq(tmp_path: Path) -> None:
    (tmp_path / "zmq.py").write_text(BLOCKER)
    env = {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, CPU_MEGATRON, REPO)))}
    env["FLASHCKPT_REDUNDANCY"] = "copy"
    job = ["--num-layers", "2", "--bf16", "--use-distributed-optimizer", "--train-iters", "4"]
    job += ["--save", str(tmp_path / "save"), "--save-interval", "2"]
    result = run_job(tmp_path, "redundant", job, ranks=2, env=env)
    assert result.returncode == 1
    assert not result.losses(), "an iteration began"
    errors = re.findall(r"errors\.ConfigError: .*", result.log)
    assert len(errors) == 2, result.log[-6000:]
    for line in errors:
        assert "'redundancy' needs pyzmq, which this node cannot import (No module named" in line
        assert "pip install 'megatron_flashckpt[redundancy]'" in line
        assert "or set 'redundancy: none'" in line
