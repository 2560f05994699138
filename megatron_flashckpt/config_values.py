"""Checks of setting values and names, with messages that list the allowed ones.

`msgspec.convert` refuses wrong values too, but stops at the first, and does not name the allowed
values. Of a name that a YAML file has twice, PyYAML drops the first value without a word.
"""

from __future__ import annotations

import collections
import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import yaml
from msgspec import inspect


def wrong_values(value: Any, kind: inspect.Type, key: str) -> list[str]:
    """Return a sentence for each wrong value in `value`.

    Args:
        value: decoded YAML: a section or the value of one setting.
        kind: type of the section or setting.
        key: dotted name of the section or setting; empty for all settings.
    """
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    sentences = [line for member in members for line in _out_of_bounds(value, member, key)]
    if not sentences and not any(_is_of(value, member) for member in members):
        sentences = [f"{key} must be {_allowed(members)}, got {_shown(value)}"]
    for member in members:
        if isinstance(member, inspect.StructType) and isinstance(value, dict):
            sentences += _wrong_fields(value, member, key)
    return sentences


def _wrong_fields(section: dict[Any, Any], kind: inspect.StructType, key: str) -> list[str]:
    names = [field.name for field in kind.fields]
    sentences = [
        f"{key} has no field {_shown(name)}{suggestion(str(name), names)}; its fields are "
        f"{', '.join(names)}"
        for name in section
        if name not in names
    ]
    for field in kind.fields:
        name = f"{key}.{field.name}".removeprefix(".")
        if field.name in section:
            sentences += wrong_values(section[field.name], field.type, name)
        elif field.required:
            sentences.append(f"{name} is missing")
    return sentences


def _out_of_bounds(value: Any, kind: inspect.Type, key: str) -> list[str]:
    """Return a sentence if `value` is a number beyond the `msgspec.Meta` bounds of its setting."""
    if isinstance(kind, inspect.IntType | inspect.FloatType) and type(value) in (int, float):
        if kind.ge is not None and value < kind.ge:
            return [f"{key} must be at least {kind.ge}, got {value}"]
        if kind.le is not None and not value <= kind.le:  # also refuses NaN
            return [f"{key} must be at most {kind.le}, got {value}"]
    return []


def _is_of(value: Any, kind: inspect.Type) -> bool:
    match kind:
        case inspect.LiteralType():
            return value in kind.values
        case inspect.IntType():
            return type(value) is int
        case inspect.FloatType():
            return type(value) in (int, float)
        case inspect.BoolType():
            return isinstance(value, bool)
        case inspect.StrType():
            return isinstance(value, str)
        case inspect.NoneType():
            return value is None
        case inspect.VarTupleType():
            return isinstance(value, list) and all(_is_of(item, kind.item_type) for item in value)
        case inspect.StructType():
            return isinstance(value, dict)
    return True  # `msgspec.convert` decides


_NAMES: tuple[tuple[type[inspect.Type], str], ...] = (
    (inspect.IntType, "a whole number"),
    (inspect.FloatType, "a number"),
    (inspect.BoolType, "true or false"),
    (inspect.StrType, "text"),
    (inspect.NoneType, "null"),
    (inspect.VarTupleType, "a list of texts"),
)


def _allowed(kinds: Iterable[inspect.Type]) -> str:
    """Return the allowed values, literals first: `share, first or a whole number of at least 1`."""
    choices = [
        str(value)
        for kind in kinds
        if isinstance(kind, inspect.LiteralType)
        for value in kind.values
    ]
    for kind in kinds:
        least = f" of at least {ge}" if (ge := getattr(kind, "ge", None)) is not None else ""
        choices += [f"{name}{least}" for cls, name in _NAMES if isinstance(kind, cls)]
        if isinstance(kind, inspect.StructType):
            names = ", ".join(field.name for field in kind.fields)
            choices.append(f"a section (fields: {names})")
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last


def _shown(value: Any) -> str:
    """Return `value` as YAML and JSON write it."""
    return msgspec.json.encode(value, enc_hook=str).decode()


def suggestion(name: str, known: Sequence[str], shown: Callable[[str], str] = str) -> str:
    """Return ` (did you mean X?)` for the name most like `name`; empty if no name is similar.

    Args:
        shown: returns a known name in the form that the message gives it.
    """
    similar = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {shown(similar[0])}?)" if similar else ""


def repeated_names(encoded: bytes) -> list[str]:
    """Return the dotted names that a mapping of the YAML `encoded` holds more than once."""
    return _repeated(yaml.compose(encoded, Loader=yaml.SafeLoader), "")


def _repeated(node: yaml.Node | None, prefix: str) -> list[str]:
    if not isinstance(node, yaml.MappingNode):
        return []
    names = [f"{prefix}{key.value}" for key, _ in node.value]
    repeated = [name for name, count in collections.Counter(names).items() if count > 1]
    for name, (_, value) in zip(names, node.value, strict=True):
        repeated += _repeated(value, f"{name}.")
    return repeated
