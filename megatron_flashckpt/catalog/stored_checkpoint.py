"""A committed checkpoint in storage: manifest, shard headers and chunks, verified when read."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import xxhash

from megatron_flashckpt.errors import (
    ANOTHER,
    OLDER,
    CorruptCheckpointError,
    NotCommittedError,
    RenamedCheckpointError,
)
from megatron_flashckpt.file_format import file_names, manifest
from megatron_flashckpt.file_format.manifest import Manifest, ShardEntry
from megatron_flashckpt.file_format.shard_file import (
    CHUNK_NBYTES,
    Shard,
    decode_header,
    header_nbytes,
    new_chunk_digest,
)
from megatron_flashckpt.layout.completeness import incomplete
from megatron_flashckpt.layout.template import Source, Template
from megatron_flashckpt.storage.base import Storage, read_whole
from megatron_flashckpt.storage.scatter_read import KeptFiles

#: Largest common file, which holds args, scheduler and counters.
_MAX_COMMON_NBYTES = 2**30


class StoredCheckpoint:
    """Directory `iter_NNNNNNN` with a manifest. Read-only."""

    def __init__(self, storage: Storage, iteration: int, encoded_manifest: bytes) -> None:
        self.storage = storage
        self.directory = file_names.iteration_dir(iteration)
        self._shards: dict[int, Shard] = {}
        self._kept = KeptFiles()
        self.manifest: Manifest = manifest.decode_manifest(
            encoded_manifest, f"{self.place}/{file_names.MANIFEST}"
        )
        if iteration not in (self.manifest.iteration, file_names.RELEASE):
            raise renamed(self.place, self.manifest.iteration)

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

    def check_whole(self) -> None:
        """Raise CorruptCheckpointError if an element of a tensor is missing or stored twice.

        If a load misses an element, this distinguishes a damaged checkpoint from a wrong request.
        """
        problems = incomplete(self.sources())
        if problems:
            raise CorruptCheckpointError(
                f"{self.place}/{file_names.MANIFEST}: {'; '.join(problems)}; {OLDER}"
            )

    def data_nbytes(self, rank: int) -> int:
        """Return the length of the data section of a rank's shard."""
        return self._templates[self.manifest.shards[rank].template].nbytes

    def common(self) -> bytes:
        """Return the contents of `common-<id>.msgpack`, verified."""
        name = file_names.common_name(self.manifest.save_id)
        with self._missing_file_is_damage(name):
            encoded = read_whole(self.storage, f"{self.directory}/{name}", _MAX_COMMON_NBYTES)
        digest = xxhash.xxh3_64_hexdigest(encoded)
        if digest != self.manifest.common_digest:
            raise CorruptCheckpointError(
                f"{self.place}/{name}: digest {digest}, expected "
                f"{self.manifest.common_digest}; {OLDER}"
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
                f"{place}: {nbytes} bytes long, the manifest says {entry.nbytes}; {OLDER}"
            )
        header = self._stored(entry.file, 0, min(header_nbytes(prefix, place), nbytes))
        digest = xxhash.xxh3_64_hexdigest(header)
        if digest != entry.header_digest:
            raise CorruptCheckpointError(
                f"{place}: header digest {digest}, expected {entry.header_digest}; {OLDER}"
            )
        shard = decode_header(header, place, (self._templates[entry.template], entry.placement))
        self._check_identity(shard, entry, place)
        return shard

    def _check_identity(self, shard: Shard, entry: ShardEntry, place: str) -> None:
        """Raise if a valid header is not the one that the manifest describes.

        Reads are planned from the manifest, so a different header would lead to wrong bytes.
        """
        stored_identity = (shard.metadata.iteration, shard.metadata.save_id, shard.metadata.rank)
        expected_identity = (self.manifest.iteration, self.manifest.save_id, entry.rank)
        if stored_identity != expected_identity:
            raise CorruptCheckpointError(
                f"{place}: is the shard of (iteration, save, rank) {stored_identity}, expected "
                f"{expected_identity}; {OLDER}"
            )
        if (
            shard.template is not self._templates[entry.template]
            or shard.data_offset + shard.template.nbytes != entry.nbytes
        ):
            raise CorruptCheckpointError(
                f"{place}: its pieces differ from those in the manifest; {OLDER}"
            )

    def chunk(self, shard: Shard, index: int) -> memoryview:
        """Return a verified chunk of the data section, in new memory.

        Args:
            shard: header that `shard()` returned.

        Raises:
            CorruptCheckpointError: names file, chunk, bytes and both digests.
        """
        nbytes = min(CHUNK_NBYTES, shard.template.nbytes - index * CHUNK_NBYTES)
        data = memoryview(bytearray(nbytes))
        self._read_chunk(shard, index, [data])
        return data

    def read_chunk(self, rank: int, number: int, parts: Sequence[memoryview]) -> None:
        """Read a chunk into `parts`, as `load.chunk_reader.ChunkSource` defines.

        The header of a shard is read once.
        """
        shard = self._shards.get(rank)
        if shard is None:  # two threads may read the same header, which is harmless
            shard = self._shards[rank] = self.shard(rank)
        self._read_chunk(shard, number, parts)

    def _read_chunk(self, shard: Shard, index: int, parts: Sequence[memoryview]) -> None:
        file = self.manifest.shards[shard.metadata.rank].file
        start = index * CHUNK_NBYTES
        hasher = new_chunk_digest()
        with self._missing_file_is_damage(file):
            name = f"{self.directory}/{file}"
            place = shard.data_offset + start
            self.storage.read_into(name, place, parts, hasher.update, self._kept)
        digest = hasher.hexdigest()
        if digest != shard.digests[index]:
            end = min(start + CHUNK_NBYTES, shard.template.nbytes) - 1
            raise CorruptCheckpointError(
                f"{self.place}/{file}, chunk {index} (bytes {start}-{end} of the "
                f"data): digest {digest}, expected {shard.digests[index]}; {OLDER}"
            )

    def _stored(self, file: str, offset: int, nbytes: int) -> bytes:
        with self._missing_file_is_damage(file):
            return self.storage.read(f"{self.directory}/{file}", offset, nbytes)

    @contextlib.contextmanager
    def _missing_file_is_damage(self, file: str) -> Iterator[None]:
        """Raise CorruptCheckpointError for a missing file that the manifest names."""
        try:
            yield
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{self.place}/{file}: is missing; {OLDER}") from error


def renamed(place: str, iteration: int) -> RenamedCheckpointError:
    """Return the error for a directory `place` that holds the checkpoint of `iteration`."""
    return RenamedCheckpointError(
        f"{place}: holds iteration {iteration}, so this directory was renamed or copied; rename it "
        f"to {file_names.iteration_dir(iteration)} and write {iteration} into "
        f"{file_names.TRACKER}, or {ANOTHER}"
    )


def read_manifest(storage: Storage, iteration: int) -> bytes:
    """Return the bytes of the manifest of `iteration`.

    Raises:
        NotCommittedError: no manifest, so the checkpoint does not exist.
    """
    name = f"{file_names.iteration_dir(iteration)}/{file_names.MANIFEST}"
    try:
        return read_whole(storage, name, manifest.MAX_MANIFEST_NBYTES)
    except FileNotFoundError as error:
        raise NotCommittedError(
            f"{storage.place}/{name}: does not exist: iteration {iteration} was not "
            f"committed, or was removed since; {ANOTHER}"
        ) from error
