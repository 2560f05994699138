"""Writes one rank's staged bytes as one shard file, and makes its commit record."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import errno
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

import msgspec
import xxhash

from megatron_flashckpt.agent.write_limits import Flow
from megatron_flashckpt.errors import (
    AlreadyExistsError,
    CorruptCheckpointError,
    FormatVersionError,
    LayoutError,
    StorageError,
)
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format.commit_record import CommitRecord, encode_items
from megatron_flashckpt.file_format.file_names import iteration_dir, shard_name
from megatron_flashckpt.file_format.shard_file import (
    CHUNK_NBYTES,
    chunk_digest,
    decode_header,
    encode_header,
    fill_in,
    header_nbytes,
)
from megatron_flashckpt.layout.save_cost import RankCost
from megatron_flashckpt.memory.slot import Slot, SlotHeader, SlotMeta
from megatron_flashckpt.storage.direct_io import ALIGNMENT
from megatron_flashckpt.storage.store import Store, Writer
from megatron_flashckpt.tracing import phase


class DurableShard(NamedTuple):
    """A durable shard with its commit record and digests."""

    record: CommitRecord
    digests: tuple[str, ...]
    """Digests of the stored chunks; the slot may have changed since another agent wrote them."""
    is_found: bool = False
    """True if the shard had its name before: another agent may have written it, and its record."""


def slot_shard(
    store: Store,
    slot: Slot,
    header: SlotHeader,
    meta: SlotMeta,
    cost: RankCost | None = None,
    flow: Flow | None = None,
    known: Callable[[], tuple[str, ...] | None] = lambda: None,
) -> DurableShard:
    """Make the slot's shard durable, unless it is: then return what is stored.

    Called by the agent, in a worker thread; the slot must not be overwritten meanwhile.

    Args:
        cost: timings of the save on this rank up to the staged slot, if they are known.
        known: returns the digests of all chunks if the slot has been read before.

    Raises:
        StorageError: the attempt has left nothing, or the whole shard.
        CorruptCheckpointError: the slot changed between both readings, or something else has the
            shard's name.
    """
    # Close the views even after an error: a slab cannot be freed while views of it exist.
    with contextlib.closing(_chunks(slot, header.data_nbytes)) as data_section:
        first = (known() or _digests(slot, header.data_nbytes)) if store.in_order else None
        return durable_shard(
            store, header.iteration, header.save_id, meta, data_section, cost, flow, known, first
        )


def stored_digests(store: Store, iteration: int, save_id: str, rank: int) -> tuple[str, ...]:
    """Return the chunk digests of a durable shard."""
    name = f"{iteration_dir(iteration)}/{shard_name(rank, save_id)}"
    place = f"{store.place}/{name}"
    nbytes = header_nbytes(store.get(name, 0, 8), place)
    return decode_header(store.get(name, 0, nbytes), place).digests


def _chunks(slot: Slot, nbytes: int) -> Generator[memoryview, None, None]:
    """Yield the chunks of a slot's data as views, which the caller releases."""
    with slot.data() as data:
        for start in range(0, nbytes, CHUNK_NBYTES):
            yield data[start : start + CHUNK_NBYTES]


def _digests(slot: Slot, nbytes: int) -> tuple[str, ...]:
    """Return the digests of a slot's chunks."""
    digests = []
    with contextlib.closing(_chunks(slot, nbytes)) as chunks, phase("digest"):
        for chunk in chunks:
            with chunk:
                digests.append(chunk_digest(chunk))
    return tuple(digests)


def _write_chunks(
    writer: Writer, data_offset: int, chunks: Iterator[memoryview], flow: Flow
) -> list[str]:
    """Digest and write all chunks with `flow.threads` threads; return the digests in order.

    Each thread holds one chunk at a time. While storage writes the chunks of some threads, another
    thread digests the next chunk. So at most that many chunks are in use.
    """
    threads = flow.threads  # a later run may change them
    digests: dict[int, str] = {}
    numbered = enumerate(chunks)
    taking = threading.Lock()
    failed = threading.Event()

    def write_some() -> None:
        try:
            while not failed.is_set():
                with taking:
                    number, chunk = next(numbered, (-1, None))
                if chunk is None:
                    return
                with chunk:
                    with phase("digest"):
                        digests[number] = chunk_digest(chunk)
                    flow.wait(chunk.nbytes)
                    with phase("write"):
                        writer.write_at(data_offset + number * CHUNK_NBYTES, chunk)
                hit("persist.chunk")
        except BaseException:
            failed.set()
            raise

    with concurrent.futures.ThreadPoolExecutor(threads, "write") as pool:
        # The threads run in copies of this thread's context, so that their phases are recorded with
        # those of the save.
        contexts = [contextvars.copy_context() for _ in range(threads)]
        writing = [pool.submit(context.run, write_some) for context in contexts]
    for future in writing:
        future.result()
    return [digests[number] for number in range(len(digests))]


def _check_unchanged(
    digests: list[str], known: tuple[str, ...] | None, rank: int, iteration: int
) -> None:
    """Raise CorruptCheckpointError if an earlier reading of the slot had other digests."""
    changed = [
        n for n, pair in enumerate(zip(digests, known or (), strict=False)) if len({*pair}) > 1
    ]
    if changed:
        raise CorruptCheckpointError(
            f"rank {rank}: iteration {iteration} was not written: chunks {changed[:8]} of its slot "
            "changed after it was digested; host memory is damaged, or another process writes "
            "to the slot"
        )


def durable_shard(
    store: Store,
    iteration: int,
    save_id: str,
    meta: SlotMeta,
    chunks: Iterator[memoryview],
    cost: RankCost | None = None,
    flow: Flow | None = None,
    known: Callable[[], tuple[str, ...] | None] = lambda: None,
    first: tuple[str, ...] | None = None,
) -> DurableShard:
    """Make one rank's shard durable, unless it is: then return what is stored.

    A shard has its name once it is whole and durable, and is never written again: its save may be
    a checkpoint by now, although this process does not see the record yet.

    Args:
        chunks: the data section in pieces of `CHUNK_NBYTES`, the last one shorter. Each chunk is
            released when it is written; several are in use if `flow.threads` exceeds one.
        cost: timings of the save on this rank up to the staged slot, if they are known.
        known: returns the digests that the chunks must have, or None.
        first: digests that the chunks must have, to write the header before them; for a store that
            sends in order.

    Raises:
        StorageError: the attempt has left nothing, or the whole shard.
        CorruptCheckpointError: the chunks have other digests, or something else has the shard's
            name.
    """
    undigested = encode_header(
        meta.template,
        meta.placement,
        iteration=iteration,
        save_id=save_id,
        rank=meta.rank,
        world_size=meta.world_size,
        alignment=ALIGNMENT,
    )
    name = f"{iteration_dir(iteration)}/{shard_name(meta.rank, save_id)}"
    nbytes = len(undigested) + meta.template.nbytes

    def write() -> list[str]:
        writer = store.writer(name, nbytes)
        hit("persist.created")
        try:
            if first is not None:
                writer.write_at(0, fill_in(undigested, list(first)))
            digests = _write_chunks(writer, len(undigested), chunks, flow or Flow())
            hit("persist.chunks")
            _check_unchanged(digests, first or known(), meta.rank, iteration)
            if first is None:
                writer.write_at(0, fill_in(undigested, digests))
            hit("persist.header")
            with phase("fdatasync"):
                writer.finish()
        except BaseException:
            writer.abandon()
            raise
        return digests

    try:
        digests, is_found = write(), False
    except AlreadyExistsError:
        digests, is_found = _found(store, name, undigested, nbytes), True
    hit("persist.durable")
    encoded = fill_in(undigested, digests)
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
    return DurableShard(record, tuple(digests), is_found)


def _found(store: Store, name: str, undigested: bytes, nbytes: int) -> list[str]:
    """Return the digests of a shard that another agent, or a former attempt, has written.

    Raises:
        StorageError: the name exists, but this node cannot read it yet.
        CorruptCheckpointError: something else has the name.
    """
    place = f"{store.place}/{name}"
    try:
        head = store.get(name, 0, len(undigested))
        digests = list(decode_header(head, place).digests)
        entry = store.stat(name)
        is_own = head == fill_in(undigested, digests) and (entry is None or entry.nbytes == nbytes)
    except FileNotFoundError as error:
        raise StorageError(
            errno.ESTALE, f"{place}: exists, but this node does not see it yet; try again"
        ) from error
    except (CorruptCheckpointError, FormatVersionError, LayoutError):
        is_own = False
    if not is_own:
        raise CorruptCheckpointError(
            f"{place}: has the name of a shard of this save, but is another file; find who writes "
            "there; the next save has names of its own"
        )
    store.make_durable(name)
    return digests
