"""A program with a training loop of its own, such as slime, is served after `install()`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.layout_jobs import run_layouts


def test_a_program_that_imported_megatrons_functions_by_name_saves_and_resumes(
    tmp_path: Path,
) -> None:
    case = {"kind": "bert", "name": "bert", "number": 1, "optimizer": "bf16 distributed"}
    (tmp_path / "cases.json").write_text(json.dumps([case]))
    layouts = {"replicas": (2, [])}
    modes = {"own loop": "cases.json"}
    ran = run_layouts(tmp_path, "megatron_models.py", layouts, modes, iterations=20)
    assert ran["bert", "replicas", "own loop"] == []
    assert list((tmp_path / "replicas/own/iter_0000002").glob("*.end"))
