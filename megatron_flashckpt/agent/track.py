"""Megatron's tracker, as the agent of rank 0 moves it, and its twin.

The tracker belongs to Megatron and to people, who edit it. Its twin `flashckpt/tracker.json`
repeats what this package last wrote, so that a lower tracker is recognized as a person's wish.
"""

from __future__ import annotations

from megatron_flashckpt.catalog import directory
from megatron_flashckpt.catalog.lineage import History, Save, Tracked
from megatron_flashckpt.catalog.tracker import tracked_iteration
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.store import Store
from megatron_flashckpt.tracing import phase


def moved_tracker(store: Store, save: Save, history: History | None) -> int | None:
    """Let the tracker name a committed save, unless it names a later one of the same history.

    Called by the agent that holds rank 0's part of the save, after a look for a later run. The rank
    may run on another node by now, whose agent knows nothing of this save.

    Args:
        history: of the newest run; None: no trainer has reported one.

    Returns:
        The iteration that the tracker has passed: the one that it named before (None: none), or
        that of `save` if the tracker stays.

    Raises:
        StorageError: the tracker cannot be read or written.
    """
    former = directory.tracked(store)
    if former is not None:
        named = Save(former.iteration, former.save_id)
        is_of_history = named.run == save.run or (history is not None and history.holds(named))
        if is_of_history and named.order > save.order:
            return save.iteration
    previous = tracked_iteration(store)
    with phase("tracker"):
        # Only this thread writes it while the run is the newest one.
        store.discard_unfinished("", lambda name: name == file_names.TRACKER)
        store.put(file_names.TRACKER, str(save.iteration).encode())
        hit("commit.tracker")
        directory.put_tracked(store, Tracked(save.iteration, save.save_id))
    hit("commit.tracked")
    return previous
