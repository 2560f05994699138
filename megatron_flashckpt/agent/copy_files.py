"""Files of the copies on a node's own disk, each of one slot.

    <local_tier.directory>/<16 hex digits of the save directory's path>/iter_0000010/
        <save>.rank_00000.safetensors    the shard, as in storage
        <save>.rank_00000.slot           the rest of the slot, and all digests

The second file is created when the shard is durable, so a copy without it does not exist.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import xxhash

from megatron_flashckpt.agent import slot_bytes
from megatron_flashckpt.agent.shard_writer import slot_shard
from megatron_flashckpt.agent.slot_bytes import SlotDescriptor
from megatron_flashckpt.agent.write_limits import Flow
from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.errors import (
    UNDECODABLE,
    AgentError,
    CorruptCheckpointError,
    FlashCkptError,
)
from megatron_flashckpt.file_format.file_names import (
    iteration_dir,
    parse_iteration_dir,
    parse_save,
    shard_name,
)
from megatron_flashckpt.file_format.shard_file import header_nbytes
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotHeader, SlotMeta
from megatron_flashckpt.storage.posix_files import storage_errors
from megatron_flashckpt.storage.store import Store

#: End of the names of files that make a shard a copy.
SLOT = ".slot"
_DIGEST_NBYTES = len(xxhash.xxh3_64_hexdigest(b""))


class _RestOfSlot(msgspec.Struct, frozen=True):
    """Contents of a `.slot` file, after the digest of these contents."""

    descriptor: SlotDescriptor
    description: bytes
    """The slot's encoded description."""


_DECODER = msgspec.msgpack.Decoder(_RestOfSlot)


def copied(
    store: Store,
    rank: int,
    slab: Slab,
    index: int,
    header: SlotHeader,
    meta: SlotMeta | None,
    flow: Flow,
    known: Callable[[], tuple[str, ...] | None],
) -> tuple[str, ...]:
    """Copy a slot to the node's disk; return the digests of its data.

    Raises:
        CorruptCheckpointError: the slot was overwritten, or its bytes have changed.
        StorageError: the disk is full, for example.
    """
    slot = slab.slots[index]
    meta = slot.meta if meta is None else meta
    # The description is that of this save only if the slot has it still: another save's bytes,
    # which may be half-copied, would make a copy that only looks whole.
    if slot_bytes.holds(slab, index, header.save_id):
        own = shard_name(rank, header.save_id)  # of which a killed agent may have left a part
        store.discard_unfinished(iteration_dir(header.iteration), lambda name: name == own)
        shard = slot_shard(store, slot, header, meta, flow=flow, known=known)
        if shard.is_found:  # of a copy that was never whole: its slot may have changed meanwhile
            store.delete([_shard_file(header.iteration, header.save_id, rank)])
            shard = slot_shard(store, slot, header, meta, flow=flow, known=known)
        try:
            rest = _rest_of(slab, index, rank, shard.digests)
            if rest is not None and rest.descriptor.save_id == header.save_id:
                store.create(slot_file(header.iteration, header.save_id, rank), _encoded(rest))
                return shard.digests
        except BaseException:
            with contextlib.suppress(FlashCkptError, OSError):
                store.delete([_shard_file(header.iteration, header.save_id, rank)])
            raise
        store.delete([_shard_file(header.iteration, header.save_id, rank)])
    raise CorruptCheckpointError(f"slot {index} of rank {rank} has another save")


def _rest_of(slab: Slab, index: int, rank: int, digests: tuple[str, ...]) -> _RestOfSlot | None:
    """Return what a slot has beside its data; None if it was overwritten meanwhile."""
    descriptor = slot_bytes.descriptor_of(rank, slab, index, digests)
    if descriptor is None:
        return None
    description = slot_bytes.read(slab, index, descriptor, 0, descriptor.meta_nbytes)
    return None if description is None else _RestOfSlot(descriptor, description)


def fill(store: Store, rest: _RestOfSlot, slab: Slab, index: int) -> None:
    """Write a copy into a slot; the caller verifies it."""
    descriptor = rest.descriptor
    slot_bytes.write(slab, index, descriptor, 0, rest.description)
    name = _shard_file(descriptor.iteration, descriptor.save_id, descriptor.rank)
    place = f"{store.place}/{name}"
    start = header_nbytes(store.get(name, 0, 8), place)
    data_at = slab.geometry.data_offset(index)
    with slab.memory[data_at : data_at + descriptor.data_nbytes] as data:
        read = store.get_into(name, start, [data])
    if read < descriptor.data_nbytes:
        raise CorruptCheckpointError(
            f"{place}: has {read} bytes of data instead of {descriptor.data_nbytes}"
        )


def _encoded(rest: _RestOfSlot) -> bytes:
    body = msgspec.msgpack.encode(rest)
    return xxhash.xxh3_64_hexdigest(body).encode() + body


def decoded(store: Store, save: Save, rank: int) -> _RestOfSlot:
    """Return the rest of a slot; raise CorruptCheckpointError if it is damaged."""
    name = slot_file(save.iteration, save.save_id, rank)
    encoded = store.get(name)
    digest, body = encoded[:_DIGEST_NBYTES], encoded[_DIGEST_NBYTES:]
    if digest == xxhash.xxh3_64_hexdigest(body).encode():
        try:
            rest = _DECODER.decode(body)
        except UNDECODABLE as error:
            raise CorruptCheckpointError(
                f"{store.place}/{name}: is of another release ({error})"
            ) from error
        descriptor = rest.descriptor
        if (descriptor.rank, descriptor.iteration, descriptor.save_id) == (rank, *save):
            return rest
    raise CorruptCheckpointError(f"{store.place}/{name}: is damaged")


def delete_saves(store: Store, is_dead: Callable[[Save], bool]) -> None:
    """Delete all files of the saves for which `is_dead` returns True, unfinished ones too."""
    for directory, iteration in _iterations(store):

        def is_of_dead(name: str, iteration: int = iteration) -> bool:
            save = _save_of(iteration, name)
            return save is not None and is_dead(save)

        store.discard_unfinished(directory, is_of_dead)
        names = [entry.name for entry in store.list(directory, sizes=False)]
        dead = [name for name in names if is_of_dead(name)]
        # First what makes a shard a copy.
        dead.sort(key=lambda name: not name.endswith(SLOT))
        # An empty directory goes with a file.
        store.delete(f"{directory}/{name}" for name in [*dead, "none"])


def files(store: Store) -> Iterator[tuple[Save, str]]:
    """Yield every file of a copy: its save and its name in the iteration's directory."""
    for directory, iteration in _iterations(store):
        for entry in store.list(directory, sizes=False):
            save = _save_of(iteration, entry.name)
            if save is not None:
                yield save, entry.name


def _iterations(store: Store) -> Iterator[tuple[str, int]]:
    for entry in store.list("", sizes=False):
        iteration = parse_iteration_dir(entry.name)
        if iteration is not None and entry.kind == "directory":
            yield entry.name, iteration


def _save_of(iteration: int, name: str) -> Save | None:
    save_id = name.partition(".rank_")[0]
    return None if parse_save(save_id) is None else Save(iteration, save_id)


def require_own(store: Store) -> None:
    """Make the directory of the copies, in one that exists.

    Raises:
        AgentError: others can write to it, or the disk is not mounted: the copies would fill the
            one of the system.
    """
    path = Path(store.place)
    if not path.parent.is_dir():
        raise AgentError(
            f"{path.parent}: is not there; mount the disk, or make the directory that "
            "'local_tier.directory' names, on each node"
        )
    with storage_errors(path, "make"):
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_own or status.st_mode & 0o022:
        raise AgentError(
            f"{path}: another user can write to it; remove it, or set 'local_tier.directory' to "
            "another directory"
        )


def slot_name(save_id: str, rank: int) -> str:
    """Return the name of the file that makes a rank's shard a copy, in its directory."""
    return f"{save_id}.rank_{rank:05d}{SLOT}"


def slot_file(iteration: int, save_id: str, rank: int) -> str:
    """Return the name of that file in the store."""
    return f"{iteration_dir(iteration)}/{slot_name(save_id, rank)}"


def _shard_file(iteration: int, save_id: str, rank: int) -> str:
    return f"{iteration_dir(iteration)}/{shard_name(rank, save_id)}"
