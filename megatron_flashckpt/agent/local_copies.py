"""This node's copies of checkpoints on its own disks, which outlive the agent and a reboot.

Whether the save of a copy still counts is for the load to decide, as for slots in memory.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import xxhash

from megatron_flashckpt.agent import copy_files, slot_bytes
from megatron_flashckpt.agent.freeing import in_background
from megatron_flashckpt.agent.held_directory import resolved
from megatron_flashckpt.agent.slot_bytes import Copy
from megatron_flashckpt.agent.write_limits import Flow
from megatron_flashckpt.catalog.lineage import History, Save
from megatron_flashckpt.config import LocalTier
from megatron_flashckpt.errors import (
    FlashCkptError,
    shown_error,
)
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotHeader, SlotMeta
from megatron_flashckpt.storage.direct_io import DirectIo
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.store import Store

logger = logging.getLogger(__name__)

#: Longest wait for the names on a local disk; far below `agent.answer_timeout_s`.
_LOOK_S = 5.0


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
        """True if the settings name a directory."""
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
        known: Callable[[], tuple[str, ...] | None],
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
            copy_files.require_own(store)
            if store.stat(copy_files.slot_file(header.iteration, header.save_id, rank)) is not None:
                return None
            flow, started = Flow(threads), time.monotonic()
            try:
                digests = copy_files.copied(store, rank, slab, index, header, meta, flow, known)
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
                        copy_files.delete_saves(store, lambda save: True)
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
                copy_files.delete_saves(store, self._choice_of_old(store, rank, history, ranks))
        except (FlashCkptError, OSError) as error:
            logger.warning("old local copies remain: %s", shown_error(error))

    def _choice_of_old(
        self, store: Store, rank: int, history: History | None, ranks: Collection[int]
    ) -> Callable[[Save], bool]:
        having: dict[Save, set[str]] = {}
        for save, name in copy_files.files(store):
            having.setdefault(save, set()).add(name)

        def has(save: Save, rank: int) -> bool:
            return copy_files.slot_name(save.save_id, rank) in having[save]

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
        return {(*save,) for save, name in files if name.endswith(copy_files.SLOT)}

    def _listed(self) -> tuple[Store | None, list[tuple[Save, str]]]:
        """Return all files of copies; none if the disk does not answer, which is logged.

        A trainer waits for the answer, and kills an agent that gives none.
        """
        store, listed, has_ended = self._store, list[tuple[Save, str]](), threading.Event()
        if store is None:
            return None, []

        def look() -> None:
            try:
                listed.extend(copy_files.files(store))
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
        of_rank = [save for save, name in files if name == copy_files.slot_name(save.save_id, rank)]
        if store is None or not of_rank:
            return copies
        try:
            copy_files.require_own(store)
        except (FlashCkptError, OSError) as error:
            logger.error("local copies are not used: %s", shown_error(error))
            return copies
        for save in of_rank:
            try:
                rest = copy_files.decoded(store, save, rank)
            except (FlashCkptError, OSError) as error:
                logger.error("rank %d: a local copy is not used: %s", rank, shown_error(error))
                continue
            fill = functools.partial(copy_files.fill, store, rest)
            copies[save.save_id] = Copy(rest.descriptor, store.place, fill)
        return copies
