"""What becomes of staged slots: persisted by a pool, committed by one thread, told to trainers."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time

import msgspec

from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.agent.commit import (
    PendingSave,
    awaited_by,
    forget,
    gave_up,
    is_persisted,
    leave_note,
    outcome_of,
)
from megatron_flashckpt.agent.flow import give_way
from megatron_flashckpt.agent.history import PastSave, append, told_of
from megatron_flashckpt.agent.leftovers import Sweeper
from megatron_flashckpt.agent.node import Node, Trainer
from megatron_flashckpt.agent.persist import digest_slot, persist_slot, stored_digests
from megatron_flashckpt.agent.slots import RankSlots, SlotInfo, only_in_memory
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.faults import reach
from megatron_flashckpt.layout.names import next_attempt
from megatron_flashckpt.memory.slot import Slot, SlotHeader, SlotState
from megatron_flashckpt.storage.posix import PosixStorage
from megatron_flashckpt.tracing import phase

logger = logging.getLogger(__name__)

_TICK_S = 0.2
#: Longest wait of an agent that leaves for the removal of what earlier crashes left.
_TIDY_S = 10.0
#: Seconds beyond the commit timeout after which a save is given up without a word from storage.
_HUNG_S = 3.0
_COMMIT_POLL_S = (0.02, 1.0)


class Saves:
    """The saves that this node has a part in."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.pending: dict[str, PendingSave] = {}
        self.sweeper = Sweeper(node.storage)

        def pool(threads: int, name: str) -> concurrent.futures.ThreadPoolExecutor:
            nice = node.options.writer_nice
            return concurrent.futures.ThreadPoolExecutor(threads, name, give_way, (nice,))

        self._pool = pool(node.options.persist_threads, "persist")
        # Of its own: what takes a second must not wait for what takes minutes.
        self._digest_pool = pool(1, "digest")
        self._closing = False
        #: What was written, or was to be, when nobody was there any more.
        self._written_last: set[str] = set()
        #: Saves that were concluded while storage did not answer; their files are still there.
        self._given_up: list[PendingSave] = []
        self._committer = threading.Thread(target=self._commit_loop, name="commit", daemon=True)

    def start(self) -> None:
        """Begin to commit."""
        self._committer.start()

    def close(self) -> None:
        """End the threads, unless storage keeps them."""
        with self._node.changed:
            self._closing = True
            self._node.changed.notify_all()
        self._digest_pool.shutdown()
        if not self.pending and not self._node.is_stuck():
            self._committer.join(_TIDY_S)
            self._pool.shutdown()

    def take_over(self, number: int, index: int, doorbell: p.Staged | None = None) -> str:
        """Do with a complete slot what it is meant for; return the save that is in it.

        Args:
            doorbell: by which its trainer has handed it over, if it is alive.
        """
        slots = self._node.ranks[number].slots
        if slots is None or not 0 <= index < len(slots.infos):
            raise AgentError(f"rank {number} has no slot {index}")
        slot, info = slots.slab.slots[index], slots.infos[index]
        header = slot.header
        if header.state not in (SlotState.STAGED, SlotState.KEPT):
            raise AgentError(f"slot {index} of rank {number} is {header.state.name}, not STAGED")
        save = (
            None
            if header.state == SlotState.KEPT
            else self._join(number, slot, info, header.save_id)
        )
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

    def _join(self, number: int, slot: Slot, info: SlotInfo, save_id: str) -> PendingSave:
        """Return the pending save that a rank has its part in a slot of."""
        header, meta = slot.header, slot.meta
        save = self.pending.setdefault(
            save_id,
            PendingSave(
                PosixStorage(meta.root, self._node.direct_io),
                header.iteration,
                save_id,
                time.monotonic(),
                inherited=info.inherited,
                staged_as=header.save_id,
            ),
        )
        save.metas[number] = meta
        return save

    def _vouch(
        self, number: int, slots: RankSlots, slot: Slot, header: SlotHeader, started: float
    ) -> None:
        """Take the digests of a slot that is meant for memory only; then it counts as kept."""
        info = slots.infos[slot.index]
        with self._node.changed:
            still_there = self._node.ranks[number].slots is slots and slot.header == header
            info.persisting = info.persisting or still_there
        with self._node.traces.recording(header.iteration, header.save_id, number):
            digests = digest_slot(slot, header) if still_there else None
        with self._node.changed:
            if still_there:
                info.persisting, info.digests = False, digests
            seconds = time.monotonic() - started
            outcome = p.Outcome(header.iteration, header.save_id, None, seconds, kept=True)
            self._tell(self._node.ranks[number], outcome)
            self._node.drop_retired(self._node.ranks[number])
            self._node.changed.notify_all()

    def abandon(self, number: int, request: p.Abandon) -> None:
        reason = f"rank {number}: {request.reason}"
        save = self.pending.get(request.save_id)
        if save is not None:
            save.error = save.error or reason
            self._node.changed.notify_all()
        else:
            # Nobody here has staged it yet: ranks that will, here or elsewhere, find the note.
            self._leave_note(request.iteration, request.save_id, number, reason)
        # Nor can it be written later.
        self._leave_note(request.iteration, next_attempt(request.save_id), number, reason)

    def _leave_note(self, iteration: int, save_id: str, number: int, reason: str) -> None:
        self._pool.submit(leave_note, self._node.storage, iteration, save_id, number, reason)

    def _persist(self, number: int, slots: RankSlots, slot: Slot, save: PendingSave) -> None:
        error: str | None = None
        digests: tuple[str, ...] | None = None
        started = time.monotonic()
        header = msgspec.structs.replace(slot.header, save_id=save.save_id)
        info = slots.infos[slot.index]
        try:
            if info.inherited and is_persisted(save, number):
                digests = info.digests or stored_digests(save.storage, header, number)
            elif info.inherited and (past := told_of(save.storage, save.save_id)) is not None:
                save.past = past
                digests = info.digests or digest_slot(slot, header)
            else:
                with (
                    self._node.traces.recording(save.iteration, save.save_id, number),
                    phase("persist"),
                ):
                    meta, cost = save.metas[number], save.costs.get(number)
                    digests = persist_slot(save.storage, slot, header, meta, cost, self._node.flow)
        except Exception as failure:  # whatever it is, the trainers must learn of it
            error = str(failure)
            logger.exception("rank %d: iteration %d was not persisted", number, save.iteration)
        seconds = time.monotonic() - started
        with self._node.changed:
            info.persisting, info.digests = False, digests
            save.persisted.add(number)
            if error is not None:
                save.error = save.error or error
            else:
                logger.info(
                    "rank %d: persisted iteration %d, %d bytes in %.3f s (%.2f GB/s)",
                    number,
                    save.iteration,
                    header.data_nbytes,
                    seconds,
                    header.data_nbytes / 1e9 / max(seconds, 1e-9),
                )
            self._node.drop_retired(self._node.ranks[number])
            given_up = self.pending.get(save.save_id) is not save
            self._node.changed.notify_all()
        if given_up:
            # The save failed elsewhere while this shard was being written.
            forget(save)

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
        save = self._join(number, slot, info, next_attempt(slot.header.save_id))
        info.persisting, info.persisting_since = True, time.monotonic()
        self._pool.submit(self._persist, number, slots, slot, save)

    def watch(self) -> None:
        """Say which saves take long; end those whose storage does not even answer `outcome_of`."""
        with self._node.changed:
            for save in list(self.pending.values()):
                waited = time.monotonic() - save.staged_at
                if waited > self._node.options.slow_save_s and not save.called_slow:
                    save.called_slow = True
                    notice = f"not durable {waited:.0f} s after it was staged: {awaited_by(save)}"
                    logger.warning("iteration %d: %s", save.iteration, notice)
                    for number in save.metas:
                        told = p.Notice(save.iteration, notice)
                        self._node.ranks[number].notices.append(told)
                if waited > self._node.options.commit_timeout_s + _HUNG_S:
                    error = gave_up(save, self._node.options.commit_timeout_s)
                    logger.error("iteration %d was not saved: %s", save.iteration, error)
                    self._conclude(save, error)
                    self._given_up.append(save)

    def _commit_loop(self) -> None:
        shortest, longest = _COMMIT_POLL_S
        pause = shortest
        while True:
            with self._node.changed:
                if self._closing:
                    return
                saves = list(self.pending.values())
                given_up, self._given_up = self._given_up, []
                if not saves and not given_up and self.sweeper.idle:
                    self._node.changed.wait(_TICK_S)
                    pause = shortest
                    continue
            for save in given_up:
                forget(save)
            concluded = [self._try_conclude(save) for save in saves]
            self.sweeper.sweep()
            with self._node.changed:
                if any(concluded):
                    pause = shortest
                elif not self._node.changed.wait(pause):
                    pause = min(2 * pause, longest)
                else:
                    pause = shortest

    def _try_conclude(self, save: PendingSave) -> bool:
        with self._node.traces.recording(save.iteration, save.save_id, None):
            finished, error = outcome_of(save, self._node.options.commit_timeout_s)
        if not finished:
            return False
        if error is not None:
            level = logging.INFO if save.outlived else logging.ERROR
            logger.log(level, "iteration %d was not saved: %s", save.iteration, error)
            reach("save.failed")
        persisted = set(save.persisted)
        if error is not None:
            # Before anybody is told: on a full disk the next save needs the space.
            forget(save)
        if not save.outlived and save.past is None:
            self._enter_into_history(save, error)
        with self._node.changed:
            self._conclude(save, error)
            overlooked = save.persisted - persisted
        if error is not None and overlooked:
            # Written while the others' files were being removed.
            forget(save)
        if error is None and 0 in save.metas:
            self.sweeper.look(self.is_pending, save.iteration)
        self._node.traces.write(save.save_id)
        return True

    def _enter_into_history(self, save: PendingSave, error: str | None) -> None:
        """Let people know later how the save went."""
        if 0 in save.metas:
            past = PastSave(
                iteration=save.iteration,
                save_id=save.save_id,
                ended_at=time.time(),
                seconds=time.monotonic() - save.staged_at,
                error=error,
                world_size=save.metas[0].world_size,
                cost=save.cost,
            )
            append(save.storage, past, self._node.options.history)

    def _conclude(self, save: PendingSave, error: str | None) -> None:
        """Mark the slots and tell the outcome, once. The lock is held."""
        if error is None and save.past is None:
            self._supersede(save)
            if save.superseded_by is None and 0 in save.metas:  # this agent moved the tracker
                self._node.committed = save.iteration
        if self.pending.get(save.save_id) is not save:
            return  # given up while storage did not answer
        seconds = time.monotonic() - save.staged_at
        if error is None:
            logger.info("committed iteration %d after %.3f s", save.iteration, seconds)
        del self.pending[save.save_id]
        outcome = p.Outcome(save.iteration, save.save_id, error, seconds, cost=save.cost)
        state = SlotState.DURABLE if error is None else SlotState.FAILED
        if save.outlived:
            state = SlotState.EMPTY
        for number in save.metas:
            rank = self._node.ranks[number]
            self._tell(rank, outcome)
            if rank.slots is not None:
                rank.slots.mark(save.staged_as, state)
        reach("save.marked")
        self._node.changed.notify_all()

    def is_pending(self, iteration: int) -> bool:
        with self._node.changed:
            return any(save.iteration == iteration for save in self.pending.values())

    def _tell(self, rank: Trainer, outcome: p.Outcome) -> None:
        """Have the rank's trainer told at its next poll, if it is the one that staged the save."""
        if outcome.save_id in rank.awaited:
            rank.awaited.remove(outcome.save_id)
            rank.untold.append(outcome)

    def _supersede(self, save: PendingSave) -> None:
        """Keep saves staged before `save`, and still pending, from moving the tracker back."""
        for other in self.pending.values():
            if other.order < save.order and other.superseded_by != other.iteration:
                other.superseded_by = save.iteration
