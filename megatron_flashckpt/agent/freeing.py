"""Frees large memory in the background.

Freeing 100 GB in pages of 4 KiB takes about 10 s. A trainer that waits that long for an answer
kills the agent as hung.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

from megatron_flashckpt.memory.slab import Slab


def free(memory: Slab | mmap.mmap | None) -> None:
    """Begin to close `memory`, unless it is None; callers may hold any lock."""
    if memory is not None:
        in_background(memory.close)


def in_background(close: Callable[[], None]) -> None:
    """Call `close` in a thread of its own, or here if the process has no thread left.

    The agent then answers late, which is better than an error that ends the thread of the caller.
    """
    try:
        threading.Thread(target=close, name="flashckpt-free", daemon=True).start()
    except RuntimeError:
        close()
