"""The names that a commit creates in storage: records, a manifest or a failure as the end.

Each function is one attempt: errors are raised, and `commit_core` decides about another one. A
create that raised may have taken effect; the next attempt finds its own bytes, and is content.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection, Sequence

import msgspec
import xxhash

from megatron_flashckpt.agent.commit_core import Ended
from megatron_flashckpt.errors import (
    AlreadyExistsError,
    CorruptCheckpointError,
    FlashCkptError,
    first_few,
)
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format import end as ends
from megatron_flashckpt.file_format import file_names, manifest
from megatron_flashckpt.file_format.commit_record import (
    KNOWN_ITEMS,
    CommitRecord,
    decode_records,
    encode_records,
)
from megatron_flashckpt.file_format.end import End, Failure
from megatron_flashckpt.memory.slot import SlotMeta
from megatron_flashckpt.storage.parallel import for_all
from megatron_flashckpt.storage.store import Store, read_whole
from megatron_flashckpt.tracing import phase

#: Larger files are not read; record files are far smaller.
_MAX_RECORD_NBYTES = 2**28


class MissingShardsError(CorruptCheckpointError):
    """Shards have records, but their files are not visible."""


class MissingRecordError(FlashCkptError):
    """A record that a listing has shown is not there."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name}: is missing")
        self.name = name


# ---------------------------------------------------------------------- records


def create_records(store: Store, records: Sequence[CommitRecord]) -> None:
    """Report to all nodes that the shards of these ranks, of one save, are durable.

    A file holds a run of contiguous ranks: with a file per rank, a save of 16,384 ranks would
    create and remove as many files in one directory.
    """
    by_rank = {record.rank: record for record in records}
    for ranks in file_names.runs_of(by_rank):
        own = [by_rank[rank] for rank in ranks]
        directory = file_names.iteration_dir(own[0].iteration)
        name = f"{directory}/{file_names.record_name(ranks, own[0].save_id)}"
        with phase("commit record"), contextlib.suppress(AlreadyExistsError):
            store.create(name, encode_records(own))
        hit("persist.record")


def read_records(
    store: Store, iteration: int, save_id: str, world_size: int, names: Collection[str]
) -> list[CommitRecord]:
    """Return the records of all ranks, in order; one record of each template has its items.

    A rank may have two records that agree, because an agent was killed while it published the
    first.

    Args:
        names: files in the directory of the save.

    Raises:
        MissingRecordError: one of the files is not there.
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
            for record in _read(store, directory, name, iteration, save_id, ranks)
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
                    f"{store.place}/{directory}: two commit records of rank {record.rank} "
                    "contradict each other; the next save writes new ones"
                )
            if other.template is KNOWN_ITEMS:
                by_rank[record.rank] = record
    return [by_rank[rank] for rank in sorted(by_rank)]


def _shard_of(record: CommitRecord) -> CommitRecord:
    """Return the record without timings and template items: its statement about the shard."""
    return msgspec.structs.replace(record, template=KNOWN_ITEMS, cost=None)


def _read(
    store: Store, directory: str, name: str, iteration: int, save_id: str, ranks: range
) -> list[CommitRecord]:
    place = f"{store.place}/{directory}/{name}"
    try:
        encoded = read_whole(store, f"{directory}/{name}", _MAX_RECORD_NBYTES)
    except FileNotFoundError as error:
        raise MissingRecordError(name) from error
    records = decode_records(encoded, place)
    stored = [(record.iteration, record.save_id, record.rank, record.file) for record in records]
    expected = [(iteration, save_id, rank, file_names.shard_name(rank, save_id)) for rank in ranks]
    if stored != expected:
        raise CorruptCheckpointError(
            f"{place}: is the record of (iteration, save, rank, file) {first_few(stored)}, "
            f"expected {first_few(expected)}; the next save writes new ones"
        )
    return records


def check_shards(store: Store, iteration: int, records: Sequence[CommitRecord]) -> None:
    """Raise unless all shards exist with the sizes that their records state.

    If another job or a person removes a shard while records are read, no manifest may name it.

    Raises:
        MissingShardsError: names the shards that are missing; all others have the right size.
        CorruptCheckpointError: names the shards that are missing or have another size.
    """
    directory = file_names.iteration_dir(iteration)

    def fault(record: CommitRecord) -> tuple[bool, str] | None:
        entry = store.stat(f"{directory}/{record.file}")
        if entry is None:
            return True, f"{record.file} is missing"
        if entry.nbytes != record.nbytes:
            return False, f"{record.file} has {entry.nbytes} bytes instead of {record.nbytes}"
        return None

    faults = [found for found in for_all(fault, records) if found is not None]
    if faults:
        message = (
            f"{store.place}/{directory}: {first_few([text for _, text in faults], '; ')}: "
            "removed or changed since the shards were written; find the other writer before the "
            "next save"
        )
        if all(is_missing for is_missing, _ in faults):
            raise MissingShardsError(message)
        raise CorruptCheckpointError(message)


def is_recorded(store: Store, iteration: int, save_id: str, rank: int, world_size: int) -> bool:
    """Return whether a save may be, or become, a checkpoint without further help of this rank."""
    directory = file_names.iteration_dir(iteration)
    listed = [entry.name for entry in store.list(directory, sizes=False)]
    is_over = file_names.end_name(save_id) in listed
    return is_over or rank in file_names.ranks_with_record(listed, save_id, world_size)


# ---------------------------------------------------------------------- the end


def look(store: Store, iteration: int, save_id: str) -> Ended | None:
    """Return the end of a save, as storage shows it now; None: it has none yet."""
    name = f"{file_names.iteration_dir(iteration)}/{file_names.end_name(save_id)}"
    try:
        head = store.get(name, 0, ends.FAILED_NBYTES)
    except FileNotFoundError:
        return None
    return _ended(head, is_durable=False)


def _ended(head: bytes, *, is_durable: bool) -> Ended:
    if ends.kind_of(head) is End.COMMITTED:
        return Ended(End.COMMITTED, None, is_durable)
    failure = ends.decode_failure(head)
    if failure.was_removed:  # it was a checkpoint, until no rule of retention kept it
        return Ended(End.COMMITTED, None, is_durable=True)
    return Ended(End.FAILED, failure, is_durable)


def create_end(store: Store, iteration: int, save_id: str, end: bytes) -> tuple[bytes, bool]:
    """Create the end of a save, unless it has one, perhaps of an earlier attempt of this agent.

    Returns:
        The head of the end that the save has, and whether this call has made its name durable.
    """
    name = f"{file_names.iteration_dir(iteration)}/{file_names.end_name(save_id)}"
    try:
        store.create(name, end)
    except AlreadyExistsError:
        return store.get(name, 0, ends.FAILED_NBYTES), False
    return end, True


def propose_failure(store: Store, iteration: int, save_id: str, failure: Failure) -> Ended:
    """Propose that a save failed; return the end that it has."""
    head, is_durable = create_end(store, iteration, save_id, ends.encode_failure(failure))
    return _ended(head, is_durable=is_durable)


def propose_manifest(
    store: Store,
    iteration: int,
    save_id: str,
    meta: SlotMeta,
    names: Collection[str],
    trained_s: float | None = None,
) -> Ended:
    """Propose that a save is a checkpoint; return the end that it has, with the save's timings.

    Called by the agent that holds rank 0's part.

    Args:
        meta: description of rank 0's slot.
        names: files in the directory of the save; records of all ranks are among them.
        trained_s: seconds since the start of the run that makes the save, if they are known.

    Raises:
        MissingRecordError: a record is not there.
        CorruptCheckpointError: the records contradict each other, or a shard is missing.
    """
    directory = file_names.iteration_dir(iteration)
    with phase("read records"):
        records = read_records(store, iteration, save_id, meta.world_size, names)
    with phase("merge"):
        merged = manifest.merge(
            records,
            world_size=meta.world_size,
            description=meta.description,
            common_digest=xxhash.xxh3_64_hexdigest(meta.common),
            committed_at=time.time(),
            trained_s=trained_s,
            ancestors=meta.ancestors,
        )
        # Loads would reject such a manifest, so it must not become a checkpoint.
        manifest.check(merged, f"{store.place}/{directory}/{file_names.end_name(save_id)}")
    with phase("check shards"):
        check_shards(store, iteration, records)
    with phase("manifest"):
        common = f"{directory}/{file_names.common_name(save_id)}"
        try:
            store.create(common, meta.common)
        except AlreadyExistsError:  # an earlier attempt, or something in its place
            if store.get(common, 0, len(meta.common) + 1) != meta.common:
                raise
            store.make_durable(common)  # that attempt may have ended right before
        hit("commit.common")
        encoded = manifest.encode_manifest(merged)
        head, is_durable = create_end(store, iteration, save_id, encoded)
    hit("commit.end")
    return dataclasses.replace(_ended(head, is_durable=is_durable), cost=merged.cost)
