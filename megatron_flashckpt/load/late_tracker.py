"""Wait for a tracker that the file system still shows in an older state.

A network file system may show a new name, or the new content of a name, up to a minute late (NFS:
`acdirmax`). A load on another node than that of the committing agent then sees an older tracker, or
none. A person who sets the tracker back leaves the same state. The load must resume from memory in
the first case and must not in the second.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from megatron_flashckpt.file_format.file_names import TRACKER
from megatron_flashckpt.load.candidates import is_set_back, newest_committed
from megatron_flashckpt.load.memory_checkpoints import MemoryCheckpoint
from megatron_flashckpt.load.named_checkpoint import NamedCheckpoint, tracker_is_newer
from megatron_flashckpt.storage.base import Storage

logger = logging.getLogger(__name__)

_POLL_S = 0.25


def await_tracker(
    find: Callable[[], NamedCheckpoint],
    storage: Storage,
    memory: Sequence[MemoryCheckpoint],
    wait_s: float,
) -> NamedCheckpoint:
    """Return `find()`, repeated until the tracker names the newest committed iteration.

    Rank 0 calls this. It ends at once if the tracker was written after that iteration's manifest,
    because then a person has set it back.

    Args:
        wait_s: longest wait in seconds; afterwards the tracker is believed.

    Raises:
        FlashCkptError: `find` failed.
    """
    named = find()
    if not is_set_back(named, memory):
        return named
    newest = newest_committed(memory)
    place = f"{storage.place}/{TRACKER}"
    state = "names no iteration" if named.iteration is None else f"names {named.iteration}"
    was_written_after = tracker_is_newer(storage, newest)
    named = find()  # the tracker may have come into view before its time was looked at
    if is_set_back(named, memory) and not was_written_after:
        logger.warning(
            "%s %s, although iteration %d was committed; waiting at most %.0f s, because the file "
            "system may show it late",
            place,
            state,
            newest,
            wait_s,
        )
        deadline = time.monotonic() + wait_s
        while is_set_back(named, memory) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            named = find()
    if is_set_back(named, memory):
        logger.warning(
            "%s %s, although iteration %d was committed: it was set back or removed, so "
            "checkpoints in host memory are not used",
            place,
            state,
            newest,
        )
    return named
