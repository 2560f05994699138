"""How long a call of `save_checkpoint` waits: as the setting `wait` says, or as one caller asks.

Torch-free: importing the package does not load torch, and this is part of it.
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
            host memory; `durable` when the checkpoint is committed, or has failed, which is handled
            as `on_failure` says.

    Raises:
        ValueError: `wait` is something else.
    """
    if wait not in get_args(Wait):
        raise ValueError(f"waiting({wait!r}): must be one of {', '.join(get_args(Wait))}")
    token = _asked.set(wait)
    try:
        yield
    finally:
        _asked.reset(token)


def wait_of(setting: Wait) -> Wait:
    """Return what the present call waits for, where the configuration says `setting`."""
    return _asked.get() or setting
