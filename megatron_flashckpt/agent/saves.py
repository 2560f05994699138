"""Handling of staged slots: a thread pool persists them; memory-only slots stay as they are."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import threading
import time

import msgspec

from megatron_flashckpt.agent import commit_core as core
from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.agent.committer import Committer
from megatron_flashckpt.agent.digester import Digester
from megatron_flashckpt.agent.node import Node
from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.agent.proposals import look
from megatron_flashckpt.agent.rank_slots import RankSlots, SlotInfo, only_in_memory
from megatron_flashckpt.agent.settings import AgentSettings
from megatron_flashckpt.agent.shard_writer import (
    DurableShard,
    slot_shard,
    stored_digests,
)
from megatron_flashckpt.agent.worker import Worker
from megatron_flashckpt.agent.write_limits import lower_priority
from megatron_flashckpt.error_classes import will_last
from megatron_flashckpt.errors import (
    AgentError,
    CorruptCheckpointError,
    FlashCkptError,
    shown_error,
)
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.end import End, Failure
from megatron_flashckpt.memory.slot import Slot, SlotHeader, SlotMeta, SlotState
from megatron_flashckpt.tracing import phase

logger = logging.getLogger(__name__)

#: Pauses before a shard is written again from its first byte, after transient errors.
_WRITE_RETRIES_S = (0.5, 2.0, 8.0)
#: Longest wait of a leaving agent for removals of failed saves.
_END_S = 10.0


class Saves:
    """Persists slots that trainers have staged, and reports them to the committer."""

    def __init__(self, node: Node, committer: Committer) -> None:
        self._node = node
        self._committer = committer
        self.digester = Digester(node)
        self._pool = self._new_pool()
        #: Reads digests from storage. Loads wait for these, so they must not wait for shards.
        self._stored_digests = Worker("stored-digests", "the digests of a shard were not read")
        #: The last attempt, after the last trainer had left, by the id in the slots.
        self._attempts: dict[str, PendingSave] = {}

    def _new_pool(self) -> concurrent.futures.ThreadPoolExecutor:
        options = self._node.options
        self._pool_of = (options.persist_threads, options.writer_nice)
        return concurrent.futures.ThreadPoolExecutor(
            options.persist_threads, "persist", lower_priority, (options.writer_nice,)
        )

    def configure(self, number: int, settings: AgentSettings) -> tuple[str, ...]:
        """Apply the settings of a rank's run; return the changed ones. The caller holds the lock.

        If the thread settings change, the former threads end after their queued work.
        """
        changed = self._node.configure(settings)
        if changed:
            logger.info("rank %d: settings changed: %s", number, ", ".join(changed))
            self._node.changed.notify_all()
        if self._pool_of != (self._node.options.persist_threads, self._node.options.writer_nice):
            former, self._pool = self._pool, self._new_pool()
            former.shutdown(wait=False)
            self.digester.configure()
        return changed

    def close(self) -> None:
        """End the threads, except those that storage blocks."""
        self.digester.close()
        if not self._committer.pending and not self._node.is_stuck():
            # Only removals and digests are left, and storage may block them for ever.
            ending = threading.Thread(target=self._pool.shutdown, daemon=True)
            ending.start()
            ending.join(_END_S)
            self._stored_digests.close(_END_S)

    def described(self, number: int, index: int) -> tuple[Slot, SlotHeader, bytes] | None:
        """Return a staged slot, its header and its encoded description; None if it is not staged.

        The caller holds the lock, releases it to decode the description, and then calls
        `accept_slot`.
        """
        slots = self._node.ranks[number].slots
        if slots is None or not 0 <= index < len(slots.infos):
            return None
        slot = slots.slab.slots[index]
        header = slot.header
        if header.state != SlotState.STAGED:
            return None
        return slot, header, slot.encoded_meta()

    def accept_slot(
        self,
        number: int,
        index: int,
        message: p.Staged | None = None,
        described: tuple[Slot, SlotHeader, SlotMeta] | None = None,
    ) -> str:
        """Persist a complete slot, or keep it if it is for memory only; return its save.

        The caller holds the lock.

        Args:
            message: the "staged" message of the slot's trainer; None if the trainer is gone.
            described: the result of `described`, decoded; ignored if the slot has changed since.
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
            save = self._committer.join(
                number, header, meta, header.save_id, is_adopted=info.inherited
            )
        if message is not None:
            self._node.traces.add(header.iteration, header.save_id, number, message.spans)
            if save is not None and message.cost is not None:
                save.costs[number] = message.cost
        if not info.recovered:  # no process of this rank has staged a save that came from others
            self._node.ranks[number].awaited.add(header.save_id)
        if info.accepted_at is None:
            info.accepted_at, info.persisting = time.monotonic(), save is not None
            hit("agent.enqueued")
            if save is not None:
                self._pool.submit(self._persist, number, slots, slot, save)
            elif self._node.local_copies.are_made:
                self._pool.submit(self._keep_local, number, slots, slot, header)
            if self._node.peers is not None:
                self._node.peers.staged(number, slots, index)
        if save is None:
            # Kept as soon as it is complete: no later save can take this result back, and digests
            # only reveal changes from then on.
            staged_s = 0.0 if message is None or message.cost is None else message.cost.staged_s
            kept = p.Outcome(header.iteration, header.save_id, None, staged_s, kept=True)
            self._committer.queue_result(self._node.ranks[number], kept)
            self._node.traces.write(header.save_id)
        self._node.changed.notify_all()
        return header.save_id

    def look_up_digests(self, number: int) -> None:
        """Begin to read from storage the digests of slots that another agent made durable.

        Memory may have changed since that agent died, so its present bytes must not be digested.
        The caller holds the lock.
        """
        slots = self._node.ranks[number].slots
        if slots is None:
            return
        for slot, info in slots.undigested():
            if slot.header.state == SlotState.DURABLE:
                info.awaits_digests = True
                self._stored_digests.add(
                    functools.partial(self._look_up_digests, number, slots, slot.header, info)
                )

    def _look_up_digests(
        self, number: int, slots: RankSlots, header: SlotHeader, info: SlotInfo
    ) -> None:
        digests = None
        try:
            digests = stored_digests(self._node.store, header.iteration, header.save_id, number)
        except (FlashCkptError, OSError) as error:  # retention may have removed the checkpoint
            logger.info("rank %d: no digests of iteration %d: %s", number, header.iteration, error)
        finally:
            with self._node.changed:
                info.awaits_digests = False
                if digests is not None and info in slots.infos:  # the slot has no later save
                    info.digests = digests
                self._node.changed.notify_all()

    def _keep_local(
        self,
        number: int,
        slots: RankSlots,
        slot: Slot,
        header: SlotHeader,
        meta: SlotMeta | None = None,
    ) -> None:
        """Copy a slot to this node's own disk, if the settings say so. Never raises.

        Args:
            header: of the slot when it was accepted; a memory-only slot may be overwritten since.
            meta: description of the save; None: read it from the slot.
        """
        copies = self._node.local_copies
        if not copies.are_made:
            return
        with self._node.changed:
            info, ranks = slots.infos[slot.index], tuple(self._node.ranks)
            threads, history = self._node.options.write_threads, self._node.history
        digests = copies.keep(
            *(number, slots.slab, slot.index, header, meta),
            threads=threads,
            history=history,
            ranks=ranks,
            known=lambda: info.digests,
        )
        if digests is not None:
            with self._node.changed:
                info.digests = info.digests or digests

    def _persist(self, number: int, slots: RankSlots, slot: Slot, save: PendingSave) -> None:
        seen: core.Observation | None = None
        # The slot keeps the id that it was staged with; the shard is written under the save's id.
        header = msgspec.structs.replace(slot.header, save_id=save.save_id)
        info = slots.infos[slot.index]
        to_copy = (number, slots, slot, slot.header, save.metas[number])
        # A former agent may have written an inherited slot, and memory may have changed since:
        # then the digests in storage come first.
        is_inherited = info.inherited
        if not is_inherited:
            self._keep_local(*to_copy)
        started = time.monotonic()
        try:
            made = self._made_durable_with_retries(number, slot, header, info, save)
            if isinstance(made, DurableShard):
                with self._node.changed:
                    info.digests = made.digests
                seen = core.Durable(made.record)
                if made.is_found:
                    with self._node.changed:
                        self._committer.note(save, core.Joined(number, is_adopted=True))
            elif made is not None:
                if made.end is End.COMMITTED:
                    self._look_up_digests(number, slots, header, info)
                seen = made
        except Exception as failure:  # any failure must be reported to the trainers
            seen = core.GivenUp(Failure(failed=shown_error(failure), lasts=will_last(failure)))
            # If the save is over, the janitor may have removed the file under the writer.
            logger.log(
                logging.INFO if self._committer.is_over(save) else logging.ERROR,
                "rank %d: iteration %d was not persisted: %s",
                *(number, save.iteration, shown_error(failure)),
                exc_info=not isinstance(failure, (FlashCkptError, OSError)),
            )
        seconds = time.monotonic() - started
        if is_inherited:
            self._keep_local(*to_copy)
        with self._node.changed:
            info.persisting = False
            if isinstance(seen, core.Durable):
                logger.info(
                    "rank %d: persisted iteration %d, %d bytes in %.3f s (%.2f GB/s)",
                    *(number, save.iteration, header.data_nbytes, seconds),
                    header.data_nbytes / 1e9 / max(seconds, 1e-9),
                )
            if isinstance(seen, core.GivenUp):
                self._committer.part_failed(save, number, seen.failure)
            elif seen is not None:
                self._committer.note(save, seen)
            self._node.drop_retired(self._node.ranks[number])
            self._node.changed.notify_all()
        if seen is not None:  # also an attempt that failed may have named the shard
            self._committer.remove_late(save, number)

    def _made_durable_with_retries(
        self, number: int, slot: Slot, header: SlotHeader, info: SlotInfo, save: PendingSave
    ) -> DurableShard | core.Ended | None:
        """Return what `_made_durable` returns, repeated after errors that may pass."""
        for pause_s in _WRITE_RETRIES_S:
            try:
                return self._made_durable(number, slot, header, info, save)
            except OSError as error:
                if not self._node.may_pass(error) or self._committer.is_over(save):
                    raise
                logger.warning("rank %d: writing again in %.1f s: %s", number, pause_s, error)
            time.sleep(pause_s)
        return self._made_durable(number, slot, header, info, save)

    def _made_durable(
        self, number: int, slot: Slot, header: SlotHeader, info: SlotInfo, save: PendingSave
    ) -> DurableShard | core.Ended | None:
        """Return a shard once it is durable, whoever has written it.

        Returns the end of a save that has ended under a former agent, and None if the save ended
        before this thread was free to write the shard. May be repeated after an error.
        """
        store, meta, save_id = save.store, save.metas[number], save.save_id
        if info.inherited:
            # First what the former agent has left: whatever comes of the save, its space is needed.
            own = file_names.shard_name(number, save_id)
            store.discard_unfinished(save.directory, lambda name: name == own)
        if self._committer.is_over(save):
            logger.info("rank %d: iteration %d is not written any more", number, save.iteration)
            return None
        if info.inherited and (ended := look(store, save.iteration, save_id)) is not None:
            return ended
        cost, flow = save.costs.get(number), self._node.flow
        traced = self._node.traces.recording(save.iteration, save_id, number)
        with traced, phase("persist"):
            return slot_shard(store, slot, header, meta, cost, flow, lambda: info.digests)

    def write_rest(self, since: float) -> int | None:
        """Begin to write what only memory holds; return its newest iteration, None if nothing.

        These are memory-only saves, and saves whose write failed. The caller holds the lock.

        Args:
            since: do not write what was written since then, and failed here; `time.monotonic`.
        """
        slots = {number: rank.slots for number, rank in self._node.ranks.items() if rank.slots}
        if not self._node.options.persist_on_leave or len(slots) < len(self._node.ranks):
            return None
        for number, held in slots.items():
            for slot in held.unwritten().values():
                try:
                    slot.encoded_meta()
                except CorruptCheckpointError as error:
                    held.infos[slot.index].is_final = True
                    lost = slot.header.iteration
                    logger.error("rank %d: iteration %d in memory is lost: %s", number, lost, error)
        headers = only_in_memory(list(slots.values()))
        for header in headers if not self._node.is_stuck() else ():
            last = self._attempts.get(header.save_id)
            # Nodes try under the same names, one after the other. A name that another node has
            # ended is left at once, so that all nodes meet.
            if last is None or last.core.staged_at < since or last.core.ended_elsewhere:
                self._attempts[header.save_id] = self._attempt(header.save_id, slots)
        return headers[0].iteration if headers else None

    def _attempt(self, save_id: str, ranks: dict[int, RankSlots]) -> PendingSave:
        """Write a save that only memory holds, as another attempt if the former one has failed.

        A name is left only once its end is known, which all nodes read. So after an outage in which
        no end could be written, all nodes try under one name.
        """
        logger.info("save %s is in memory only: writing it before leaving", save_id)
        name = self._committer.next_attempt(save_id)
        for number, slots in ranks.items():
            slot = slots.unwritten()[save_id]
            info = slots.infos[slot.index]
            if slot.header.state == SlotState.FAILED:
                info.inherited = True  # a former attempt under this name may have left its record
                save = self._committer.join(number, slot.header, slot.meta, name, is_adopted=True)
                info.persisting, info.accepted_at = True, time.monotonic()
                self._pool.submit(self._persist, number, slots, slot, save)
            else:
                slot.set_state(SlotState.STAGED)
                info.accepted_at = None
                save = self._committer.pending[self.accept_slot(number, slot.index)]
        return save
