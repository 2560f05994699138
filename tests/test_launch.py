"""Messages of the launcher in an environment that cannot train."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
#: Runs the launcher in a process that cannot import the module named first.
LAUNCH = """
import sys
sys.modules[sys.argv[1]] = None
from megatron_flashckpt.launch import main
main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        ("torch", "install megatron_flashckpt into the environment that trains"),
        ("megatron", "run the script of a Megatron-LM checkout, or put a checkout on PYTHONPATH"),
    ],
)
def test_a_missing_module_is_one_line_with_its_remedy(
    tmp_path: Path, module: str, remedy: str
) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("raise AssertionError('the script must not run')")
    ran = subprocess.run(
        [sys.executable, "-c", LAUNCH, module, str(script)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 1
    last = ran.stderr.splitlines()[-1]
    assert last.startswith(f"flashckpt-launch: {module} is not installed for {sys.executable}; ")
    assert remedy in last
    assert "Traceback" not in ran.stderr
