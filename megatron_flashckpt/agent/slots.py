"""The agent's book of slots: which rank has what in memory, and which slot may be overwritten.

Not thread-safe by itself: the server holds its lock around every call.
"""

from __future__ import annotations

import dataclasses
import itertools
import time

from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import COMPLETE, EMPTY_HEADER, SlotState


@dataclasses.dataclass
class SlotInfo:
    """What the agent knows of a slot beyond its header."""

    sequence: int = -1
    """Order of acquisition; higher is newer."""
    persisting: bool = False
    """Its bytes are being read: must not be overwritten."""
    persisting_since: float = 0.0
    claimed: bool = False
    """Handed over: its trainer has rung the doorbell, or the slot was taken over without that."""
    inherited: bool = False
    """Another agent had it first, and may have come to any point of making it durable."""
    digests: tuple[str, ...] | None = None
    recovered: bool = False
    """Its bytes came from other nodes."""


class RankSlots:
    """One rank's slab and the state of its slots."""

    _sequence = itertools.count()

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.infos = [SlotInfo() for _ in slab.slots]
        # A slab that outlived its first agent is not empty: its newest checkpoint goes last.
        for slot in sorted(slab.slots, key=lambda slot: slot.header.iteration):
            info = self.infos[slot.index]
            info.sequence = next(self._sequence)
            info.inherited = slot.header.state == SlotState.STAGED

    @property
    def busy(self) -> bool:
        """Whether any slot is still being persisted."""
        return any(info.persisting for info in self.infos)

    def busy_for(self) -> float:
        """Return the seconds for which the oldest read goes on."""
        started = [info.persisting_since for info in self.infos if info.persisting]
        return time.monotonic() - min(started) if started else 0.0

    def acquire(self) -> int:
        """Return the slot to overwrite: one that holds no complete checkpoint, else the oldest.

        -1 if all are busy. With two slots the newest complete checkpoint is never the one handed
        out, unless it is the only one that is not being read.
        """
        free = [i for i, info in enumerate(self.infos) if not info.persisting]
        if not free:
            return -1
        slots = self.slab.slots
        index = min(
            free,
            # Not "empty": a copy that failed leaves its slot STAGING, newer than the complete one.
            key=lambda i: (slots[i].header.state in COMPLETE, self.infos[i].sequence),
        )
        slots[index].set_header(EMPTY_HEADER)
        self.infos[index] = SlotInfo(sequence=next(self._sequence))
        return index

    def offers(self) -> list[Offer]:
        """Return every complete checkpoint, newest first."""
        found = []
        for slot, info in zip(self.slab.slots, self.infos, strict=True):
            header = slot.header
            if header.state in COMPLETE:
                durable = header.state == SlotState.DURABLE
                which = (slot.index, header.iteration, header.save_id)
                offer = Offer(*which, durable, info.digests, info.recovered)
                found.append((info.sequence, offer))
        return [offer for _, offer in sorted(found, key=lambda pair: -pair[0])]

    def staged(self) -> list[int]:
        """Return the slots whose save has no outcome yet, oldest first.

        Not those that came from other nodes: they may be of any age, and some of them durable.
        """
        staged = [
            slot.index
            for slot, info in zip(self.slab.slots, self.infos, strict=True)
            if slot.header.state == SlotState.STAGED and not info.recovered
        ]
        return sorted(staged, key=lambda index: self.infos[index].sequence)

    def recovered(self, save_id: str | None) -> list[int]:
        """Return the slots with this save that came from other nodes and were not persisted yet."""
        return [
            slot.index
            for slot, info in zip(self.slab.slots, self.infos, strict=True)
            if info.recovered and not info.claimed and slot.header.save_id == save_id
        ]

    def saves_after(self, index: int) -> set[str]:
        """Return the complete saves that are newer than the one in slot `index`."""
        return {
            slot.header.save_id
            for slot in self.slab.slots
            if slot.header.state in COMPLETE
            and self.infos[slot.index].sequence > self.infos[index].sequence
        }

    def discard_torn(self) -> None:
        """Empty what a dead trainer was still copying."""
        for slot in self.slab.slots:
            if slot.header.state == SlotState.STAGING:
                slot.set_header(EMPTY_HEADER)

    def adopt(self, save_id: str | None, iteration: int) -> None:
        """Empty all slots that hold another save of `iteration` or a later one."""
        for slot, info in zip(self.slab.slots, self.infos, strict=True):
            header = slot.header
            dead = header.save_id != save_id and header.iteration >= iteration
            if dead and not info.persisting:
                slot.set_header(EMPTY_HEADER)

    def mark(self, save_id: str, state: SlotState) -> None:
        """Set the state of the complete slot that holds `save_id`, if it still does."""
        for slot in self.slab.slots:
            header = slot.header
            if header.save_id == save_id and header.state in COMPLETE:
                slot.set_state(state)
