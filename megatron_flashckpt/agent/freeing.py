"""Frees large memory in the background.

Freeing 100 GB in pages of 4 KiB takes about 10 s. A trainer that waits that long for an answer
kills the agent as hung.
"""

from __future__ import annotations

import mmap
import threading

from megatron_flashckpt.memory.slab import Slab


def free(memory: Slab | mmap.mmap | None) -> None:
    """Begin to close `memory`, unless it is None; callers may hold any lock."""
    if memory is not None:
        threading.Thread(target=memory.close, name="flashckpt-free", daemon=True).start()
