"""Table of slots: contents per rank, and the choice of the slot to overwrite.

Not thread-safe: callers hold the agent's lock around every call.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence

from megatron_flashckpt.agent.incarnations import RankProcess
from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.agent.slot_bytes import SlotDescriptor
from megatron_flashckpt.catalog.lineage import History, Save
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import COMPLETE, EMPTY_HEADER, Slot, SlotHeader, SlotState

#: States of complete saves that are not known to be in storage.
_UNWRITTEN = (SlotState.STAGED, SlotState.KEPT, SlotState.FAILED)


@dataclasses.dataclass
class SlotInfo:
    """Facts about a slot that are not in its header."""

    sequence: int = -1
    """Order of acquisition; higher is newer."""
    persisting: bool = False
    """The slot is being written to storage, or about to be, and must not be overwritten."""
    accepted_at: float | None = None
    """Time of the "staged" message, or at which the agent took the slot without it;
    `time.monotonic`. None: neither has happened."""
    inherited: bool = False
    """Another agent, or a former attempt, may have persisted or committed its save."""
    digests: tuple[str, ...] | None = None
    awaits_digests: bool = False
    """The digests are being computed, or read from storage: then the memory may have changed."""
    descriptor: SlotDescriptor | None = None
    """Description by which other nodes rebuild the slot; None until it was sent to them."""
    recovered: bool = False
    """The slot came from other nodes."""
    is_final: bool = False
    """The save failed for good, or its description is damaged: no further attempt can make a
    checkpoint of it."""
    elsewhere: bool = False
    """The slot came from the slot of the rank on its former node, whose agent persists it."""

    def has_settled(self, before: float) -> bool:
        """Return whether the slot was accepted by time `before` and is not being persisted."""
        return self.accepted_at is not None and self.accepted_at <= before and not self.persisting


class RankSlots:
    """One rank's slab and the state of its slots."""

    _sequence = itertools.count()

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self._former: set[RankProcess] = set()
        self.infos = [SlotInfo() for _ in slab.slots]
        self.stored = self._newest_durable()
        """The newest save of this slab that is known to be in storage; its slot may be gone."""
        # A slab of a former agent may hold checkpoints: the newest one is overwritten last.
        for slot in sorted(slab.slots, key=lambda slot: slot.header.iteration):
            info = self.infos[slot.index]
            info.sequence = next(self._sequence)
            info.inherited = slot.header.state in _UNWRITTEN

    def note_former(self, process: RankProcess) -> None:
        """Record an earlier process of the rank, which may still write to its acquired slots."""
        self._former.add(process)

    def formers(self) -> tuple[RankProcess, ...]:
        """Return the earlier processes that may still write to this slab, oldest first.

        When the last of them has ended, their unfinished slots are emptied.
        """
        if not self._former:
            return ()
        self._former = {process for process in self._former if process.is_alive}
        if self._former:
            return tuple(sorted(self._former))
        for slot, info in zip(self.slab.slots, self.infos, strict=True):
            state = slot.header.state
            in_hand = state in (SlotState.STAGED, SlotState.KEPT) and info.accepted_at is None
            if state == SlotState.STAGING or in_hand:
                slot.set_header(EMPTY_HEADER)
        return ()

    @property
    def is_persisting(self) -> bool:
        """Return whether any slot is being persisted."""
        return any(info.persisting for info in self.infos)

    @property
    def awaits_digests(self) -> bool:
        """Return whether any slot will have digests soon that it lacks now."""
        return any(info.awaits_digests for info in self.infos)

    def undigested(self) -> list[tuple[Slot, SlotInfo]]:
        """Return the complete slots that have no digests and await none."""
        return [
            (slot, info)
            for slot, info in zip(self.slab.slots, self.infos, strict=True)
            if info.digests is None and not info.awaits_digests and slot.header.state in COMPLETE
        ]

    def persisting_for(self) -> float:
        """Return the seconds since the oldest slot that is being persisted was accepted."""
        accepted = [info.accepted_at or 0.0 for info in self.infos if info.persisting]
        return time.monotonic() - min(accepted) if accepted else 0.0

    def acquire(self, *, newest_too: bool = False) -> int:
        """Return the slot to overwrite: one without a complete checkpoint, otherwise the oldest.

        Returns -1 if there is none. The newest complete checkpoint is not returned, even if all
        others are being read. Otherwise ranks that write fast and ranks that write slowly would
        overwrite different checkpoints, and after a crash no checkpoint would be complete on all
        ranks. A slot that is only being digested is free.

        A single slot is returned as soon as its save has a result: the checkpoint is in storage,
        or never will be.

        Args:
            newest_too: also return the newest one, because waiting for the others is useless.
        """
        slots = self.slab.slots
        complete = [i for i, slot in enumerate(slots) if slot.header.state in COMPLETE]
        newest = max(complete, key=lambda i: self.infos[i].sequence, default=-1)
        free = [i for i, info in enumerate(self.infos) if not info.persisting]
        free = [i for i in free if newest_too or i != newest or self._is_concluded_alone(i)]
        if not free:
            return -1
        index = min(
            free,
            # "Not complete" instead of "empty": a failed copy leaves its slot STAGING, newer than
            # the complete checkpoint.
            key=lambda i: (slots[i].header.state in COMPLETE, self.infos[i].sequence),
        )
        slots[index].set_header(EMPTY_HEADER)
        self.infos[index] = SlotInfo(sequence=next(self._sequence))
        return index

    def _is_concluded_alone(self, index: int) -> bool:
        """Return whether slot `index` is the only slot, and its save is not pending."""
        is_open = self.slab.slots[index].header.state == SlotState.STAGED
        return len(self.infos) == 1 and not (is_open and self.infos[index].accepted_at is not None)

    def offers(self) -> list[Offer]:
        """Return all complete checkpoints, newest first."""
        by_age = []
        for slot, info in zip(self.slab.slots, self.infos, strict=True):
            header = slot.header
            if header.state in COMPLETE:
                durable = header.state == SlotState.DURABLE
                identity = (slot.index, header.iteration, header.save_id)
                offer = Offer(*identity, durable, info.digests, info.recovered)
                by_age.append((info.sequence, offer))
        return [offer for _, offer in sorted(by_age, key=lambda pair: -pair[0])]

    def open(self) -> list[int]:
        """Return the slots whose trainer may lack the result of the save, oldest first.

        Slots from other nodes are left out: they may be of any age, and some are durable.
        """
        indices = [
            slot.index
            for slot, info in zip(self.slab.slots, self.infos, strict=True)
            if not info.recovered and slot.header.state in (SlotState.STAGED, SlotState.KEPT)
        ]
        return sorted(indices, key=lambda index: self.infos[index].sequence)

    def recovered(self, save_id: str | None) -> list[int]:
        """Return the slots of this save that came from other nodes and no agent persists yet."""
        return [
            slot.index
            for slot, info in zip(self.slab.slots, self.infos, strict=True)
            if info.recovered
            and info.accepted_at is None
            and not info.elsewhere
            and slot.header.save_id == save_id
        ]

    def unwritten(self) -> dict[str, Slot]:
        """Return, by save, the slots that are memory-only or whose write may yet succeed."""
        states = (SlotState.KEPT, SlotState.FAILED)
        return {
            slot.header.save_id: slot
            for slot, info in zip(self.slab.slots, self.infos, strict=True)
            if slot.header.state in states and not info.is_final
        }

    def discard_torn(self) -> None:
        """Empty the slots that a dead trainer was still copying into."""
        for slot in self.slab.slots:
            if slot.header.state == SlotState.STAGING:
                slot.set_header(EMPTY_HEADER)

    def states(self, save_id: str) -> set[SlotState]:
        """Return the states of the slots that hold `save_id`."""
        headers = (slot.header for slot in self.slab.slots)
        return {header.state for header in headers if header.save_id == save_id}

    def keep_only(self, history: History) -> list[Save]:
        """Empty the slots that are not of a history, unless they are being written.

        Returns the saves that only these slots held.
        """
        lost = []
        for slot, info in zip(self.slab.slots, self.infos, strict=True):
            if not info.persisting and not history.holds(_save_in(slot)):
                if slot.header.state in _UNWRITTEN:
                    lost.append(_save_in(slot))
                slot.set_header(EMPTY_HEADER)
        if self.stored is not None and not history.holds(self.stored):
            self.stored = self._newest_durable()
        return lost

    def _newest_durable(self) -> Save | None:
        durable = [slot for slot in self.slab.slots if slot.header.state == SlotState.DURABLE]
        return max(map(_save_in, durable), key=lambda save: save.order, default=None)

    def mark(self, save_id: str, state: SlotState, *, is_final: bool = False) -> None:
        """Set the state of the complete slot with `save_id`, if there still is one."""
        for slot, info in zip(self.slab.slots, self.infos, strict=True):
            header = slot.header
            if header.save_id == save_id and header.state in COMPLETE:
                slot.set_state(state)
                info.is_final = is_final
                if state == SlotState.DURABLE:
                    self.stored = max(self.stored or _save_in(slot), _save_in(slot))


def _save_in(slot: Slot) -> Save:
    header = slot.header
    return Save(header.iteration, header.save_id)


def only_in_memory(ranks: Sequence[RankSlots]) -> list[SlotHeader]:
    """Return a header of each save to write before memory is given up for ever, newest first.

    These are memory-only and failed saves that all ranks of this node have and that are newer than
    the checkpoint in storage. Ranks of other nodes may lack the newest one, so all are returned; if
    there are no other nodes, only the newest.
    """
    held = [slots.unwritten() for slots in ranks]
    common = set(held[0]).intersection(*held[1:]) if held else set()
    # Slots that came from other nodes may not know that their save is in storage.
    stored = [slots.stored.iteration for slots in ranks if slots.stored is not None]
    newer = [held[0][save_id] for save_id in common]
    newer = [slot for slot in newer if slot.header.iteration > max(stored, default=-1)]
    newer.sort(key=lambda slot: -slot.header.iteration)
    # An agent that keeps a save asks 5 times a second, so a description is decoded only if needed.
    if len(newer) > 1 and newer[0].meta.world_size == len(ranks):
        del newer[1:]
    return [slot.header for slot in newer]
