"""Modules and attribute names of old releases; `scripts/compat` runs the releases themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import megatron_flashckpt
from megatron_flashckpt.megatron_lm import old_releases

#: Modules of each release.
LAYOUTS = {
    "core 0.5": ("training", "checkpointing", "optimizer/__init__", "optimizer/optimizer"),
    "core 0.6": ("training/training", "training/checkpointing", "core/optimizer/optimizer"),
    "core 0.7": ("training/training", "training/async_utils", "core/optimizer/optimizer"),
}
ASK = """
import json
from megatron_flashckpt.megatron_lm import old_releases
def ask():
    module = old_releases.optimizer_module("optimizer").__name__
    return [old_releases.training_package(), old_releases.has_async_utils(), module]
new = ask()
import megatron.training
print(json.dumps([new, ask()]))
"""


def tree_of(release: str, where: Path) -> None:
    for name in ("__init__", "core/__init__", *LAYOUTS[release]):
        path = where / f"megatron/{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for package in ("training", "core/optimizer"):
        if (where / "megatron" / package).is_dir():
            (where / f"megatron/{package}/__init__.py").touch()


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("core 0.5", ["megatron", False, "megatron.optimizer.optimizer"]),
        ("core 0.6", ["megatron.training", False, "megatron.core.optimizer.optimizer"]),
        ("core 0.7", ["megatron.training", True, "megatron.core.optimizer.optimizer"]),
    ],
)
def test_modules_of_each_release_are_found(
    tmp_path: Path, release: str, expected: list[object]
) -> None:
    tree_of(release, tmp_path)
    home = Path(megatron_flashckpt.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{home}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [expected] * 2, "before and after an import"


def test_attribute_names_before_and_since_core_06_are_found() -> None:
    old = SimpleNamespace(get_model_param_range_map="ranges", grad_buffers=["buffer"])
    new = SimpleNamespace(_get_model_param_range_map="ranges", buffers=["buffer"], config="config")
    for optimizer in (old, new):
        assert old_releases.range_map(optimizer) == "ranges"
        assert old_releases.gradient_buffers(optimizer) == ["buffer"]
    assert (old_releases.config_of(old), old_releases.config_of(new)) == (None, "config")


@pytest.mark.parametrize(
    ("attributes", "gathers"),
    [
        ({"overlap_param_gather": True, "param_buffer_copied": []}, True),
        ({"overlap_param_gather": False, "param_buffer_copied": []}, False),
        ({"overlap_param_gather": True}, False),
        ({}, False),
    ],
    ids=["old", "old, not overlapped", "new", "settings elsewhere"],
)
def test_an_all_gather_into_a_separate_buffer_is_detected(
    attributes: dict[str, object], gathers: bool
) -> None:
    assert old_releases.gathers_into_buffer(SimpleNamespace(**attributes)) is gathers
