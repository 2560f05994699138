"""A committed checkpoint in storage, and reading it verified."""

from __future__ import annotations

import concurrent.futures
from collections import defaultdict

import torch
import xxhash

from megatron_flashckpt.errors import CorruptCheckpointError, NotCommittedError
from megatron_flashckpt.layout import manifest as names
from megatron_flashckpt.layout.coverage import Read, Source
from megatron_flashckpt.layout.manifest import Manifest, ShardEntry
from megatron_flashckpt.layout.shard_file import (
    CHUNK_NBYTES,
    Shard,
    chunk_digest,
    decode_header,
    header_nbytes,
)
from megatron_flashckpt.restore.targets import Targets
from megatron_flashckpt.storage.base import Storage

_OLDER = "load an older iteration with --ckpt-step"


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

    def sources(self) -> list[Source]:
        """Return every rank's layout, in rank order."""
        templates = {
            fingerprint: self.manifest.template(fingerprint)
            for fingerprint in self.manifest.templates
        }
        return [
            Source(shard.rank, templates[shard.template], shard.placement)
            for shard in self.manifest.shards
        ]

    def common(self) -> bytes:
        """Return the contents of `common.pt`, verified."""
        place = f"{self.place}/{names.COMMON}"
        try:
            encoded = self.storage.read(f"{self.directory}/{names.COMMON}")
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{place}: is missing; {_OLDER}") from error
        found = xxhash.xxh3_64_hexdigest(encoded)
        if found != self.manifest.common_digest:
            raise CorruptCheckpointError(
                f"{place}: digest {found}, expected {self.manifest.common_digest}; {_OLDER}"
            )
        return encoded

    def shard(self, rank: int) -> Shard:
        """Return the header of a rank's shard file, checked against the manifest."""
        entry = self.manifest.shards[rank]
        name, place = f"{self.directory}/{entry.file}", f"{self.place}/{entry.file}"
        try:
            nbytes = self.storage.size(name)
            prefix = self.storage.read(name, 0, 8)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{place}: is missing; {_OLDER}") from error
        if nbytes != entry.nbytes:
            raise CorruptCheckpointError(
                f"{place}: {nbytes} bytes long, the manifest says {entry.nbytes}; {_OLDER}"
            )
        header = self.storage.read(name, 0, min(header_nbytes(prefix, place), nbytes))
        found = xxhash.xxh3_64_hexdigest(header)
        if found != entry.header_digest:
            raise CorruptCheckpointError(
                f"{place}: header digest {found}, expected {entry.header_digest}; {_OLDER}"
            )
        shard = decode_header(header, place)
        self._check_identity(shard, entry, place)
        return shard

    def _check_identity(self, shard: Shard, entry: ShardEntry, place: str) -> None:
        said = (shard.metadata.iteration, shard.metadata.save_id, shard.metadata.rank)
        meant = (self.manifest.iteration, self.manifest.save_id, entry.rank)
        if said != meant or shard.placement != entry.placement:
            raise CorruptCheckpointError(
                f"{place}: is the shard of (iteration, save, rank) {said}, expected {meant}; "
                f"{_OLDER}"
            )

    def read(self, plan: dict[int, list[Read]], targets: Targets, threads: int) -> int:
        """Carry out `plan`; return the bytes read.

        Whole chunks are read, so that every byte is verified before it is used; at most `threads`
        chunks of 16 MiB are in memory at a time.

        Raises:
            CorruptCheckpointError: names file, chunk, bytes and both digests.
        """
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            jobs = []
            for rank, reads in plan.items():
                shard = self.shard(rank)
                for chunk, parts in sorted(_by_chunk(reads).items()):
                    jobs.append(pool.submit(self._chunk, rank, shard, chunk, parts, targets))
            try:
                return sum(job.result() for job in jobs)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _chunk(
        self, rank: int, shard: Shard, chunk: int, reads: list[Read], targets: Targets
    ) -> int:
        file = self.manifest.shards[rank].file
        start = chunk * CHUNK_NBYTES
        nbytes = min(CHUNK_NBYTES, shard.template.nbytes - start)
        data = bytearray(
            self.storage.read(f"{self.directory}/{file}", shard.data_offset + start, nbytes)
        )
        found = chunk_digest(data)
        if found != shard.digests[chunk]:
            raise CorruptCheckpointError(
                f"{self.place}/{file}, chunk {chunk} (bytes {start}-{start + nbytes - 1} of the "
                f"data): digest {found}, expected {shard.digests[chunk]}; {_OLDER}"
            )
        source = torch.frombuffer(data, dtype=torch.uint8)
        for read in reads:
            low = max(read.source_offset, start)
            high = min(read.source_offset + read.nbytes, start + nbytes)
            targets.write(
                read.wanted,
                read.target_offset + low - read.source_offset,
                source[low - start : high - start],
            )
        return nbytes


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
