"""Syntax trees of the package, for tests that read its source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import megatron_flashckpt

HOME = Path(megatron_flashckpt.__file__).parent


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the tree of every file, by its path below the package."""
    return {
        str(path.relative_to(HOME)): ast.parse(path.read_text())
        for path in sorted(HOME.rglob("*.py"))
    }


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Yield every node, with the dotted name of its module."""
    for path, tree in trees().items():
        module = path.removesuffix(".py").replace("/", ".")
        for node in ast.walk(tree):
            yield module, node


def texts() -> Iterator[tuple[str, ast.AST]]:
    """Yield every node with its place, except docstrings."""
    for path, tree in trees().items():
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) not in alone:
                yield f"{path}:{getattr(node, 'lineno', 0)}", node
