"""Write one rank's bytes as one shard file, as they lie."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator

import msgspec
import xxhash

from megatron_flashckpt.faults import reach
from megatron_flashckpt.layout.cost import RankCost
from megatron_flashckpt.layout.manifest import (
    CommitRecord,
    encode_items,
    encode_record,
    iteration_dir,
    record_name,
    shard_name,
)
from megatron_flashckpt.layout.shard_file import (
    CHUNK_NBYTES,
    chunk_count,
    chunk_digest,
    decode_header,
    encode_header,
    header_nbytes,
)
from megatron_flashckpt.memory.slot import Slot, SlotHeader, SlotMeta
from megatron_flashckpt.storage.base import Storage
from megatron_flashckpt.tracing import phase


def persist_slot(
    storage: Storage,
    slot: Slot,
    header: SlotHeader,
    meta: SlotMeta,
    cost: RankCost | None = None,
) -> tuple[str, ...]:
    """Make the slot's shard durable, then its commit record; return the chunk digests.

    Called by the agent, in a worker thread; the slot must not be overwritten meanwhile.

    Args:
        cost: what the save has taken on this rank so far.

    Raises:
        StorageError: nothing of the attempt is left behind.
    """

    # Closed at once, whatever happens: a slab with views of it in use cannot be given back.
    with contextlib.closing(_chunks(slot, header.data_nbytes)) as data_section:
        return write_shard(storage, header.iteration, header.save_id, meta, data_section, cost)


def stored_digests(storage: Storage, header: SlotHeader, rank: int) -> tuple[str, ...]:
    """Return the chunk digests of a shard that is durable already."""
    name = f"{iteration_dir(header.iteration)}/{shard_name(rank, header.save_id)}"
    place = f"{storage.place}/{name}"
    nbytes = header_nbytes(storage.read(name, 0, 8), place)
    return decode_header(storage.read(name, 0, nbytes), place).digests


def digest_slot(slot: Slot, header: SlotHeader) -> tuple[str, ...]:
    """Return the chunk digests of a slot that is not written anywhere.

    Called by the agent, in a worker thread; the slot must not be overwritten meanwhile.
    """
    with contextlib.closing(_chunks(slot, header.data_nbytes)) as data_section, phase("digest"):
        return tuple(chunk_digest(chunk) for chunk in data_section)


def _chunks(slot: Slot, nbytes: int) -> Generator[memoryview, None, None]:
    with slot.data() as data:
        for start in range(0, nbytes, CHUNK_NBYTES):
            with data[start : start + CHUNK_NBYTES] as chunk:
                yield chunk


def write_shard(
    storage: Storage,
    iteration: int,
    save_id: str,
    meta: SlotMeta,
    chunks: Iterator[memoryview],
    cost: RankCost | None = None,
) -> tuple[str, ...]:
    """Make one rank's shard durable, then its commit record; return the chunk digests.

    Args:
        chunks: the data section in pieces of `CHUNK_NBYTES`, the last one shorter.
        cost: what the save has taken on this rank so far.

    Raises:
        StorageError: nothing of the attempt is left behind.
    """
    directory = iteration_dir(iteration)

    def shard_header(digests: list[str]) -> bytes:
        return encode_header(
            meta.template,
            meta.placement,
            iteration=iteration,
            save_id=save_id,
            rank=meta.rank,
            world_size=meta.world_size,
            digests=digests,
        )

    data_offset = len(shard_header(["0" * 16] * chunk_count(meta.template.nbytes)))
    nbytes = data_offset + meta.template.nbytes
    writer = storage.create(f"{directory}/{shard_name(meta.rank, save_id)}", nbytes)
    digests: list[str] = []
    reach("persist.created")
    try:
        for chunk in chunks:
            position = data_offset + len(digests) * CHUNK_NBYTES
            with phase("digest"):
                digests.append(chunk_digest(chunk))
            with phase("write"):
                writer.write_at(position, chunk)
            reach("persist.chunk")
        reach("persist.chunks")
        encoded = shard_header(digests)
        # Header after data: a file cut short by a crash has no header and cannot pass for a shard.
        writer.write_at(0, encoded)
        reach("persist.header")
        with phase("fdatasync"):
            writer.finish()
    except BaseException:
        writer.abandon()
        raise
    reach("persist.durable")
    record = CommitRecord(
        iteration=iteration,
        save_id=save_id,
        rank=meta.rank,
        coordinates=meta.coordinates,
        file=shard_name(meta.rank, save_id),
        nbytes=nbytes,
        header_digest=xxhash.xxh3_64_hexdigest(encoded),
        template_fingerprint=meta.template_fingerprint,
        template=encode_items(meta.template.items),
        template_nbytes=meta.template.nbytes,
        placement=meta.placement,
        metrics=meta.metrics,
        cost=cost and msgspec.structs.replace(cost, persisted_s=time.time() - cost.started_at),
    )
    # Commit record last: its presence means that every byte above is durable.
    with phase("commit record"):
        storage.put(f"{directory}/{record_name(meta.rank, save_id)}", encode_record(record))
    reach("persist.record")
    return tuple(digests)
