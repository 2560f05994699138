"""Variants of the package that sections compare: other values of its constants, one a line."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock


@dataclasses.dataclass(frozen=True)
class Variant:
    """Values of module constants."""

    name: str
    constants: Mapping[str, Any]
    """Values by `MODULE.NAME` inside the package."""

    @property
    def missing(self) -> str:
        """Constants that this version of the package does not have; empty if it has all."""
        return ", ".join(path for path in self.constants if not hasattr(*_place(path)))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Set the constants inside the context."""
        with contextlib.ExitStack() as stack:
            for path, value in self.constants.items():
                stack.enter_context(mock.patch.object(*_place(path), value))
            yield


def _place(path: str) -> tuple[Any, str]:
    """Return the module and the name of a constant."""
    module, _, name = path.rpartition(".")
    return importlib.import_module(f"megatron_flashckpt.{module}"), name


SHIPPED = Variant("as shipped", {})
VARIANTS = (
    SHIPPED,
    Variant("parts without gaps", {"save.copy_pace.BUSY_SHARE": 1.0}),
    Variant("copies half of the time", {"save.copy_pace.BUSY_SHARE": 0.5}),
)
