"""Swaps Megatron's checkpointing imports in the text of a module, however it was edited."""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
from collections.abc import Iterable
from typing import NamedTuple

#: Where releases keep their training loop; the first of early 2024.
TRAINING = ("megatron/training.py", "megatron/training/training.py")
#: Where Megatron's functions come from, as imports write it: the old home, the new one, relative.
_STOCK = {
    f"{home}.{module}": module
    for home in ("megatron", "megatron.training", "", "..training")
    for module in ("checkpointing", "async_utils")
}
#: The modules of ours, each with the names of Megatron's that it replaces.
_OURS = {
    "checkpointing": ("load_checkpoint", "save_checkpoint"),
    "async_utils": ("maybe_finalize_async_save",),
    "arguments": ("load_args_from_checkpoint",),
}
_HOME = {name: module for module, names in _OURS.items() for name in names}


class Import(NamedTuple):
    """A statement `from MODULE import NAMES`, as far as it imports what ours replace."""

    line: int
    """Index of the line on which it begins."""
    start: int
    """Where in that line."""
    module: str
    """As it is written, with leading dots."""
    names: frozenset[str]
    """Of `_HOME`."""
    mixed: bool
    """Whether its names come from two modules of ours."""

    @property
    def ours(self) -> str:
        """Name our module in its place. What else it imports is passed through by ours."""
        home = "arguments" if self.names == set(_OURS["arguments"]) else _STOCK[self.module]
        return f"megatron_flashckpt.{home}"


def _imports(tree: ast.Module, text: str) -> list[Import]:
    lines = lines_of(text)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            line = node.lineno - 1
            start = len(lines[line].encode()[: node.col_offset].decode())
            module = "." * node.level + (node.module or "")
            wanted = frozenset(names & set(_HOME))
            if wanted or "*" in names:
                mixed = len(names) > 1 and bool(names & set(_OURS["arguments"]))
                found.append(Import(line, start, module, wanted, mixed))
    return sorted(found)


def lines_of(text: str) -> list[str]:
    """Return the lines of `text` as the parser counts them, with their ends."""
    return list(io.StringIO(text, newline=""))


@functools.cache
def swapped(text: str) -> str:
    """Return a module's text with our imports in the place of Megatron's."""
    lines = lines_of(text)
    for it in _imports(ast.parse(text), text):
        if it.module in _STOCK and it.names:
            lines[it.line] = _with_ours(lines[it.line], it)
    return "".join(lines)


def _with_ours(line: str, it: Import) -> str:
    """Return the first line of a statement with our module; as it was if that is not on it."""
    statement = rf"from(\s+){re.escape(it.module)}(\s+)import\b"
    rest = re.sub(rf"^{statement}", rf"from\1{it.ours}\2import", line[it.start :])
    return line[: it.start] + rest


def obstacles(path: str, text: str) -> list[str]:
    """Return a line for each reason why swapping imports would not put ours into a module."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [f"{path}:{error.lineno}: is not Python that {sys.executable} reads ({error.msg})"]
    lines, imports = lines_of(text), _imports(tree, text)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    needed = used & set(_HOME) | set(_OURS["checkpointing"] if path in TRAINING else ())
    found, swapped_names = [], set()

    def refuse(line: int, reason: str) -> None:
        found.append(f"{path}:{line + 1}: `{lines[line].strip()}` {reason}")

    for number, it in enumerate(imports):
        if it.module.startswith("megatron_flashckpt"):
            swapped_names |= it.names
        elif it.module in _STOCK and not it.names:  # of all names, by a star
            later = {name for other in imports[number + 1 :] for name in other.names}
            hidden = {name for name in needed - later if _STOCK[it.module] in _homes(name)}
            if hidden:
                refuse(it.line, f"hides where names come from; {_instead(hidden)} below it")
        elif it.module not in _STOCK and it.names:
            refuse(it.line, f"imports what is not Megatron's own; {_instead(it.names)}")
        elif it.mixed:
            refuse(
                it.line,
                "is to become imports from two modules; take one name out of it, and "
                + _instead(_OURS["arguments"]),
            )
        elif it.names and _with_ours(lines[it.line], it) == lines[it.line]:
            refuse(it.line, f"goes on in the next line; {_instead(it.names)}")
        else:
            swapped_names |= it.names
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _HOME and _is_stock(tree, node.value):
            refuse(node.lineno - 1, f"calls Megatron's own; {_instead([node.attr])}, and call that")
    lacking = [] if found else sorted(needed - swapped_names)
    return [*found, *(f"{path}: does not import {name}; {_instead([name])}" for name in lacking)]


def _homes(name: str) -> tuple[str, ...]:
    """Return the modules that have `name`: of ours, and of Megatron's."""
    return (_HOME[name], "checkpointing") if name in _OURS["arguments"] else (_HOME[name],)


def _instead(names: Iterable[str]) -> str:
    """Return the statements that import `names` from ours, as an advice."""
    statements = [
        f"`from megatron_flashckpt.{_HOME[name]} import {name}`" for name in sorted(names)
    ]
    return f"write {' and '.join(statements)}"


def _is_stock(tree: ast.Module, value: ast.expr) -> bool:
    """Return whether an expression in a module is one of Megatron's modules."""
    called = {module for module in _STOCK if not module.startswith(".")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            called |= {it.asname for it in node.names if it.name in _STOCK and it.asname}
        elif isinstance(node, ast.ImportFrom):
            home = "." * node.level + (f"{node.module}." if node.module else "")
            called |= {it.asname or it.name for it in node.names if f"{home}{it.name}" in _STOCK}
    return ast.unparse(value) in called
