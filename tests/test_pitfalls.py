"""`PITFALLS.md` names tests that exist; one of its rows is tested here."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.support.package_source import HOME, nodes

TESTS = Path(__file__).parent
TABLE = TESTS / "PITFALLS.md"


@functools.cache
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
    assert [name for name in named if not (HOME / name).exists()] == []


def test_only_the_agent_forks_and_only_before_its_first_thread() -> None:
    """A forked trainer would duplicate its threads and its CUDA context."""
    forking = []
    for module, node in nodes():
        names: list[str] = []
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                names = [node.module or ""]
            case ast.Attribute(attr="fork" | "forkpty" | "preexec_fn"):
                names = ["os.fork"]
            case ast.keyword(arg="preexec_fn"):
                names = ["os.fork"]
        if any(name.split(".")[0] == "multiprocessing" or name == "os.fork" for name in names):
            forking.append(module)
    assert forking == ["agent.__main__"]
