"""Side state as bytes that load with `torch.load(weights_only=True)` and no allow-list.

Megatron's args hold enums, dtypes, functions and more. They are turned into plain types: an enum or
a named tuple becomes a tagged name and is restored only if its class is already imported; what has
no plain form is recorded by its `repr` for people to read and is left out on loading. Nothing in a
checkpoint can make a loader import or call anything.
"""

from __future__ import annotations

import argparse
import enum
import io
import pathlib
import sys
import types
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from megatron_flashckpt.errors import CorruptCheckpointError

_TAG = "__flashckpt__"
_LEFT_OUT = object()
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype))
#: Numbers that are packed. Torch's safe unpickler is written in Python: the 625 of the state of a
#: generator took 1.1 ms of the 1.6 in which a rank's side state is decoded.
_MANY = 64


def encode(value: Any) -> bytes:
    """Return `value` as bytes."""
    buffer = io.BytesIO()
    torch.save(to_plain(value), buffer)
    return buffer.getvalue()


def decode(encoded: bytes, place: str) -> Any:
    """Return what `encode` was given, as far as it has a plain form.

    Raises:
        CorruptCheckpointError: not such bytes, or a pickle that wants to call something.
    """
    try:
        read = torch.load(io.BytesIO(encoded), weights_only=True, map_location="cpu")
        _refuse_to_unfold(read, len(encoded))
        return from_plain(read)
    except Exception as error:  # torch.load raises whatever the broken bytes lead to
        # Not torch's own message: it advises to load the file with weights_only=False.
        raise CorruptCheckpointError(
            f"{place}: side state is damaged or wants to run code ({type(error).__name__}); load "
            "an older iteration with --ckpt-step"
        ) from None


def _refuse_to_unfold(value: Any, limit: int) -> None:
    """Raise ValueError if `value`, without sharing, has more than `limit` parts.

    In a pickle a list may hold another one twice, and so on: sixty such lists take a few hundred
    bytes, and what is made of them by value fills any memory. `encode` shares no containers.
    """
    left = [value]
    count = 0
    while left:
        part = left.pop()
        count += 1
        if count > limit:
            raise ValueError("unfolds to more parts than it has bytes")
        if isinstance(part, dict):
            left += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            left += part


def decode_dict(encoded: bytes, place: str, keys: Collection[str]) -> dict[str, Any]:
    """Return the dict that `encode` was given, which must have `keys`.

    Raises:
        CorruptCheckpointError: it is no such dict.
    """
    found = decode(encoded, place)
    missing = [key for key in keys if not isinstance(found, dict) or key not in found]
    if missing:
        raise CorruptCheckpointError(
            f"{place}: side state lacks {', '.join(missing)}; load an older iteration with "
            "--ckpt-step"
        )
    kept: dict[str, Any] = found
    return kept


def to_plain(value: Any) -> Any:
    """Return `value` made of dicts, lists, tuples, atoms and CPU tensors only."""
    if type(value) in _ATOMS and value != b"":  # first: states of generators are thousands of them
        return value
    if isinstance(value, enum.Enum):
        return {_TAG: "enum", "class": _path(value), "name": value.name}
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return {_TAG: "repr", "value": repr(value)}
        return {
            _TAG: "ndarray",
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "value": to_plain(value.tobytes()),
        }
    if isinstance(value, np.generic):
        scalar = value.item()
        return to_plain(scalar) if type(scalar) in _ATOMS else {_TAG: "repr", "value": repr(value)}
    if type(value) is bytes and not value:
        # Pickle writes b"" as a call of `bytes`, which weights_only refuses.
        return {_TAG: "no_bytes"}
    if isinstance(value, dict):
        items = [(to_plain(key), to_plain(item)) for key, item in value.items()]
        try:
            return {_TAG: "dict", "items": items} if _TAG in value else dict(items)
        except TypeError:  # a key (an enum, say) became a tagged dict, which cannot be a key
            return {_TAG: "dict", "items": items}
    if type(value) in (list, tuple):
        packed = _packed(value) if len(value) >= _MANY else None
        if packed is not None:
            return {_TAG: type(value).__name__, "value": packed}
        return type(value)(to_plain(item) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [to_plain(item) for item in value]
        return {_TAG: "namedtuple", "class": _path(value), "items": items}
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return {_TAG: "namespace", "value": to_plain(vars(value))}
    if isinstance(value, set | frozenset):
        tag = "set" if isinstance(value, set) else "frozenset"
        return {_TAG: tag, "value": sorted((to_plain(item) for item in value), key=repr)}
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if isinstance(value, io.BytesIO):
        return {_TAG: "bytesio", "value": to_plain(value.getvalue())}
    return {_TAG: "repr", "value": repr(value)}


def _packed(numbers: Sequence[Any]) -> bytes | None:
    """Return `numbers` as 64-bit integers; None if they are not such."""
    if set(map(type, numbers)) != {int}:
        return None
    try:
        return np.array(numbers, "<i8").tobytes()
    except OverflowError:
        return None


def _path(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def from_plain(value: Any) -> Any:
    """Return what `to_plain` was given; entries without a plain form are missing."""
    restored = _restore(value)
    return None if restored is _LEFT_OUT else restored


def _restore(value: Any) -> Any:
    if isinstance(value, dict) and _TAG in value:
        match value[_TAG]:
            case "enum":
                return _enum_member(value["class"], value["name"])
            case "namedtuple":
                return _named_tuple(value["class"], [_restore(item) for item in value["items"]])
            case "ndarray":
                flat = np.frombuffer(_restore(value["value"]), dtype=np.dtype(value["dtype"]))
                return flat.reshape(value["shape"]).copy()
            case "list":
                return np.frombuffer(value["value"], "<i8").tolist()
            case "tuple":
                return tuple(np.frombuffer(value["value"], "<i8").tolist())
            case "dict":
                pairs = [(_restore(key), _restore(item)) for key, item in value["items"]]
                return {k: v for k, v in pairs if k is not _LEFT_OUT and v is not _LEFT_OUT}
            case "namespace":
                return argparse.Namespace(**_restore(value["value"]))
            case "set":
                return set(_restore(value["value"]))
            case "frozenset":
                return frozenset(_restore(value["value"]))
            case "bytesio":
                return io.BytesIO(_restore(value["value"]))
            case "no_bytes":
                return b""
        return _LEFT_OUT
    if isinstance(value, dict):
        restored = {key: _restore(item) for key, item in value.items()}
        return {key: item for key, item in restored.items() if item is not _LEFT_OUT}
    if isinstance(value, list | tuple):
        items = (_restore(item) for item in value)
        return type(value)(item for item in items if item is not _LEFT_OUT)
    return value


def _enum_member(path: str, name: str) -> Any:
    """Return the member if its class is an Enum that this process has imported by itself."""
    found = _imported(path)
    if isinstance(found, type) and issubclass(found, enum.Enum):
        return found.__members__.get(name, _LEFT_OUT)
    return _LEFT_OUT


def _named_tuple(path: str, items: list[Any]) -> Any:
    """Return the tuple if its class is one that this process has imported, and has such fields."""
    found = _imported(path)
    if isinstance(found, type) and issubclass(found, tuple):
        fields = vars(found).get("_fields")
        whole = all(item is not _LEFT_OUT for item in items)
        if whole and isinstance(fields, tuple) and len(fields) == len(items):
            # Not found(*items): a class may run anything when it is called.
            return tuple.__new__(found, items)
    return _LEFT_OUT


def _imported(path: str) -> Any:
    """Return what `module:qualified.name` is; None if it is nothing that is there already."""
    module, _, qualified = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        # Not getattr: the __getattr__ of a module or a metaclass may import or call something.
        space = vars(found) if isinstance(found, types.ModuleType | type) else {}
        found = space.get(part)
    return found
