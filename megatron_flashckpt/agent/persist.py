"""Write one rank's bytes as one shard file, as they lie: maybe while they are still coming."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import queue
import threading
import time
from collections.abc import Generator, Iterator

import msgspec
import xxhash

from megatron_flashckpt.agent.arrival import Arrival
from megatron_flashckpt.agent.flow import Flow
from megatron_flashckpt.faults import reach
from megatron_flashckpt.layout.names import iteration_dir, record_name, shard_name
from megatron_flashckpt.layout.records import CommitRecord, encode_items, encode_record
from megatron_flashckpt.layout.shard_file import (
    CHUNK_NBYTES,
    chunk_digest,
    decode_header,
    encode_header,
    fill_in,
    header_nbytes,
)
from megatron_flashckpt.memory.slot import Slot, SlotHeader, SlotMeta
from megatron_flashckpt.storage.base import Storage, Writer
from megatron_flashckpt.tracing import phase


def persist_slot(
    storage: Storage,
    slot: Slot,
    header: SlotHeader,
    meta: SlotMeta,
    arrival: Arrival | None = None,
    flow: Flow = Flow(),  # noqa: B008, a frozen one
) -> tuple[str, ...]:
    """Make the slot's shard durable, then its commit record; return the chunk digests.

    Called by the agent, in a worker thread; the slot must not be overwritten meanwhile.

    Args:
        arrival: of the bytes, which need not be there yet; None: they are.

    Raises:
        StorageError: nothing of the attempt is left behind.
        WithdrawnError: the bytes will not come; nothing of the attempt is left behind.
    """
    # Closed at once, whatever happens: a slab with views of it in use cannot be given back.
    with contextlib.closing(_chunks(slot, header.data_nbytes, arrival)) as data_section:
        return write_shard(
            storage, header.iteration, header.save_id, meta, data_section, arrival, flow
        )


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
        return tuple(_digest(chunk) for chunk in data_section)


def _digest(chunk: memoryview) -> str:
    with chunk:
        return chunk_digest(chunk)


def _chunks(
    slot: Slot, nbytes: int, arrival: Arrival | None = None
) -> Generator[memoryview, None, None]:
    """Yield views of a slot as soon as they are filled, which whoever gets them releases."""
    with slot.data() as data:
        for start in range(0, nbytes, CHUNK_NBYTES):
            if arrival is not None:
                arrival.wait(min(start + CHUNK_NBYTES, nbytes))
            yield data[start : start + CHUNK_NBYTES]


class _Chunks:
    """The chunks of one shard on their way to storage, one per thread at a time.

    While storage works on those of some threads, another digests the next: the queue is never
    longer than there are threads. While a trainer copies, chunks are only written, and digested
    when it has ended: with its digests the writer made these copies a third longer where all cores
    were copying, and hardly longer without.
    """

    def __init__(
        self,
        writer: Writer,
        data_offset: int,
        chunks: Iterator[memoryview],
        arrival: Arrival | None,
        flow: Flow,
    ) -> None:
        self._writer = writer
        self._data_offset = data_offset
        self._arrival = arrival
        self._flow = flow
        self._numbered = enumerate(chunks)
        self._taking = threading.Lock()
        self._failed = threading.Event()
        self._undigested: queue.SimpleQueue[tuple[int, memoryview]] = queue.SimpleQueue()
        self._digests: dict[int, str] = {}

    def write(self) -> list[str]:
        """Return the digests in order when all chunks are written and may count."""
        threads = self._flow.threads
        try:
            with concurrent.futures.ThreadPoolExecutor(threads, "write") as pool:
                # In the context of this thread: the phases are recorded with those of the save.
                contexts = [contextvars.copy_context() for _ in range(threads)]
                writing = [pool.submit(context.run, self._work) for context in contexts]
            for each in writing:
                each.result()
            if self._arrival is not None:
                self._arrival.wait_handed_over()
            while self._digest_one_more():
                pass
        finally:
            while not self._undigested.empty():
                self._undigested.get()[1].release()
        return [self._digests[number] for number in range(len(self._digests))]

    @property
    def _is_filling(self) -> bool:
        return self._arrival is not None and self._arrival.is_filling

    def _work(self) -> None:
        try:
            while not self._failed.is_set() and (self._digest_one_more() or self._write_next()):
                pass
        except BaseException:
            self._failed.set()
            raise

    def _digest_one_more(self) -> bool:
        """Digest a chunk that is written already, unless that has to wait, or there is none."""
        if self._is_filling:
            return False
        try:
            number, chunk = self._undigested.get_nowait()
        except queue.Empty:
            return False
        with chunk:
            self._digest(number, chunk)
        return True

    def _write_next(self) -> bool:
        """Write a chunk, unless there is no other one."""
        with self._taking:
            number, chunk = next(self._numbered, (-1, None))
        if chunk is None:
            return False
        with contextlib.ExitStack() as stack:
            stack.enter_context(chunk)
            digest_later = self._is_filling
            if not digest_later:
                self._digest(number, chunk)
            self._flow.pace.wait(chunk.nbytes)
            with phase("write"):
                self._writer.write_at(self._data_offset + number * CHUNK_NBYTES, chunk)
            if digest_later:
                stack.pop_all()
                self._undigested.put((number, chunk))
        reach("persist.chunk")
        return True

    def _digest(self, number: int, chunk: memoryview) -> None:
        with phase("digest"):
            self._digests[number] = chunk_digest(chunk)


def write_shard(
    storage: Storage,
    iteration: int,
    save_id: str,
    meta: SlotMeta,
    chunks: Iterator[memoryview],
    arrival: Arrival | None = None,
    flow: Flow = Flow(),  # noqa: B008, a frozen one
) -> tuple[str, ...]:
    """Make one rank's shard durable, then its commit record; return the chunk digests.

    Args:
        chunks: the data section in pieces of `CHUNK_NBYTES`, the last one shorter; each is
            released when it is written. With more than one of `flow.threads`, several are in use
            at a time.
        arrival: of the chunks, if they come from a slot. There is no header, and no commit record,
            before it is handed over.

    Raises:
        StorageError: nothing of the attempt is left behind.
        WithdrawnError: it never is handed over; nothing of the attempt is left behind.
    """
    directory = iteration_dir(iteration)

    undigested = encode_header(
        meta.template,
        meta.placement,
        iteration=iteration,
        save_id=save_id,
        rank=meta.rank,
        world_size=meta.world_size,
    )
    data_offset = len(undigested)
    nbytes = data_offset + meta.template.nbytes
    writer = storage.create(f"{directory}/{shard_name(meta.rank, save_id)}", nbytes)
    reach("persist.created")
    try:
        digests = _Chunks(writer, data_offset, chunks, arrival, flow).write()
        reach("persist.chunks")
        encoded = fill_in(undigested, digests)
        # Header after data: a file cut short by a crash has no header and cannot pass for a shard.
        writer.write_at(0, encoded)
        reach("persist.header")
        with phase("fdatasync"):
            writer.finish()
    except BaseException:
        writer.abandon()
        raise
    reach("persist.durable")
    cost = None if arrival is None else arrival.cost
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
    # Commit record last: its presence means that every byte above is durable. It need not be: a
    # manifest says all of it, and a save that has none when power is lost has failed.
    with phase("commit record"):
        name = f"{directory}/{record_name(meta.rank, save_id)}"
        storage.put(name, encode_record(record), durable="nothing")
    reach("persist.record")
    return tuple(digests)
