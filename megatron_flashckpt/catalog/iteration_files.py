"""Contents of an iteration directory by save: its files, its end, and whether it is whole.

Retention and removals need this for whole directories; loads read the ends alone (`directory`).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import msgspec

from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.catalog.retention import Stored
from megatron_flashckpt.errors import UNDECODABLE, CorruptCheckpointError, FlashCkptError
from megatron_flashckpt.file_format.end import HEAD_NBYTES, End, kind_of
from megatron_flashckpt.file_format.file_names import (
    common_name,
    due_name,
    end_name,
    is_record_name,
    is_shard_name,
    iteration_dir,
    save_of,
)
from megatron_flashckpt.file_format.manifest import MAX_MANIFEST_NBYTES, CommitFacts, decode_facts
from megatron_flashckpt.storage.store import Store, read_whole


class KnownManifest(NamedTuple):
    """Facts of a manifest: one of 16,384 ranks has 10 MB, its facts have 1 kB."""

    facts: CommitFacts
    contents: int
    """Hash of the names and sizes of all shards."""


KnownManifests = dict[Save, KnownManifest]
"""Manifests that were read: an end is never replaced by another manifest."""


@dataclasses.dataclass(frozen=True)
class SaveFiles:
    """The files of one save in its directory."""

    save_id: str
    sizes: dict[str, int]
    """Sizes of its regular files, by name in the directory."""
    end: End | None
    """None: the save has no end."""
    stored: Stored | None = None
    """The checkpoint; None without a manifest, or if that cannot be read."""
    problem: FlashCkptError | OSError | None = None
    """Error that kept the end from being read."""

    @property
    def bulk(self) -> list[str]:
        """The names of all files but the end."""
        return [name for name in self.sizes if name != end_name(self.save_id)]

    @property
    def records(self) -> list[str]:
        """The names of its commit records, which a manifest makes useless."""
        return [name for name in self.sizes if is_record_name(name)]


@dataclasses.dataclass(frozen=True)
class IterationFiles:
    """The files in one iteration directory."""

    iteration: int
    saves: dict[str, SaveFiles]
    others: list[str]
    """Names that are not a save's files: of other programs, links and directories."""

    @property
    def directory(self) -> str:
        return iteration_dir(self.iteration)

    @property
    def origin(self) -> int | None:
        """The iteration whose checkpoint a person has moved or copied here; None: there is none."""
        stored = (files.stored for files in self.saves.values())
        found = (checkpoint.save.iteration for checkpoint in stored if checkpoint is not None)
        return next((iteration for iteration in found if iteration != self.iteration), None)


def read_iteration(store: Store, iteration: int, known: KnownManifests) -> IterationFiles:
    """Return the files of an iteration directory, which is not a link.

    Args:
        known: manifests that were read before; new ones are added.

    Raises:
        StorageError: the directory cannot be listed. Ends that cannot be read raise nothing.
    """
    by_save: dict[str, dict[str, int]] = {}
    others = []
    for entry in store.list(iteration_dir(iteration)):
        save_id = save_of(entry.name)
        if save_id is None or entry.kind != "file":
            others.append(entry.name)
        else:
            by_save.setdefault(save_id, {})[entry.name] = entry.nbytes
    saves = {
        save_id: _read_save(store, Save(iteration, save_id), sizes, known)
        for save_id, sizes in by_save.items()
    }
    return IterationFiles(iteration, saves, others)


def _read_save(store: Store, save: Save, sizes: dict[str, int], known: KnownManifests) -> SaveFiles:
    save_id = save.save_id
    end = end_name(save_id)
    if end not in sizes:
        return SaveFiles(save_id, sizes, None)
    name = f"{iteration_dir(save.iteration)}/{end}"
    try:
        # Another agent may have removed the checkpoint, so that a known manifest is one no more.
        if kind_of(store.get(name, 0, HEAD_NBYTES)) is End.FAILED:
            return SaveFiles(save_id, sizes, End.FAILED)
        if save not in known:
            encoded = read_whole(store, name, MAX_MANIFEST_NBYTES)
            known[save] = _known_manifest(encoded, f"{store.place}/{name}", save_id)
    except FileNotFoundError:
        return SaveFiles(save_id, sizes, None)
    except (FlashCkptError, OSError) as error:
        return SaveFiles(save_id, sizes, End.COMMITTED, problem=error)
    shards = {(name, nbytes) for name, nbytes in sizes.items() if is_shard_name(name)}
    facts, contents = known[save]
    is_whole = common_name(save_id) in sizes and hash(frozenset(shards)) == contents
    is_due = due_name(save_id) in sizes
    stored = Stored(facts, is_whole, has_shards=bool(shards), is_due=is_due)
    return SaveFiles(save_id, sizes, End.COMMITTED, stored)


class _Shard(msgspec.Struct, gc=False):
    file: str
    nbytes: int


class _Contents(msgspec.Struct):
    """The part of a manifest that a listing can be compared with."""

    shards: tuple[_Shard, ...]


_CONTENTS = msgspec.json.Decoder(_Contents)


def _known_manifest(encoded: bytes, place: str, save_id: str) -> KnownManifest:
    facts = decode_facts(encoded, place)
    if facts.save_id != save_id:
        raise CorruptCheckpointError(f"{place}: is the manifest of save {facts.save_id}")
    try:
        shards = _CONTENTS.decode(encoded).shards
    except UNDECODABLE as error:
        raise CorruptCheckpointError(f"{place}: names no shards ({error})") from error
    return KnownManifest(facts, hash(frozenset((shard.file, shard.nbytes) for shard in shards)))
