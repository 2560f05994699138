"""A pause of Python's cyclic garbage collector while a save or a load creates many objects."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Turn the cyclic collector off inside the context.

    A save or a load creates several objects per tensor. With 20,000 tensors their number triggers
    the collector dozens of times, sometimes for all objects of the process, which took longer than
    to create them. Reference counts free the objects.
    """
    if not gc.isenabled():  # as with Megatron's --manual-gc
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
