"""`PITFALLS.md` names tests that exist; one of its rows is tested here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import megatron_flashckpt

TESTS = Path(__file__).parent
TABLE = TESTS / "PITFALLS.md"
PACKAGE = Path(megatron_flashckpt.__file__).parent


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_table_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE.read_text())
    assert len(named) > 80
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (TESTS / file).exists() or name not in functions(TESTS / file)
    ]
    assert missing == []


def test_every_module_that_the_table_names_exists() -> None:
    named = re.findall(r"`(\w+(?:/\w+)*\.py)`", TABLE.read_text().split("\n## ", 1)[1])
    named += re.findall(r"\(`(\w+/[\w/]+)`\)", TABLE.read_text())
    assert [name for name in named if not (PACKAGE / name).exists()] == []


def test_only_the_agent_forks_and_only_before_its_first_thread() -> None:
    """A forked trainer would duplicate its threads and its CUDA context."""
    forking = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if isinstance(node, ast.Attribute) and node.attr in ("fork", "forkpty", "preexec_fn"):
                names = ["os.fork"]
            if isinstance(node, ast.keyword) and node.arg == "preexec_fn":
                names = ["os.fork"]
            if any(name.split(".")[0] == "multiprocessing" or name == "os.fork" for name in names):
                forking.append(str(path.relative_to(PACKAGE)))
    assert forking == ["agent/__main__.py"]
