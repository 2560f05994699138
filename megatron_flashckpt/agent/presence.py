"""Which files of a pending save are there, asked with as few requests as the wait allows."""

from __future__ import annotations

import random
import time

from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.file_format import file_names

#: Seconds per rank of the job before a node that does not commit lists the directory at all, and
#: the most of it. Most saves are committed by then.
_FIRST_S_PER_RANK, _FIRST_S = 0.05, 10.0
#: Seconds until the next listing, which double with every one, up to the second number.
_LIST_S = (10.0, 90.0)
#: The same where commit records are asked for by name.
_LIST_RECORDS_S = (5.0, 30.0)
#: Entries of a directory that are listed in the time in which one name is asked for.
_ENTRIES_PER_NAME = 8


def look(save: PendingSave) -> set[str]:
    """Return the files that there are in the directory of `save`, as far as this node needs them.

    The node of rank 0 waits for the records of all ranks. It lists the directory while many are
    missing, and asks for the last ones by name: file systems with coarse times may keep an old
    listing; names of nodes that have fewer ranks, or publish in parts, show in a listing only. The
    other nodes ask for the manifest, its marker, and the note that the node of rank 0
    leaves in rank 0's name, whoever has failed: if two thousand nodes listed thirty thousand files
    every second, metadata servers would do nothing else. Now and then, and each at another moment,
    they list the directory all the same: the node of rank 0 may know nothing of the save.
    """
    now = time.monotonic()
    failed = file_names.failure_name(0, save.save_id)
    if 0 in save.metas:
        asked = {file_names.MANIFEST, failed, *save.missing_records}
        asked |= {file_names.failure_name(rank, save.save_id) for rank in save.missing}
        is_cheaper = len(asked) * _ENTRIES_PER_NAME < len(save.listed)
        save.listed_all = not (
            save.missing and is_cheaper and now < save.list_at and save.gone_since is None
        )
        if not save.listed_all:
            save.listed |= save.storage.present(save.directory, asked)
            return save.listed
        save.listed = set(save.storage.list(save.directory))
        if not is_cheaper:
            save.list_every_s = 0.0  # the first one that is dearer than names comes soon
        if now >= save.list_at or not is_cheaper:
            _list_later(save, now, _LIST_RECORDS_S)
        return save.listed
    if save.list_at == 0.0:
        world_size = next(iter(save.metas.values())).world_size
        save.list_at = now + random.uniform(0.5, 1) * min(_FIRST_S, _FIRST_S_PER_RANK * world_size)
    save.listed_all = now >= save.list_at or save.gone_since is not None
    if save.listed_all:
        _list_later(save, now, _LIST_S)
        return set(save.storage.list(save.directory))
    awaited = (file_names.MANIFEST, file_names.marker_name(save.save_id), failed)
    return save.storage.present(save.directory, awaited)


def _list_later(save: PendingSave, now: float, interval_s: tuple[float, float]) -> None:
    """Let the next listing wait, and the one after it twice as long."""
    first, longest = interval_s
    save.list_every_s = min(2 * save.list_every_s, longest) if save.list_every_s else first
    save.list_at = now + random.uniform(0.75, 1.25) * save.list_every_s
