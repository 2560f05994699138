"""Lookup of a pending save's files, with as few storage requests as possible."""

from __future__ import annotations

import random
import time

from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.file_format import file_names

#: Delay of the first listing on a node that does not commit: seconds per rank of the job, and the
#: maximum. Most saves are committed by then.
_FIRST_S_PER_RANK, _FIRST_S = 0.05, 10.0
#: Seconds until the next listing: the first interval, and the maximum after doublings.
_LIST_S = (10.0, 90.0)
#: The same intervals while commit records are requested by name.
_LIST_RECORDS_S = (5.0, 30.0)
#: Directory entries that can be listed in the time of one request by name.
_ENTRIES_PER_NAME = 8


def present_files(save: PendingSave) -> set[str]:
    """Return the files in the directory of `save`, as far as this node needs to know them.

    The node of rank 0 waits for the records of all ranks. While many records are missing it lists
    the directory; the last ones it requests by name, because file systems with coarse times may
    return an old listing. Only a listing shows names of nodes that have fewer ranks or publish in
    parts.

    Other nodes request the manifest, its marker, and the note that the node of rank 0 leaves in
    rank 0's name, whichever rank has failed. If two thousand nodes listed thirty thousand files
    every second, metadata servers would be overloaded. These nodes still list the directory rarely,
    at random moments, because the node of rank 0 may not know the save.
    """
    now = time.monotonic()
    failed = file_names.failure_name(0, save.save_id)
    if 0 in save.metas:
        wanted = {file_names.MANIFEST, failed, *save.missing_records}
        wanted |= {file_names.failure_name(rank, save.save_id) for rank in save.missing}
        is_cheaper = len(wanted) * _ENTRIES_PER_NAME < len(save.listed)
        save.listed_all = not (
            save.missing and is_cheaper and now < save.list_at and save.gone_since is None
        )
        if not save.listed_all:
            save.listed |= save.storage.present(save.directory, wanted)
            return save.listed
        save.listed = set(save.storage.list(save.directory))
        if not is_cheaper:
            save.list_every_s = 0.0  # start the intervals anew
        if now >= save.list_at or not is_cheaper:
            _list_later(save, now, _LIST_RECORDS_S)
        return save.listed
    if save.list_at == 0.0:
        world_size = save.world_size
        save.list_at = now + random.uniform(0.5, 1) * min(_FIRST_S, _FIRST_S_PER_RANK * world_size)
    save.listed_all = now >= save.list_at or save.gone_since is not None
    if save.listed_all:
        _list_later(save, now, _LIST_S)
        return set(save.storage.list(save.directory))
    awaited = (file_names.MANIFEST, file_names.marker_name(save.save_id), failed)
    return save.storage.present(save.directory, awaited)


def _list_later(save: PendingSave, now: float, interval_s: tuple[float, float]) -> None:
    """Delay the next listing, and double the interval after it."""
    first, longest = interval_s
    save.list_every_s = min(2 * save.list_every_s, longest) if save.list_every_s else first
    save.list_at = now + random.uniform(0.75, 1.25) * save.list_every_s
