"""Python's cyclic garbage collector, held off while much is made that is no garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def held_off() -> Iterator[None]:
    """Let nothing be collected inside the context.

    A save or a load makes several objects per tensor. With 20,000 tensors their number alone sets
    the collector off dozens of times, now and then to go through all objects of the process: that
    took longer than to make them. Reference counts free them, when they are let go of.
    """
    if not gc.isenabled():  # as with Megatron's --manual-gc
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
