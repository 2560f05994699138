"""The commit records of a save, as the agent that commits reads them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from megatron_flashckpt.agent.markers import is_committed
from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.catalog.history import told_of
from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.commit_record import KNOWN_ITEMS, CommitRecord, decode_record
from megatron_flashckpt.storage.base import Storage, read_whole
from megatron_flashckpt.storage.parallel import for_all

#: More than such files have: what claims more is not read.
_MAX_RECORD_NBYTES = 2**28
#: Shards that an error names.
_SHOWN = 8

#: Seconds for which a record must not be seen to count as removed.
_GONE_S = 2.0


def read_records(
    storage: Storage, iteration: int, save_id: str, world_size: int
) -> list[CommitRecord]:
    """Return the records of all ranks, in order; the first of each template has its items.

    Raises:
        CorruptCheckpointError: one is no record, or that of another save, rank or file.
    """
    first_of: dict[str, int] = {}

    def read(rank: int) -> CommitRecord:
        record = _read(storage, iteration, save_id, rank)
        if first_of.setdefault(record.template_fingerprint, rank) == rank:
            return record
        return msgspec.structs.replace(record, template=KNOWN_ITEMS)

    return for_all(read, range(world_size))


def check_shards(storage: Storage, iteration: int, records: Sequence[CommitRecord]) -> None:
    """Raise unless all shards are there with the sizes that their records state.

    Whoever removes a shard while the records are read (another job, a person) must not leave a
    checkpoint that names it.

    Raises:
        CorruptCheckpointError: names the shards that are missing or have another size.
    """
    directory = file_names.iteration_dir(iteration)

    def fault(record: CommitRecord) -> str | None:
        try:
            nbytes = storage.size(f"{directory}/{record.file}")
        except FileNotFoundError:
            return f"{record.file} is missing"
        if nbytes != record.nbytes:
            return f"{record.file} has {nbytes} bytes instead of {record.nbytes}"
        return None

    faults = [text for text in for_all(fault, records) if text is not None]
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise CorruptCheckpointError(
            f"{storage.place}/{directory}: {'; '.join(faults[:_SHOWN])}{more}: removed or changed "
            "since the shards were written; find out what else writes there before the next save"
        )


def why_gone(save: PendingSave, persisted: Sequence[int], present: set[str]) -> str | None:
    """Return why nobody can commit a save: records of this node were removed; None: they are there.

    What the history knows of the save goes to `save.past`: retention may have removed it. A list
    that another host changes meanwhile may lack a name, so a record has to be missing for a while.

    Args:
        persisted: ranks of this node whose records were there before `present` was read.
        present: all names in the directory of the save.
    """
    published = {file_names.record_name(rank, save.save_id) for rank in persisted}
    if published <= present:
        save.gone_since = None
        return None
    if save.gone_since is None:
        save.gone_since = time.monotonic()
    if time.monotonic() - save.gone_since < _GONE_S:
        return None
    save.past = told_of(save.storage, save.save_id)
    if save.past is not None:
        return None
    gone = sorted(published - present)
    more = f" and {len(gone) - _SHOWN} more" if len(gone) > _SHOWN else ""
    return (
        f"{save.storage.place}/{save.directory}: {', '.join(gone[:_SHOWN])}{more} was removed "
        "before the save was committed; find out what else removes files there; the next save "
        "makes them anew"
    )


def is_persisted(save: PendingSave, rank: int) -> bool:
    """Return whether an agent that is gone made this rank's shard of `save` durable.

    Such a file must not be written again: the checkpoint may be, or become, committed meanwhile.
    """
    if file_names.record_name(rank, save.save_id) in save.storage.list(save.directory):
        return True
    # Records go after the manifest has come: in this order one of the two is always seen.
    return is_committed(save, set(save.storage.list(save.directory)))


def _read(storage: Storage, iteration: int, save_id: str, rank: int) -> CommitRecord:
    name = f"{file_names.iteration_dir(iteration)}/{file_names.record_name(rank, save_id)}"
    record = decode_record(read_whole(storage, name, _MAX_RECORD_NBYTES), f"{storage.place}/{name}")
    said = (record.iteration, record.save_id, record.rank, record.file)
    meant = (iteration, save_id, rank, file_names.shard_name(rank, save_id))
    if said != meant:
        raise CorruptCheckpointError(
            f"{storage.place}/{name}: is the record of (iteration, save, rank, file) {said}, "
            f"expected {meant}; the next save writes new ones"
        )
    return record
