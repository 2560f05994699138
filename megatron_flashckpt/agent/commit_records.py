"""Commit records of a save, as the committing agent reads them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import msgspec

from megatron_flashckpt.agent.markers import is_committed
from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.catalog.history import past_save
from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.commit_record import KNOWN_ITEMS, CommitRecord, decode_records
from megatron_flashckpt.storage.base import Storage, read_whole
from megatron_flashckpt.storage.parallel import for_all

#: Larger files are not read; record files are far smaller.
_MAX_RECORD_NBYTES = 2**28
#: Shards that an error names.
_SHOWN = 8

#: Seconds for which a record must be missing to count as removed.
_GONE_S = 2.0


class MissingShardsError(CorruptCheckpointError):
    """Shards have records, but their files are not visible."""

    def __init__(self, message: str, ranks: frozenset[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


def read_records(
    storage: Storage, iteration: int, save_id: str, world_size: int, names: Collection[str]
) -> list[CommitRecord]:
    """Return the records of all ranks, in order; one record of each template has its items.

    A rank may have two records that agree, because an agent was killed while it published the
    first.

    Args:
        names: files in the directory of the save.

    Raises:
        CorruptCheckpointError: a file holds no records, or those of another save, rank or shard, or
            two records of a rank contradict each other.
    """
    directory = file_names.iteration_dir(iteration)
    file_with_items: dict[str, str] = {}

    def read(file: tuple[str, range]) -> list[CommitRecord]:
        name, ranks = file
        return [
            msgspec.structs.replace(record, template=KNOWN_ITEMS)
            if record.template is not KNOWN_ITEMS
            and file_with_items.setdefault(record.template_fingerprint, name) != name
            else record
            for record in _read(storage, f"{directory}/{name}", iteration, save_id, ranks)
        ]

    files = sorted(file_names.records_of(names, save_id, world_size).items())
    by_rank: dict[int, CommitRecord] = {}
    for records in for_all(read, files):
        for record in records:
            other = by_rank.setdefault(record.rank, record)
            if other is record:
                continue
            if _shard_of(other) != _shard_of(record):
                raise CorruptCheckpointError(
                    f"{storage.place}/{directory}: two commit records of rank {record.rank} "
                    "contradict each other; the next save writes new ones"
                )
            if other.template is KNOWN_ITEMS:
                by_rank[record.rank] = record
    return [by_rank[rank] for rank in sorted(by_rank)]


def _shard_of(record: CommitRecord) -> CommitRecord:
    """Return the record without timings and template items: its statement about the shard."""
    return msgspec.structs.replace(record, template=KNOWN_ITEMS, cost=None)


def check_shards(storage: Storage, iteration: int, records: Sequence[CommitRecord]) -> None:
    """Raise unless all shards exist with the sizes that their records state.

    If another job or a person removes a shard while records are read, no manifest may name it.

    Raises:
        MissingShardsError: names the shards that are missing; all others have the right size.
        CorruptCheckpointError: names the shards that are missing or have another size.
    """
    directory = file_names.iteration_dir(iteration)
    missing: set[int] = set()

    def fault(record: CommitRecord) -> str | None:
        try:
            nbytes = _size(storage, directory, record.file)
        except FileNotFoundError:
            missing.add(record.rank)
            return f"{record.file} is missing"
        if nbytes != record.nbytes:
            return f"{record.file} has {nbytes} bytes instead of {record.nbytes}"
        return None

    faults = [text for text in for_all(fault, records) if text is not None]
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        message = (
            f"{storage.place}/{directory}: {'; '.join(faults[:_SHOWN])}{more}: removed or changed "
            "since the shards were written; find the other writer before the next save"
        )
        if len(missing) == len(faults):
            raise MissingShardsError(message, frozenset(missing))
        raise CorruptCheckpointError(message)


def _size(storage: Storage, directory: str, name: str) -> int:
    try:
        return storage.size(f"{directory}/{name}")
    except FileNotFoundError:
        # `present` asks the file system's server, which knows names made a moment ago.
        if name not in storage.present(directory, [name]):
            raise
        return storage.size(f"{directory}/{name}")


def removal_error(save: PendingSave, persisted: Sequence[int], present: set[str]) -> str | None:
    """Return an error that names this node's removed records; None if none was removed.

    Every commit needs these records. If the history knows the save, `save.past` gets its
    entry, because retention may have removed the files. A listing during another host's changes may
    lack a name, so a record counts as removed after `_GONE_S`.

    Args:
        persisted: ranks of this node whose records existed before `present` was read.
        present: all names in the directory of the save.
    """
    world_size = save.world_size
    gone = set(persisted) - file_names.ranks_with_record(present, save.save_id, world_size)
    if not gone:
        save.gone_since = None
        return None
    if save.gone_since is None:
        save.gone_since = time.monotonic()
    if time.monotonic() - save.gone_since < _GONE_S:
        return None
    save.past = past_save(save.storage, save.save_id)
    if save.past is not None:
        return None
    runs = file_names.runs_of(gone)
    names = [file_names.record_name(run.start, save.save_id, len(run)) for run in runs]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"{save.storage.place}/{save.directory}: {', '.join(names[:_SHOWN])}{more} was removed "
        "before the save was committed; find out what else removes files there; the next save "
        "writes new ones"
    )


def is_persisted(save: PendingSave, rank: int) -> bool:
    """Return whether a former agent made this rank's shard of `save` durable.

    Such a file must not be written again, because the checkpoint may be committed meanwhile.
    """
    world_size = save.metas[rank].world_size
    listed = save.storage.list(save.directory)
    for name, ranks in file_names.records_of(listed, save.save_id, world_size).items():
        if rank in ranks:
            save.record_names.add(name)
            return True
    # Records are removed after the manifest is written: in this order one of the two is seen.
    return is_committed(save, set(save.storage.list(save.directory)))


def _read(
    storage: Storage, name: str, iteration: int, save_id: str, ranks: range
) -> list[CommitRecord]:
    place = f"{storage.place}/{name}"
    records = decode_records(read_whole(storage, name, _MAX_RECORD_NBYTES), place)
    stored = [(record.iteration, record.save_id, record.rank, record.file) for record in records]
    expected = [(iteration, save_id, rank, file_names.shard_name(rank, save_id)) for rank in ranks]
    if stored != expected:
        raise CorruptCheckpointError(
            f"{place}: is the record of (iteration, save, rank, file) {_listed(stored)}, "
            f"expected {_listed(expected)}; the next save writes new ones"
        )
    return records


def _listed(items: Sequence[tuple[int, str, int, str]]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(map(str, items[:_SHOWN])) + more
