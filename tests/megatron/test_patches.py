"""Patches change imports and nothing else, and the one for another release is refused by name.

Real trees: the installed wheel, and, where `MEGATRON_LM` names a clone of Megatron-LM, all tags.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest

from tests.megatron.jobs import REPO

SCRIPT = REPO / "scripts/patches.py"
_spec = importlib.util.spec_from_file_location("patches", SCRIPT)
patches = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(patches)


#: What the patch for the installed release changes.
PATCHED = ("megatron/training/training.py", "megatron/training/initialize.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What the patch needs of the installed release."""
    installed = Path(megatron.core.__file__).parents[2]
    for path in (*PATCHED, "megatron/core/package_info.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / path, tmp_path / path)
    return tmp_path


def run(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True
    )


@pytest.mark.parametrize("name", patches.TAGS)
def test_a_patch_turns_imports_into_ours_and_nothing_else(name: str) -> None:
    lines = (patches.PATCHES / f"{name}.patch").read_text().splitlines()
    changes = [line for line in lines if re.match(r"[-+](?![-+])", line)]
    removed = [line[1:] for line in changes if line[0] == "-"]
    added = [line[1:] for line in changes if line[0] == "+"]
    stock = re.compile(r"^( *)from (megatron(\.training)?|)\.(?=checkpointing|async_utils)")
    ours = [stock.sub(r"\1from megatron_flashckpt.", line) for line in removed]
    arguments = "checkpointing import load_args_from_checkpoint"
    ours = [
        line.replace(arguments, arguments.replace("checkpointing", "arguments")) for line in ours
    ]
    assert ours == added
    assert all(line.lstrip().startswith("from megatron_flashckpt.") for line in added)
    assert len(added) in (3, 4)


def test_every_patch_is_named_after_a_tag_and_no_tag_lacks_one() -> None:
    assert {path.stem for path in patches.PATCHES.glob("*.patch")} == set(patches.TAGS)


def test_the_right_patch_is_found_and_applied(tree: Path) -> None:
    stock = [(tree / path).read_text() for path in PATCHED]
    done = run("apply", tree)
    assert done.stdout == f"applied patches/core_v0.17.1.patch to {tree}\n", done.stderr
    patched = [(tree / path).read_text() for path in PATCHED]
    assert patched == [patches.swapped(text) for text in stock]
    assert all(one != other for one, other in zip(patched, stock, strict=True))


def test_another_releases_patch_is_refused_and_the_right_one_named(tree: Path) -> None:
    stock = (tree / "megatron/training/training.py").read_text()
    done = run("apply", tree, REPO / "patches/core_v0.16.1.patch")
    assert done.returncode == 1
    assert "is Megatron-LM core 0.17.1: take patches/core_v0.17.1.patch, not core_v0.16.1" in (
        done.stderr
    )
    assert (tree / "megatron/training/training.py").read_text() == stock


def test_a_second_time_there_is_nothing_to_do(tree: Path) -> None:
    assert run("apply", tree).returncode == 0
    before = (tree / "megatron/training/training.py").read_text()
    done = run("apply", tree)
    assert done.returncode == 1
    assert "imports megatron_flashckpt already; nothing is left to do" in done.stderr
    assert (tree / "megatron/training/training.py").read_text() == before


def test_a_directory_without_megatron_is_refused(tmp_path: Path) -> None:
    done = run("apply", tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path}: has no megatron/training.py or " in done.stderr


def test_a_release_without_a_patch_is_told_of_the_other_ways(tree: Path) -> None:
    training = tree / "megatron/training/training.py"
    training.write_text(training.read_text().replace("get_standard_config_overrides", "renamed"))
    done = run("apply", tree)
    assert done.returncode == 1
    assert "or use the launcher, which needs no edit" in done.stderr


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no clone")
def test_every_patch_applies_to_its_tag_in_both_ways() -> None:
    done = run("check", os.environ["MEGATRON_LM"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("applies to") == len(patches.TAGS)
