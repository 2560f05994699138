"""Copies of this node's checkpoints on its own disks, which outlive the agent and a reboot.

    <local_tier.directory>/<16 hex digits of the save directory's path>/iter_0000010/
        <save>.rank_00000.safetensors    the shard, as in storage
        <save>.rank_00000.slot           the rest of the slot, and all digests

The second file is created when the shard is durable, so a copy without it does not exist. Whether
the save of a copy still counts is for the load to decide, as for slots in memory.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import msgspec
import xxhash

from megatron_flashckpt.agent import slot_bytes
from megatron_flashckpt.agent.freeing import in_background
from megatron_flashckpt.agent.held_directory import resolved
from megatron_flashckpt.agent.recovery import Copy
from megatron_flashckpt.agent.shard_writer import slot_shard
from megatron_flashckpt.agent.slot_bytes import SlotDescriptor
from megatron_flashckpt.agent.write_limits import Flow
from megatron_flashckpt.catalog.lineage import History, Save
from megatron_flashckpt.config import LocalTier
from megatron_flashckpt.errors import (
    UNDECODABLE,
    AgentError,
    CorruptCheckpointError,
    FlashCkptError,
    shown_error,
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
from megatron_flashckpt.storage.direct_io import DirectIo
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.posix_files import storage_errors
from megatron_flashckpt.storage.store import Store

logger = logging.getLogger(__name__)

_SLOT = ".slot"
#: Longest wait for the names on a local disk; far below `agent.answer_timeout_s`.
_LOOK_S = 5.0
_DIGEST_NBYTES = len(xxhash.xxh3_64_hexdigest(b""))


class _RestOfSlot(msgspec.Struct, frozen=True):
    """Contents of a `.slot` file, after the digest of these contents."""

    descriptor: SlotDescriptor
    description: bytes
    """The slot's encoded description."""


_DECODER = msgspec.msgpack.Decoder(_RestOfSlot)


class LocalCopies:
    """This node's copies of the checkpoints of one save directory."""

    def __init__(self, root: str, settings: LocalTier) -> None:
        self._key = xxhash.xxh3_64_hexdigest(os.fsencode(resolved(root)))
        #: Held while copies are chosen and deleted: two choices at once could delete each other's.
        self._deleting = threading.Lock()
        #: Copies that are being made, until what is older is deleted: save and rank. Two threads
        #: may have one slot: a memory-only save is written to storage when the job ends.
        self._making: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self.configure(settings)

    def configure(self, settings: LocalTier) -> None:
        """Use other settings from the next copy on. Copies in another directory stay there."""
        self._keep = settings.keep
        directory = settings.directory
        self._store: Store | None = None
        if directory is not None:
            self._store = open_store(Path(directory) / self._key, DirectIo("auto"))

    @property
    def are_made(self) -> bool:
        """Whether the settings name a directory."""
        return self._store is not None

    # ------------------------------------------------------------------ writing

    def keep(
        self,
        rank: int,
        slab: Slab,
        index: int,
        header: SlotHeader,
        meta: SlotMeta | None,
        *,
        threads: int,
        history: History | None,
        ranks: Collection[int],
        known: Callable[[], tuple[str, ...] | None] = lambda: None,
    ) -> tuple[str, ...] | None:
        """Make a copy of a complete slot, and delete older ones; return the digests of its data.

        Called by the threads that write shards. Never raises: without its copy a save goes on.
        Returns None if there is no new copy, as when the slot was overwritten meanwhile.

        Args:
            header: of the slot when its save was complete; the slot may have another one now.
            meta: description of that save; None: read it from the slot.
            history: of the run that trains; copies of other histories are deleted.
            ranks: of this node.
            known: returns the digests of the data if the slot has been read before.
        """
        store, copy = self._store, (header.save_id, rank)
        with self._lock:
            if store is None or copy in self._making:
                return None
            self._making.add(copy)
        try:
            _require_own(store)
            if store.stat(_slot_file(header.iteration, header.save_id, rank)) is not None:
                return None
            flow, started = Flow(threads), time.monotonic()
            try:
                digests = _copied(store, rank, slab, index, header, meta, flow, known)
            finally:  # after an error, too: copies of dead branches may fill the disk
                self._delete_old(store, rank, history, ranks)
            logger.info(
                "rank %d: iteration %d is durable on this node after %.3f s, in %s",
                *(rank, header.iteration, time.monotonic() - started, store.place),
            )
            return digests
        except Exception as error:  # the same thread writes the save to storage next
            if slot_bytes.holds(slab, index, header.save_id):
                logger.error(
                    "rank %d: no local copy of iteration %d: %s",
                    *(rank, header.iteration, shown_error(error)),
                    exc_info=not isinstance(error, (FlashCkptError, OSError)),
                )
            else:
                logger.warning(
                    "rank %d: no local copy of iteration %d: its slot was overwritten first; save "
                    "less often, or raise 'slots'",
                    *(rank, header.iteration),
                )
            return None
        finally:
            with self._lock:
                self._making.discard(copy)

    def end(self) -> Callable[[], None]:
        """Begin no more copies; return the deletion of all copies, which the disk may block.

        Called when the job has ended, and storage has its last checkpoint.
        """
        store, self._store = self._store, None

        def delete_all() -> None:
            if store is not None:
                try:
                    with self._deleting:
                        _delete(store, lambda save: True)
                except (FlashCkptError, OSError) as error:
                    logger.warning("local copies remain: %s", shown_error(error))

        return delete_all

    def _delete_old(
        self, store: Store, rank: int, history: History | None, ranks: Collection[int]
    ) -> None:
        """Delete what is older than this rank's newest copies, or not of the history.

        Other ranks' copies, too: a save that this rank lacks is incomplete. So the copies of ranks
        that run on other nodes now go as well. The newest save that all ranks of the node have
        stays: the copies of ranks that are behind may fail.
        """
        try:
            with self._deleting:
                _delete(store, self._choice_of_old(store, rank, history, ranks))
        except (FlashCkptError, OSError) as error:
            logger.warning("old local copies remain: %s", shown_error(error))

    def _choice_of_old(
        self, store: Store, rank: int, history: History | None, ranks: Collection[int]
    ) -> Callable[[Save], bool]:
        having: dict[Save, set[str]] = {}
        for save, name in _files(store):
            having.setdefault(save, set()).add(name)

        def has(save: Save, rank: int) -> bool:
            return _slot_name(save.save_id, rank) in having[save]

        counted = sorted(
            (save for save in having if history is None or history.holds(save)),
            key=lambda save: save.order,
        )
        own = [save for save in counted if has(save, rank)]
        whole = [save for save in own if all(has(save, other) for other in ranks)]

        def is_dead(save: Save) -> bool:
            with self._lock:
                if any(save.save_id == of and other != rank for of, other in self._making):
                    return False
            is_old = len(own) >= self._keep and save.order < own[-self._keep].order
            is_old = is_old and save not in whole[-1:]
            return is_old or (history is not None and not history.holds(save))

        return is_dead

    # ------------------------------------------------------------------ reading

    def saves(self) -> set[tuple[int, str]]:
        """Return iteration and id of every save of which there is a copy, of any rank."""
        _, files = self._listed()
        return {(*save,) for save, name in files if name.endswith(_SLOT)}

    def _listed(self) -> tuple[Store | None, list[tuple[Save, str]]]:
        """Return all files of copies; none if the disk does not answer, which is logged.

        A trainer waits for the answer, and kills an agent that gives none.
        """
        store, listed, has_ended = self._store, list[tuple[Save, str]](), threading.Event()
        if store is None:
            return None, []

        def look() -> None:
            try:
                listed.extend(_files(store))
            except (FlashCkptError, OSError) as error:
                listed.clear()
                logger.error("local copies are not used: %s", shown_error(error))
            finally:
                has_ended.set()

        in_background(look)
        if has_ended.wait(_LOOK_S):
            return store, listed
        logger.error("local copies are not used: %s does not answer", store.place)
        return store, []

    def of_rank(self, rank: int) -> dict[str, Copy]:
        """Return the copies of a rank's checkpoints, by save; log those that are not used."""
        copies = dict[str, Copy]()
        store, files = self._listed()
        of_rank = [save for save, name in files if name == _slot_name(save.save_id, rank)]
        if store is None or not of_rank:
            return copies
        try:
            _require_own(store)
        except (FlashCkptError, OSError) as error:
            logger.error("local copies are not used: %s", shown_error(error))
            return copies
        for save in of_rank:
            try:
                rest = _decoded(store, save, rank)
            except (FlashCkptError, OSError) as error:
                logger.error("rank %d: a local copy is not used: %s", rank, shown_error(error))
                continue
            fill = functools.partial(_fill, store, rest)
            copies[save.save_id] = Copy(rest.descriptor, store.place, fill)
        return copies


def _copied(
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
        shard = slot_shard(store, slot, header, meta, flow=flow, known=known)
        try:
            rest = _rest_of(slab, index, rank, shard.digests)
            if rest is not None and rest.descriptor.save_id == header.save_id:
                store.create(_slot_file(header.iteration, header.save_id, rank), _encoded(rest))
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


def _fill(store: Store, rest: _RestOfSlot, slab: Slab, index: int) -> None:
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


def _decoded(store: Store, save: Save, rank: int) -> _RestOfSlot:
    """Return the rest of a slot; raise CorruptCheckpointError if it is damaged."""
    name = _slot_file(save.iteration, save.save_id, rank)
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


def _delete(store: Store, is_dead: Callable[[Save], bool]) -> None:
    for directory, iteration in _iterations(store):

        def is_of_dead(name: str, iteration: int = iteration) -> bool:
            save = _save_of(iteration, name)
            return save is not None and is_dead(save)

        store.discard_unfinished(directory, is_of_dead)
        names = [entry.name for entry in store.list(directory, sizes=False)]
        dead = [name for name in names if is_of_dead(name)]
        # First what makes a shard a copy.
        dead.sort(key=lambda name: not name.endswith(_SLOT))
        store.delete(f"{directory}/{name}" for name in dead)


def _files(store: Store) -> Iterator[tuple[Save, str]]:
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


def _require_own(store: Store) -> None:
    """Make the directory of the copies; raise AgentError if others can write to it."""
    path = Path(store.place)
    with storage_errors(path, "make"):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_own or status.st_mode & 0o022:
        raise AgentError(
            f"{path}: another user can write to it; remove it, or set 'local_tier.directory' to "
            "another directory"
        )


def _slot_name(save_id: str, rank: int) -> str:
    return f"{save_id}.rank_{rank:05d}{_SLOT}"


def _slot_file(iteration: int, save_id: str, rank: int) -> str:
    return f"{iteration_dir(iteration)}/{_slot_name(save_id, rank)}"


def _shard_file(iteration: int, save_id: str, rank: int) -> str:
    return f"{iteration_dir(iteration)}/{shard_name(rank, save_id)}"
