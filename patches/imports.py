"""Swap of Megatron's checkpointing imports in the text of a module, edited or not."""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
from collections.abc import Iterable
from typing import NamedTuple

#: Files with the training loop; the first one is that of releases of early 2024.
TRAINING = ("megatron/training.py", "megatron/training/training.py")
#: Megatron's modules by the names in import statements: old package, new package, relative.
_STOCK = {
    f"{home}.{module}": module
    for home in ("megatron", "megatron.training", "", "..training")
    for module in ("checkpointing", "async_utils")
}
#: Our modules, each with the names of Megatron's functions that it replaces.
_OURS = {
    "checkpointing": ("load_checkpoint", "save_checkpoint"),
    "async_utils": ("maybe_finalize_async_save",),
    "arguments": ("load_args_from_checkpoint",),
}
_HOME = {name: module for module, names in _OURS.items() for name in names}


class Import(NamedTuple):
    """Statement `from MODULE import NAMES` that imports functions that ours replace."""

    line: int
    """Index of the first line of the statement."""
    start: int
    """Position of the statement in that line."""
    module: str
    """Name of the module as written, with leading dots."""
    names: frozenset[str]
    """Imported names of `_HOME`."""
    mixed: bool
    """True if our replacements are in two modules."""

    @property
    def ours(self) -> str:
        """Name of our module for the statement; it also provides the other imported names."""
        home = "arguments" if self.names == set(_OURS["arguments"]) else _STOCK[self.module]
        return f"megatron_flashckpt.{home}"


def _imports(tree: ast.Module, text: str) -> list[Import]:
    lines = lines_of(text)
    imports = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            line = node.lineno - 1
            start = len(lines[line].encode()[: node.col_offset].decode())
            module = "." * node.level + (node.module or "")
            wanted = frozenset(names & set(_HOME))
            if wanted or "*" in names:
                mixed = len(names) > 1 and bool(names & set(_OURS["arguments"]))
                imports.append(Import(line, start, module, wanted, mixed))
    return sorted(imports)


def lines_of(text: str) -> list[str]:
    """Return the lines of `text`, with their ends, as Python's parser counts them."""
    return list(io.StringIO(text, newline=""))


@functools.cache
def swapped(text: str) -> str:
    """Return a module's text with Megatron's imports replaced by ours."""
    lines = lines_of(text)
    for statement in _imports(ast.parse(text), text):
        if statement.module in _STOCK and statement.names:
            lines[statement.line] = _with_ours(lines[statement.line], statement)
    return "".join(lines)


def _with_ours(line: str, statement: Import) -> str:
    """Return the first line of a statement with our module; unchanged if it names no module."""
    pattern = rf"^from(\s+){re.escape(statement.module)}(\s+)import\b"
    rest = re.sub(pattern, rf"from\1{statement.ours}\2import", line[statement.start :])
    return line[: statement.start] + rest


def obstacles(path: str, text: str) -> list[str]:
    """Return a line for each reason why swapped imports would not replace Megatron's functions."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [f"{path}:{error.lineno}: is not Python that {sys.executable} reads ({error.msg})"]
    lines, imports = lines_of(text), _imports(tree, text)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    needed = used & set(_HOME) | set(_OURS["checkpointing"] if path in TRAINING else ())
    reasons, swapped_names = [], set()

    def refuse(line: int, reason: str) -> None:
        reasons.append(f"{path}:{line + 1}: `{lines[line].strip()}` {reason}")

    for number, statement in enumerate(imports):
        module, names, line = statement.module, statement.names, statement.line
        if module.startswith("megatron_flashckpt"):
            swapped_names |= names
        elif module in _STOCK and not names:  # a star imports all names
            later = {name for other in imports[number + 1 :] for name in other.names}
            hidden = {name for name in needed - later if _STOCK[module] in _homes(name)}
            if hidden:
                refuse(line, f"hides where names come from; {_instead(hidden)} below it")
        elif module not in _STOCK and names:
            refuse(line, f"imports what is not Megatron's own; {_instead(names)}")
        elif statement.mixed:
            refuse(
                line,
                "is to become imports from two modules; take one name out of it, and "
                + _instead(_OURS["arguments"]),
            )
        elif names and _with_ours(lines[line], statement) == lines[line]:
            refuse(line, f"goes on in the next line; {_instead(names)}")
        else:
            swapped_names |= names
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _HOME and _is_stock(tree, node.value):
            refuse(node.lineno - 1, f"calls Megatron's own; {_instead([node.attr])}, and call that")
    missing = [] if reasons else sorted(needed - swapped_names)
    return [*reasons, *(f"{path}: does not import {name}; {_instead([name])}" for name in missing)]


def _homes(name: str) -> tuple[str, ...]:
    """Return the modules that have `name`, ours and Megatron's."""
    return (_HOME[name], "checkpointing") if name in _OURS["arguments"] else (_HOME[name],)


def _instead(names: Iterable[str]) -> str:
    """Return advice to import `names` from our modules."""
    statements = [
        f"`from megatron_flashckpt.{_HOME[name]} import {name}`" for name in sorted(names)
    ]
    return f"write {' and '.join(statements)}"


def _is_stock(tree: ast.Module, value: ast.expr) -> bool:
    """Return whether an expression in a module is one of Megatron's modules."""
    called = {module for module in _STOCK if not module.startswith(".")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            called |= {
                alias.asname for alias in node.names if alias.name in _STOCK and alias.asname
            }
        elif isinstance(node, ast.ImportFrom):
            home = "." * node.level + (f"{node.module}." if node.module else "")
            called |= {
                alias.asname or alias.name
                for alias in node.names
                if f"{home}{alias.name}" in _STOCK
            }
    return ast.unparse(value) in called
