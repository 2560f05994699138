"""`scripts/` holds launch scripts and short wrappers, and files use each other by imports."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
WRAPPERS = sorted(
    path
    for path in (REPO / "scripts").iterdir()
    if path.is_file() and not path.match("pretrain_gpt_*") and path.name != "__init__.py"
)
FOLDERS = ("benchmarks", "examples", "megatron_flashckpt", "patches", "scripts", "tests", "tools")
#: Files whose purpose is to imitate Python's own changes of its path, at the start of a script or
#: for installed packages.
MAY_EDIT = {
    "megatron_flashckpt/launch.py",
    "tests/cpu_megatron/cpu_cuda.py",
    "tests/support/forked/job.py",
}
_EDIT = re.compile(
    r"""
    sys\.path (\[[^]]*\])? \s* ( \.(append|extend|insert|pop|remove|clear)\( | \+?=(?!=) )
    | \bsys,\s*["']path["']
""",
    re.VERBOSE,
)


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda path: path.name)
def test_a_wrapper_has_at_most_ten_lines_and_says_what_it_does(wrapper: Path) -> None:
    first, second, *others = wrapper.read_text().splitlines()
    assert first == "#!/usr/bin/env bash"
    assert second.startswith("# ")
    assert len(others) <= 8
    assert os.access(wrapper, os.X_OK)


def test_no_file_edits_the_path_of_imports() -> None:
    files = [path for folder in FOLDERS for path in sorted((REPO / folder).rglob("*.py"))]
    assert len(files) > 400
    editing = {str(path.relative_to(REPO)) for path in files if _EDIT.search(path.read_text())} - {
        str(Path(__file__).relative_to(REPO))
    }
    assert editing == MAY_EDIT


@pytest.mark.parametrize(
    ("line", "edits"),
    [
        ("sys.path.insert(0, root)", True),
        ("sys.path[:0] = [root]", True),
        ("sys.path += [root]", True),
        ('mock.patch.object(sys, "path", [])', True),
        ("assert sys.path[:2] == PLAIN", False),
        ('":".join(filter(None, sys.path))', False),
    ],
)
def test_edits_of_the_path_are_distinguished_from_reads(line: str, edits: bool) -> None:
    assert bool(_EDIT.search(line)) == edits


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
