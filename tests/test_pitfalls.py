"""`PITFALLS.md` names tests that exist; one of its rows is tested here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import megatron_flashckpt

TESTS = Path(__file__).parent
TABLE = TESTS / "PITFALLS.md"
PACKAGE = Path(megatron_flashckpt.__file__).parent


def rows() -> list[list[str]]:
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[1] not in ("held by", "---")]


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


def test_every_test_is_named_with_its_file() -> None:
    """The pattern of the test above would overlook a name without its file."""
    cells = [held for _, held in rows()]
    seen = re.findall(r"`[\w/]+\.py::\w+`", TABLE.read_text())
    assert sum(held.count("::") for held in cells) == len(seen)


def test_every_module_that_the_table_names_exists() -> None:
    named = re.findall(r"`(\w+(?:/\w+)*\.py)`", TABLE.read_text().split("\n## ", 1)[1])
    named += re.findall(r"\(`(\w+/[\w/]+)`\)", TABLE.read_text())
    assert [name for name in named if not (PACKAGE / name).exists()] == []


def test_every_row_of_the_table_has_an_answer() -> None:
    assert len(rows()) > 50
    unanswered = [report for report, held in rows() if not ("::" in held or "By design:" in held)]
    assert unanswered == []


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
