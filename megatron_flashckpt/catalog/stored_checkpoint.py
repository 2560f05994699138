"""A committed checkpoint in storage: manifest, shard headers and chunks, verified when read."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence

import xxhash

from megatron_flashckpt.catalog import foreign
from megatron_flashckpt.catalog.directory import read_facts
from megatron_flashckpt.catalog.lineage import Facts, History, Save, choose, newest_history
from megatron_flashckpt.errors import (
    ANOTHER,
    OLDER,
    CorruptCheckpointError,
    FlashCkptError,
    NotCommittedError,
    RenamedCheckpointError,
)
from megatron_flashckpt.file_format import file_names, manifest
from megatron_flashckpt.file_format.end import (
    FAILED_NBYTES,
    HEAD_NBYTES,
    End,
    Failure,
    decode_failure,
    kind_of,
)
from megatron_flashckpt.file_format.manifest import Manifest, ShardEntry
from megatron_flashckpt.file_format.shard_file import (
    CHUNK_NBYTES,
    Shard,
    decode_header,
    header_nbytes,
    new_chunk_digest,
    older_version,
)
from megatron_flashckpt.layout.completeness import incomplete
from megatron_flashckpt.layout.template import Source, Template
from megatron_flashckpt.storage.scatter_read import KeptFiles
from megatron_flashckpt.storage.store import Store, read_whole

#: Largest common file, which holds args, scheduler and counters.
_MAX_COMMON_NBYTES = 2**30


class StoredCheckpoint:
    """A save in storage whose end is a manifest. Read-only."""

    def __init__(self, store: Store, save: Save, encoded_manifest: bytes) -> None:
        self.store = store
        self.save = save
        self.directory = file_names.iteration_dir(save.iteration)
        self._shards: dict[int, Shard] = {}
        self._kept = KeptFiles()
        self.manifest: Manifest = manifest.decode_manifest(encoded_manifest, self.end_place)
        iteration = self.manifest.iteration
        if save.iteration not in (iteration, file_names.RELEASE):
            raise RenamedCheckpointError(
                f"{self.place}: holds iteration {iteration}, so this directory was renamed or "
                f"copied; rename it to {file_names.iteration_dir(iteration)} and write {iteration} "
                f"into {file_names.TRACKER}, or {ANOTHER}"
            )
        if self.manifest.save_id != save.save_id:
            raise CorruptCheckpointError(
                f"{self.end_place}: is the end of {self.manifest.save_id}; {OLDER}"
            )

    @property
    def place(self) -> str:
        return f"{self.store.place}/{self.directory}"

    @property
    def end_place(self) -> str:
        return f"{self.place}/{file_names.end_name(self.save.save_id)}"

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
            raise CorruptCheckpointError(f"{self.end_place}: {'; '.join(problems)}; {OLDER}")

    def data_nbytes(self, rank: int) -> int:
        """Return the length of the data section of a rank's shard."""
        return self._templates[self.manifest.shards[rank].template].nbytes

    def common(self) -> bytes:
        """Return the contents of the common file, verified."""
        name = file_names.common_name(self.manifest.save_id)
        with self._missing_file_is_damage(name):
            encoded = read_whole(self.store, f"{self.directory}/{name}", _MAX_COMMON_NBYTES)
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
        stored = self.store.stat(f"{self.directory}/{entry.file}")
        nbytes = 0 if stored is None else stored.nbytes
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
        if shard.data_offset + shard.nbytes != entry.nbytes:
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
        nbytes = min(CHUNK_NBYTES, shard.nbytes - index * CHUNK_NBYTES)
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
            self.store.get_into(name, place, parts, hasher.update, self._kept)
        digest = hasher.hexdigest()
        if digest != shard.digests[index]:
            end = min(start + CHUNK_NBYTES, shard.nbytes) - 1
            raise CorruptCheckpointError(
                f"{self.place}/{file}, chunk {index} (bytes {start}-{end} of the "
                f"data): digest {digest}, expected {shard.digests[index]}; {OLDER}"
            )

    def _stored(self, file: str, offset: int, nbytes: int) -> bytes:
        with self._missing_file_is_damage(file):
            return self.store.get(f"{self.directory}/{file}", offset, nbytes)

    @contextlib.contextmanager
    def _missing_file_is_damage(self, file: str) -> Iterator[None]:
        """Raise CorruptCheckpointError for a missing file that the manifest names."""
        try:
            yield
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{self.place}/{file}: is missing; {OLDER}") from error


def read_manifest(store: Store, save: Save) -> bytes:
    """Return the bytes of the end of a committed save.

    Raises:
        NotCommittedError: the save has no end, or a failed one, so the checkpoint does not exist.
    """
    name = f"{file_names.iteration_dir(save.iteration)}/{file_names.end_name(save.save_id)}"
    try:
        encoded = read_whole(store, name, manifest.MAX_MANIFEST_NBYTES)
    except FileNotFoundError as error:
        raise NotCommittedError(
            f"{store.place}/{name}: does not exist: iteration {save.iteration} was not "
            f"committed, or was removed since; {ANOTHER}"
        ) from error
    if kind_of(encoded) is End.FAILED:  # retention has removed the checkpoint since it was chosen
        raise NotCommittedError(
            f"{store.place}/{name}: {decode_failure(encoded).failed}; {ANOTHER}"
        )
    return encoded


def ends_of(store: Store, iteration: int, names: Collection[str]) -> dict[Save, Failure | None]:
    """Return the saves of an iteration that have an end, the latest first.

    A committed save has None, a failed one the reason.

    Args:
        names: the files in the directory of the iteration.
    """
    directory = file_names.iteration_dir(iteration)
    ends: dict[Save, Failure | None] = {}
    for save_id in file_names.ends_in(names):
        save = Save(iteration, save_id)
        name = f"{directory}/{file_names.end_name(save_id)}"
        with contextlib.suppress(FileNotFoundError):  # retention has removed the save meanwhile
            if kind_of(store.get(name, 0, HEAD_NBYTES)) is End.COMMITTED:
                ends[save] = None
            else:
                ends[save] = decode_failure(store.get(name, 0, FAILED_NBYTES))
    return ends


def that_counts(saves: Sequence[Save], history: History | None) -> Save:
    """Return the save of an iteration that counts: of the newest history, else the highest.

    Args:
        saves: committed saves of one iteration, at least one.
    """
    of_history = [save for save in saves if history is not None and history.holds(save)]
    return max(of_history or saves, key=lambda save: save.order)


def newest_history_of(facts: Facts) -> History | None:
    """Return the history of which a load would choose, even if a person removed the tracker."""
    left = {save.run for save in (*facts.stored, *facts.held)}
    return choose(facts).history or newest_history(facts.runs, left)


def open_checkpoint(store: Store, iteration: int) -> StoredCheckpoint:
    """Return the committed checkpoint of `iteration` (`file_names.RELEASE` for `release`).

    Raises:
        NotCommittedError: no such checkpoint, or one in Megatron's or DLRover's format.
        CorruptCheckpointError: the manifest is damaged.
        FormatVersionError: the checkpoint is of a newer release, or of format 1.
    """
    directory = file_names.iteration_dir(iteration)
    names = {entry.name for entry in store.list(directory, sizes=False)}
    ends = ends_of(store, iteration, names)
    committed = [save for save, failure in ends.items() if failure is None]
    if not committed:
        raise _not_committed(store, iteration, names, list(filter(None, ends.values())))
    history = None if len(committed) == 1 else newest_history_of(read_facts(store))
    save = that_counts(committed, history)
    return StoredCheckpoint(store, save, read_manifest(store, save))


def _not_committed(
    store: Store, iteration: int, names: Collection[str], failures: Sequence[Failure]
) -> FlashCkptError:
    """Return the error for an iteration that no save of this format has committed."""
    directory = file_names.iteration_dir(iteration)
    place = f"{store.place}/{directory}"
    if file_names.MANIFEST_OF_FORMAT_1 in names:
        return older_version(place)
    if problem := foreign.dlrover_problem(store, iteration):
        return NotCommittedError(problem)
    if megatron := foreign.megatron_format(store, directory):
        if megatron == foreign.UNNAMED:
            return NotCommittedError(
                f"{place}: is in one of Megatron's own formats, but metadata.json, which names the "
                "format, is damaged: restore it from a copy; 'flashckpt convert' does without it"
            )
        return NotCommittedError(
            f"{place}: is in Megatron's own format '{megatron}', which this command does not read; "
            "Megatron itself loads it, and 'flashckpt convert' converts it"
        )
    if failures:
        return NotCommittedError(
            f"{place}: iteration {iteration} was not committed: {failures[0].failed}; {ANOTHER}"
        )
    return NotCommittedError(
        f"{place}: holds no end of a save: iteration {iteration} was not committed, or was removed "
        f"since; {ANOTHER}"
    )
