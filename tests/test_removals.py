"""Every call of the package that removes, truncates or renames over a file, with its reason.

Reviewers read the table in `reviewed_removals.py`. A new call of this kind needs a line that says
why it can only hit files that this package made, and that names the test that shows it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_flashckpt
from tests.reviewed_removals import REVIEWED, Call

HOME = Path(megatron_flashckpt.__file__).parent
TESTS = Path(__file__).parent

#: Names of functions and methods that remove, truncate, replace or rename. `put`, `create`, `move`,
#: `delete` and `delete_directory` are methods of a `Storage`.
REMOVING = {"unlink", "rmtree", "rmdir", "remove", "removedirs", "truncate", "ftruncate", "savefig"}
REMOVING |= {"rename", "renames", "replace", "delete", "delete_directory", "move", "put", "create"}
REMOVING |= {"write_bytes", "write_text", "copyfile", "copy2", "copytree"}
#: Receivers of such methods that are not files: frozen records, Megatron's functions, slabs, lists,
#: queues, and the store of templates.
IN_MEMORY = {"msgspec.structs", "dataclasses", "stock", "Slab", "records", "rank.retired"}
IN_MEMORY |= {"rank.awaited", "answer", "self._to_remove", "self._templates", "self._jobs"}
IN_MEMORY |= {"self._failed_copies", "self._agent_failures", "self._buffers", "sink", "link"}
IN_MEMORY |= {"self._silent", "self._work"}


def is_text(node: ast.Call) -> bool:
    """Return whether `replace` is the method of a string, which takes two arguments."""
    func = node.func
    assert isinstance(func, ast.Attribute)
    return (
        func.attr == "replace"
        and len(node.args) == 2
        and not (isinstance(func.value, ast.Name) and func.value.id == "os")
    )


def opens_for_writing(node: ast.Call) -> bool:
    """Return whether a call of `open` may truncate or modify an existing file."""
    name = ast.unparse(node.func)
    given = [
        *node.args[1:],
        *(argument.value for argument in node.keywords if argument.arg in ("mode", "flags")),
    ]
    if name == "os.open":
        return any(
            "O_TRUNC" in ast.unparse(argument) or "flags" in ast.unparse(argument)
            for argument in given
        )
    if name not in ("open", "io.open"):
        return False
    # A computed mode may have any value.
    modes = [
        str(argument.value) if isinstance(argument, ast.Constant) else "w" for argument in given
    ]
    return any(set("w+") & set(mode) for mode in modes)


def calls_in(source: str, module: str) -> Iterator[Call]:
    """Yield every call of `source` that may remove a file, with the function that contains it."""

    def walk(node: ast.AST, path: tuple[str, ...]) -> Iterator[Call]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            path = (*path, node.name)
        if isinstance(node, ast.Call):
            func = node.func
            if isinstance(func, ast.Attribute) and func.attr in REMOVING:
                removes = not is_text(node) and ast.unparse(func.value) not in IN_MEMORY
            else:
                removes = isinstance(func, ast.Name) and func.id in REMOVING
            if removes or opens_for_writing(node):
                yield Call(module, ".".join(path), ast.unparse(node))
        for child in ast.iter_child_nodes(node):
            yield from walk(child, path)

    yield from walk(ast.parse(source), ())


def removing_calls() -> set[Call]:
    return {
        call
        for path in HOME.rglob("*.py")
        for call in calls_in(
            path.read_text(), ".".join(path.relative_to(HOME).with_suffix("").parts)
        )
    }


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("os.unlink(x)", ["os.unlink(x)"]),
        ("from shutil import rmtree\nrmtree(x)", ["rmtree(x)"]),
        ("path.rename(other)", ["path.rename(other)"]),
        ("path.replace(other)", ["path.replace(other)"]),
        ("os.replace(one, other)", ["os.replace(one, other)"]),
        ("text.replace('a', 'b')", []),
        ("dataclasses.replace(it, a=1)", []),
        ("records.remove(it)", []),
        ("os.remove(it)", ["os.remove(it)"]),
        ("open(x, 'w')", ["open(x, 'w')"]),
        ("open(x, mode='r+b')", ["open(x, mode='r+b')"]),
        ("open(x, 'ab' if y else 'wb')", ["open(x, 'ab' if y else 'wb')"]),
        ("open(x, 'rb')", []),
        ("open(x, 'xb')", []),
        ("os.open(x, os.O_RDWR | os.O_TRUNC)", ["os.open(x, os.O_RDWR | os.O_TRUNC)"]),
        ("os.open(x, os.O_RDONLY)", []),
        ("storage.delete(x)", ["storage.delete(x)"]),
        ("def f():\n  with a as b:\n    b.truncate(3)", ["b.truncate(3)"]),
    ],
)
def test_every_form_of_removal_is_detected(source: str, expected: list[str]) -> None:
    assert [call.call for call in calls_in(source, "a")] == expected


def test_every_call_that_removes_has_been_reviewed() -> None:
    assert sorted(removing_calls() - REVIEWED.keys()) == [], (
        "state in REVIEWED why these may remove"
    )
    assert sorted(REVIEWED.keys() - removing_calls()) == [], (
        "REVIEWED lists calls that no longer exist"
    )


def test_every_reason_names_a_test_that_exists() -> None:
    missing = []
    for reason in REVIEWED.values():
        file, _, name = reason.test.partition("::")
        path = TESTS / file
        if not path.exists() or f"def {name}(" not in path.read_text():
            missing.append(reason.test)
    assert missing == []
