"""The main job's tests pass on a second release of megatron-core, too.

They save without a collective call, kill, resume from memory and storage, train as stock through
launcher and patch, and convert to stock and back.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.forked.nursery import REPO
from tools.environment import SECOND

#: `tools/environment.py` makes its environment.
PYTHON = Path(sys.prefix) / "second/bin/python"
FILES = (
    "convert/test_torch_dist_megatron.py",
    "integration/test_entry_points.py",
    "integration/test_resume.py",
    "megatron_lm/test_side_state.py",
)


def test_the_main_job_passes_on_the_second_release(tmp_path: Path) -> None:
    which = "from importlib.metadata import version; print(version('megatron-core'))"
    version = subprocess.run([str(PYTHON), "-c", which], capture_output=True, text=True, check=True)
    assert version.stdout.strip() == SECOND
    pytest_on_second = [
        *(str(PYTHON), "-m", "pytest", "-n", "0", "-p", "no:cacheprovider"),
        *(f"--basetemp={tmp_path / 'second'}", "-m", "not second_tier"),
        *("-k", "not console"),  # the commands are those of `.venv`
        *(f"tests/{file}" for file in FILES),
    ]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(pytest_on_second, cwd=REPO, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
