"""Variants of the package that sections compare: other values of its constants, one a line."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock


@dataclasses.dataclass(frozen=True)
class Variant:
    """Values of module constants."""

    name: str
    constants: Mapping[str, Any]
    """Values by `MODULE.NAME` inside the package."""

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Set the constants inside the context."""
        with contextlib.ExitStack() as stack:
            for path, value in self.constants.items():
                stack.enter_context(mock.patch(f"megatron_flashckpt.{path}", value))
            yield


SHIPPED = Variant("as shipped", {})
VARIANTS = (
    SHIPPED,
    Variant("parts without gaps", {"save.copy_pace.BUSY_SHARE": 1.0}),
    Variant("copies half of the time", {"save.copy_pace.BUSY_SHARE": 0.5}),
)
