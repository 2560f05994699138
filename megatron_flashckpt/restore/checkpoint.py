"""A committed checkpoint in storage, and reading it verified."""

from __future__ import annotations

import concurrent.futures
import functools
from collections import defaultdict
from typing import Protocol

import xxhash

from megatron_flashckpt.errors import CorruptCheckpointError, NotCommittedError
from megatron_flashckpt.layout import manifest as names
from megatron_flashckpt.layout.coverage import Read, Source
from megatron_flashckpt.layout.manifest import Manifest, ShardEntry
from megatron_flashckpt.layout.plan import Template
from megatron_flashckpt.layout.shard_file import (
    CHUNK_NBYTES,
    Shard,
    chunk_digest,
    decode_header,
    header_nbytes,
)
from megatron_flashckpt.storage.base import Storage

_OLDER = "load an older iteration with --ckpt-step"


class Sink(Protocol):
    """Where verified bytes go: `restore.targets.Targets`, or whatever a tool makes of them."""

    def write_bytes(self, index: int, offset: int, source: memoryview) -> None:
        """Put `source`, which is writable and not used again, at byte `offset` of `index`.

        Called by several threads, for different ranges.
        """


class StoredCheckpoint:
    """One `iter_NNNNNNN` directory with a manifest. Reads only; changes nothing."""

    def __init__(self, storage: Storage, iteration: int, encoded_manifest: bytes) -> None:
        self.storage = storage
        self.directory = names.iteration_dir(iteration)
        self.manifest: Manifest = names.decode_manifest(
            encoded_manifest, f"{self.place}/{names.MANIFEST}"
        )
        if self.manifest.iteration != iteration:
            raise CorruptCheckpointError(
                f"{self.place}/{names.MANIFEST}: is that of iteration {self.manifest.iteration}; "
                f"{_OLDER}"
            )

    @property
    def place(self) -> str:
        return f"{self.storage.place}/{self.directory}"

    @functools.cached_property
    def _templates(self) -> dict[str, Template]:
        return {
            fingerprint: self.manifest.template(fingerprint)
            for fingerprint in self.manifest.templates
        }

    def sources(self) -> list[Source]:
        """Return every rank's layout, in rank order."""
        return [
            Source(shard.rank, self._templates[shard.template], shard.placement)
            for shard in self.manifest.shards
        ]

    def common(self) -> bytes:
        """Return the contents of `common-<id>.pt`, verified."""
        name = names.common_name(self.manifest.save_id)
        encoded = self._stored(name)
        found = xxhash.xxh3_64_hexdigest(encoded)
        if found != self.manifest.common_digest:
            raise CorruptCheckpointError(
                f"{self.place}/{name}: digest {found}, expected "
                f"{self.manifest.common_digest}; {_OLDER}"
            )
        return encoded

    def shard(self, rank: int) -> Shard:
        """Return the header of a rank's shard file, checked against the manifest."""
        entry = self.manifest.shards[rank]
        place = f"{self.place}/{entry.file}"
        prefix = self._stored(entry.file, 0, 8)
        nbytes = self.storage.size(f"{self.directory}/{entry.file}")
        if nbytes != entry.nbytes:
            raise CorruptCheckpointError(
                f"{place}: {nbytes} bytes long, the manifest says {entry.nbytes}; {_OLDER}"
            )
        header = self._stored(entry.file, 0, min(header_nbytes(prefix, place), nbytes))
        found = xxhash.xxh3_64_hexdigest(header)
        if found != entry.header_digest:
            raise CorruptCheckpointError(
                f"{place}: header digest {found}, expected {entry.header_digest}; {_OLDER}"
            )
        shard = decode_header(header, place)
        self._check_identity(shard, entry, place)
        return shard

    def _check_identity(self, shard: Shard, entry: ShardEntry, place: str) -> None:
        """Refuse a header that is sound by itself but not the one that the manifest describes.

        Reads are planned from the manifest alone: where the two differ, wrong bytes would be read.
        """
        said = (shard.metadata.iteration, shard.metadata.save_id, shard.metadata.rank)
        meant = (self.manifest.iteration, self.manifest.save_id, entry.rank)
        if said != meant:
            raise CorruptCheckpointError(
                f"{place}: is the shard of (iteration, save, rank) {said}, expected {meant}; "
                f"{_OLDER}"
            )
        if (
            shard.placement != entry.placement
            or _described(shard.template) != _described(self._templates[entry.template])
            or shard.data_offset + shard.template.nbytes != entry.nbytes
        ):
            raise CorruptCheckpointError(
                f"{place}: holds other pieces than the manifest says; {_OLDER}"
            )

    def read(self, plan: dict[int, list[Read]], targets: Sink, threads: int) -> int:
        """Carry out `plan`; return the bytes read.

        Whole chunks are read, so that every byte is verified before it is used; at most `threads`
        chunks of 16 MiB are in memory at a time.

        Raises:
            CorruptCheckpointError: names file, chunk, bytes and both digests.
        """
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            try:
                jobs = []
                for rank, reads in plan.items():
                    shard = self.shard(rank)
                    for chunk, parts in sorted(_by_chunk(reads).items()):
                        jobs.append(pool.submit(self._deliver, shard, chunk, parts, targets))
                return sum(job.result() for job in jobs)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def chunk(self, shard: Shard, index: int) -> bytes:
        """Return a chunk of the data section, verified.

        Args:
            shard: what `shard` returned.

        Raises:
            CorruptCheckpointError: names file, chunk, bytes and both digests.
        """
        file = self.manifest.shards[shard.metadata.rank].file
        start = index * CHUNK_NBYTES
        nbytes = min(CHUNK_NBYTES, shard.template.nbytes - start)
        data = self._stored(file, shard.data_offset + start, nbytes)
        found = chunk_digest(data)
        if found != shard.digests[index]:
            raise CorruptCheckpointError(
                f"{self.place}/{file}, chunk {index} (bytes {start}-{start + nbytes - 1} of the "
                f"data): digest {found}, expected {shard.digests[index]}; {_OLDER}"
            )
        return data

    def _deliver(self, shard: Shard, index: int, reads: list[Read], targets: Sink) -> int:
        # A copy, because torch makes tensors of writable memory only.
        data = memoryview(bytearray(self.chunk(shard, index)))
        start, end = index * CHUNK_NBYTES, index * CHUNK_NBYTES + data.nbytes
        for read in reads:
            low = max(read.source_offset, start)
            high = min(read.source_offset + read.nbytes, end)
            offset = read.target_offset + low - read.source_offset
            targets.write_bytes(read.wanted, offset, data[low - start : high - start])
        return data.nbytes

    def _stored(self, file: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Return bytes of a file that the manifest promises."""
        try:
            return self.storage.read(f"{self.directory}/{file}", offset, nbytes)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{self.place}/{file}: is missing; {_OLDER}") from error


def _described(template: Template) -> list[tuple[object, ...]]:
    """Return what header and manifest both say of a template, in terms that both can express."""
    return [
        (f"{it.kind}/{it.key}", it.dtype, it.global_shape, it.shape, it.numel, it.byte_offset)
        for it in template.items
    ]


def _by_chunk(reads: list[Read]) -> dict[int, list[Read]]:
    chunks: dict[int, list[Read]] = defaultdict(list)
    for read in reads:
        if read.nbytes:
            last = (read.source_offset + read.nbytes - 1) // CHUNK_NBYTES
            for chunk in range(read.source_offset // CHUNK_NBYTES, last + 1):
                chunks[chunk].append(read)
    return chunks


def read_manifest(storage: Storage, iteration: int) -> bytes:
    """Return the bytes of the manifest of `iteration`.

    Raises:
        NotCommittedError: there is none, so that checkpoint does not exist.
    """
    name = f"{names.iteration_dir(iteration)}/{names.MANIFEST}"
    try:
        return storage.read(name)
    except FileNotFoundError as error:
        raise NotCommittedError(
            f"{storage.place}/{name}: does not exist, so iteration {iteration} was never "
            "committed; choose another with --ckpt-step"
        ) from error
