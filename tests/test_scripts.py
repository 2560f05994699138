"""`scripts/patches` works in every directory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


def test_patches_apply_in_a_directory_with_modules_of_equal_names(
    tmp_path: Path,
) -> None:
    """Python 3.10 has no safe path, so the caller's directory comes first there."""
    python = subprocess.run(["python3", "--version"], capture_output=True, text=True, check=True)
    if python.stdout.startswith("Python 3.10"):
        pytest.skip("python3 is Python 3.10")
    for package in ("patches", "argparse"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "tree").mkdir()
    done = subprocess.run(
        [REPO / "scripts/patches", "apply", "tree"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr.startswith("scripts/patches: tree: has no megatron/training.py or ")
    assert done.returncode == 1
