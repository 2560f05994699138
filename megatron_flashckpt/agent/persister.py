"""What is done with staged slots: persisted by a pool, or vouched for if they are to stay."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.agent.commit_records import is_persisted
from megatron_flashckpt.agent.commit_thread import Committer
from megatron_flashckpt.agent.failed_save import forget, leave_note, shown_error
from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.agent.settings import AgentSettings
from megatron_flashckpt.agent.shard_writer import (
    DurableShard,
    digest_slot,
    slot_shard,
    stored_digests,
)
from megatron_flashckpt.agent.slot_table import RankSlots, SlotInfo, only_in_memory
from megatron_flashckpt.agent.state import Node, Trainer
from megatron_flashckpt.agent.write_limits import give_way
from megatron_flashckpt.catalog.history import told_of
from megatron_flashckpt.error_classes import may_pass, will_last
from megatron_flashckpt.errors import AgentError, CorruptCheckpointError, FlashCkptError
from megatron_flashckpt.failpoints import reach
from megatron_flashckpt.file_format.file_names import next_attempt
from megatron_flashckpt.memory.slot import Slot, SlotHeader, SlotMeta, SlotState
from megatron_flashckpt.tracing import phase

logger = logging.getLogger(__name__)

#: Pauses before a shard is written again from its first byte, after errors which may pass.
_WRITE_RETRIES_S = (0.5, 2.0, 8.0)
#: Slots of a node that are digested at a time after a crash.
_UNREAD_THREADS = 4
#: Longest wait of an agent that leaves for the notes and removals of failed saves.
_END_S = 10.0

_T = TypeVar("_T")


class Saves:
    """Sees to it that what trainers stage is read, and that the committer knows of it."""

    def __init__(self, node: Node, committer: Committer) -> None:
        self._node = node
        self._committer = committer
        self._make_pools()
        #: Ids of the saves whose writing began after the last trainer had left.
        self._written_last: set[str] = set()

    def _make_pools(self) -> None:
        options = self._node.options
        self._pools_of = (options.persist_threads, options.writer_nice)

        def pool(threads: int, name: str) -> concurrent.futures.ThreadPoolExecutor:
            nice = options.writer_nice
            return concurrent.futures.ThreadPoolExecutor(threads, name, give_way, (nice,))

        self._pool = pool(options.persist_threads, "persist")
        # Digests and notes take a second and must not wait for shards, which take minutes.
        self._digest_pool = pool(1, "digest")
        self._note_pool = pool(1, "note")
        # Trainers that need a core are gone by then, and their successors wait for it.
        self._unread_pool = pool(_UNREAD_THREADS, "digest")

    def configure(self, number: int, settings: AgentSettings) -> tuple[str, ...]:
        """Take the settings of the run of a rank; return what they change. The lock is held.

        If they ask for other threads, the former ones end after what they have been given.
        """
        changed = self._node.configure(settings)
        if changed:
            logger.info("rank %d: settings changed: %s", number, ", ".join(changed))
            self._node.changed.notify_all()
        if self._pools_of != (self._node.options.persist_threads, self._node.options.writer_nice):
            former = (self._pool, self._digest_pool, self._note_pool, self._unread_pool)
            self._make_pools()
            for pool in former:
                pool.shutdown(wait=False)
        return changed

    def close(self) -> None:
        """End the threads, unless storage keeps them."""
        self._digest_pool.shutdown()
        # Nobody comes back for what dead trainers left: that memory is about to be freed.
        self._unread_pool.shutdown(wait=False, cancel_futures=True)
        if not self._committer.pending and not self._node.is_stuck():
            for pool in (self._pool, self._note_pool):
                # What is left are notes and removals, which storage may keep for ever.
                ending = threading.Thread(target=pool.shutdown, daemon=True)
                ending.start()
                ending.join(_END_S)

    def described(self, number: int, index: int) -> tuple[Slot, SlotHeader, bytes] | None:
        """Return a staged slot, its header and its encoded description; None if it is not staged.

        The caller holds the lock, lets go of it to decode the description, and then calls
        `take_over`.
        """
        slots = self._node.ranks[number].slots
        if slots is None or not 0 <= index < len(slots.infos):
            return None
        slot = slots.slab.slots[index]
        header = slot.header
        if header.state != SlotState.STAGED:
            return None
        return slot, header, slot.encoded_meta()

    def take_over(
        self,
        number: int,
        index: int,
        doorbell: p.Staged | None = None,
        described: tuple[Slot, SlotHeader, SlotMeta] | None = None,
    ) -> str:
        """Do with a complete slot what it is meant for; return the save that is in it.

        The caller holds the lock.

        Args:
            doorbell: by which its trainer has handed it over, if it is alive.
            described: what `described` has returned, decoded. It counts if the slot is still so.
        """
        slots = self._node.ranks[number].slots
        if slots is None or not 0 <= index < len(slots.infos):
            raise AgentError(f"rank {number} has no slot {index}")
        slot, info = slots.slab.slots[index], slots.infos[index]
        header = slot.header
        if header.state not in (SlotState.STAGED, SlotState.KEPT):
            raise AgentError(f"slot {index} of rank {number} is {header.state.name}, not STAGED")
        save = None
        if header.state == SlotState.STAGED:
            is_known = described is not None and described[:2] == (slot, header)
            meta = described[2] if described is not None and is_known else slot.meta
            save = self._join(number, slot, info, header.save_id, meta)
        if doorbell is not None:
            self._node.traces.add(header.iteration, header.save_id, number, doorbell.spans)
            if save is not None and doorbell.cost is not None:
                save.costs[number] = doorbell.cost
        self._node.ranks[number].awaited.add(header.save_id)
        if not info.claimed:
            info.claimed, info.persisting = True, save is not None
            info.persisting_since = time.monotonic()
            reach("agent.enqueued")
            if save is None:
                self._digest_pool.submit(self._vouch, number, slots, slot, header, time.monotonic())
            else:
                self._pool.submit(self._persist, number, slots, slot, save)
            if self._node.peers is not None:
                self._node.peers.staged(number, slots, index)
        self._node.changed.notify_all()
        return header.save_id

    def _join(
        self, number: int, slot: Slot, info: SlotInfo, save_id: str, meta: SlotMeta
    ) -> PendingSave:
        return self._committer.join(number, slot.header, meta, save_id, inherited=info.inherited)

    def _vouch(
        self, number: int, slots: RankSlots, slot: Slot, header: SlotHeader, started: float
    ) -> None:
        """Take the digests of a slot that is meant for memory only; then it counts as kept."""
        info = slots.infos[slot.index]
        with self._node.changed:
            rank = self._node.ranks.get(number)  # None: its memory is not wanted any more
            still_there = rank is not None and rank.slots is slots and slot.header == header
            info.persisting = info.persisting or still_there
        digests: tuple[str, ...] | None = None
        error: str | None = None
        try:
            with self._node.traces.recording(header.iteration, header.save_id, number):
                digests = digest_slot(slot, header) if still_there else None
        except Exception as failure:  # whatever it is, the trainer must learn of it
            shown = shown_error(failure)
            error = f"rank {number}: not digested in host memory: {shown}; it stays there"
            logger.exception("rank %d: iteration %d was not digested", number, header.iteration)
        with self._node.changed:
            if still_there:
                # What was taken when the trainer hung up counts: later changes must show.
                info.persisting, info.digests = False, info.digests or digests
            seconds = time.monotonic() - started
            outcome = p.Outcome(
                header.iteration,
                header.save_id,
                error,
                seconds,
                kept=error is None,
                failed_ranks=() if error is None else (number,),
            )
            if rank is not None:
                self._committer.tell(rank, outcome)
                self._node.drop_retired(rank)
            self._node.changed.notify_all()

    def digest_unread(self, rank: Trainer) -> None:
        """Begin to digest what a trainer that is gone has left and nothing has read to its end.

        Whatever changes from then on is neither restored nor persisted. The caller holds the lock.
        """
        if rank.slots is None:
            return
        for slot, info in rank.slots.undigested():
            info.digesting = True
            self._unread_pool.submit(self._digest_unread, rank, slot, info)

    def look_up_digests(self, number: int) -> None:
        """Begin to read from storage the digests of what another agent has made durable.

        Memory that changes after the death of that agent must not be digested as it is then. The
        caller holds the lock.
        """
        slots = self._node.ranks[number].slots
        if slots is None:
            return
        for slot, info in slots.undigested():
            if slot.header.state == SlotState.DURABLE:
                self._note_pool.submit(self._look_up_digests, number, slots, slot.header, info)

    def _look_up_digests(
        self, number: int, slots: RankSlots, header: SlotHeader, info: SlotInfo
    ) -> None:
        try:
            digests = stored_digests(self._node.storage, header, number)
        except (FlashCkptError, OSError) as error:  # retention may have removed it
            logger.info("rank %d: no digests of iteration %d: %s", number, header.iteration, error)
            return
        with self._node.changed:
            if info in slots.infos:  # the slot was not given to a later save
                info.digests = digests

    def _digest_unread(self, rank: Trainer, slot: Slot, info: SlotInfo) -> None:
        header = slot.header
        digests: tuple[str, ...] | None = None
        try:
            digests = digest_slot(slot, header)
        except Exception:  # a load restores it unverified, and says so
            logger.exception("iteration %d was not digested", header.iteration)
        finally:
            with self._node.changed:
                info.digesting = False
                now = slot.header
                if (now.save_id, now.iteration) == (header.save_id, header.iteration):
                    # What was taken as it was written counts: that is what is in storage.
                    info.digests = info.digests or digests
                self._node.drop_retired(rank)
                self._node.changed.notify_all()

    def abandon(self, number: int, request: p.Abandon) -> None:
        reason = f"rank {number}: {request.reason}"
        save = self._committer.pending.get(request.save_id)
        if save is not None:
            save.error = save.error or reason
            save.failed.add(number)
            self._node.changed.notify_all()
        else:
            # Nobody here has staged it yet: ranks that will, here or elsewhere, find the note.
            self._leave_note(request.iteration, request.save_id, number, reason)
        # Nor can it be written later.
        self._leave_note(request.iteration, next_attempt(request.save_id), number, reason)

    def _leave_note(self, iteration: int, save_id: str, number: int, reason: str) -> None:
        self._note_pool.submit(leave_note, self._node.storage, iteration, save_id, number, reason)

    def _persist(self, number: int, slots: RankSlots, slot: Slot, save: PendingSave) -> None:
        error: str | None = None
        shard: DurableShard | None = None
        # The slot keeps the id that it was staged with; the shard is written under the save's id.
        header = msgspec.structs.replace(slot.header, save_id=save.save_id)
        info = slots.infos[slot.index]
        started = time.monotonic()
        try:
            shard = self._made_durable(number, slot, header, info, save)
        except Exception as failure:  # whatever it is, the trainers must learn of it
            error = shown_error(failure)
            save.lasts = save.lasts or will_last(failure)
            logger.exception("rank %d: iteration %d was not persisted", number, save.iteration)
        seconds = time.monotonic() - started
        with self._node.changed:
            info.persisting = False
            if shard is not None:
                info.digests = shard.digests or info.digests
                if shard.record is not None:
                    save.hold_record(shard.record)
            self._report(number, save, header, error, seconds)
            self._node.drop_retired(self._node.ranks[number])
            given_up = self._committer.pending.get(save.save_id) is not save
            self._node.changed.notify_all()
        if given_up:
            # The save failed elsewhere while this shard was being written.
            forget(save)

    def _patiently(self, number: int, save: PendingSave, step: Callable[[], _T]) -> _T:
        """Return `step()`, called again after errors that may pass."""
        for pause_s in _WRITE_RETRIES_S:
            try:
                return step()
            except OSError as error:
                if not may_pass(error) or self._is_over(save):
                    raise
                logger.warning("rank %d: writes again in %.1f s: %s", number, pause_s, error)
            time.sleep(pause_s)
        return step()

    def _is_over(self, save: PendingSave) -> bool:
        """Return whether `save` has failed elsewhere or timed out: nobody needs its shards."""
        with self._node.changed:
            given_up = self._committer.pending.get(save.save_id) is not save
            return given_up or save.error is not None

    def _made_durable(
        self, number: int, slot: Slot, header: SlotHeader, info: SlotInfo, save: PendingSave
    ) -> DurableShard:
        """Return a shard when it is durable; without a record if an earlier agent has put that."""

        def patiently(step: Callable[[], _T]) -> _T:
            return self._patiently(number, save, step)

        if info.inherited:
            if patiently(lambda: is_persisted(save, number)):
                # Not those of the slot, which may have changed since it was written.
                try:
                    digests = patiently(lambda: stored_digests(save.storage, header, number))
                except CorruptCheckpointError as error:
                    logger.warning("rank %d: only its memory is intact: %s", number, error)
                    digests = info.digests or digest_slot(slot, header)
                return DurableShard(None, digests)
            save.past = patiently(lambda: told_of(save.storage, save.save_id))
            if save.past is not None:
                return DurableShard(None, info.digests or digest_slot(slot, header))
        meta, cost, flow = save.metas[number], save.costs.get(number), self._node.flow

        def written() -> DurableShard:
            return slot_shard(save.storage, slot, header, meta, cost, flow, lambda: info.digests)

        traced = self._node.traces.recording(save.iteration, save.save_id, number)
        with traced, phase("persist"):
            return patiently(written)

    def _report(
        self, number: int, save: PendingSave, header: SlotHeader, error: str | None, seconds: float
    ) -> None:
        """Tell the committer how the write of a shard ended. The caller holds the lock."""
        save.persisted.add(number)
        if error is not None:
            save.error = save.error or error
            save.failed.add(number)
            return
        logger.info(
            "rank %d: persisted iteration %d, %d bytes in %.3f s (%.2f GB/s)",
            number,
            save.iteration,
            header.data_nbytes,
            seconds,
            header.data_nbytes / 1e9 / max(seconds, 1e-9),
        )

    def persist_rest(self) -> bool:
        """Write what is in memory only and would be lost; return whether there is any.

        Each save once: what was meant for memory only, and what could not be written when it was
        staged, for storage may have come back since.
        """
        slots = {number: rank.slots for number, rank in self._node.ranks.items() if rank.slots}
        if (
            not self._node.options.persist_on_leave
            or len(slots) < len(self._node.ranks)
            or self._node.is_stuck()
        ):
            return False
        saves = only_in_memory(list(slots.values()), self._node.committed)
        saves = [save_id for save_id in saves if save_id not in self._written_last]
        self._written_last.update(saves)
        for save_id in saves:
            logger.info("save %s is in memory only: writing it before leaving", save_id)
            for number, theirs in slots.items():
                slot = theirs.unwritten()[save_id]
                if slot.header.state == SlotState.FAILED:
                    self._try_again(number, theirs, slot)
                    continue
                slot.set_state(SlotState.STAGED)
                theirs.infos[slot.index].claimed = False
                self.take_over(number, slot.index)
        return bool(saves)

    def _try_again(self, number: int, slots: RankSlots, slot: Slot) -> None:
        """Persist what failed before, under an id of its own: notes of that failure are there."""
        info = slots.infos[slot.index]
        save = self._join(number, slot, info, next_attempt(slot.header.save_id), slot.meta)
        info.persisting, info.persisting_since = True, time.monotonic()
        self._pool.submit(self._persist, number, slots, slot, save)
