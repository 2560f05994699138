"""Wait of a `save_checkpoint` call: the setting `wait`, or the override of one caller.

This module does not import torch, because `import megatron_flashckpt` imports it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Literal, get_args

Wait = Literal["none", "staged", "durable"]

_asked: ContextVar[Wait | None] = ContextVar("flashckpt_wait", default=None)


@contextlib.contextmanager
def waiting(wait: Wait) -> Iterator[None]:
    """Override the setting `wait` for the calls of `save_checkpoint` inside the context.

    Args:
        wait: `none` returns as soon as training may continue; `staged` when this rank's part is in
            host memory; `durable` when the save is committed or has failed (see `on_failure`).

    Raises:
        ValueError: `wait` has another value.
    """
    if wait not in get_args(Wait):
        raise ValueError(f"waiting({wait!r}): must be one of {', '.join(get_args(Wait))}")
    token = _asked.set(wait)
    try:
        yield
    finally:
        _asked.reset(token)


def wait_of(setting: Wait) -> Wait:
    """Return the wait of the current call, which is `setting` unless `waiting` overrides it."""
    return _asked.get() or setting
