"""Contents of a rank's slots after its process has ended, as its next start finds them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from megatron_flashckpt.layout.piece import MASTER
from megatron_flashckpt.load.slot_chunks import OfferedSlot
from megatron_flashckpt.memory.slot import SlotState
from tools.gpu_check.rank import Node


@dataclasses.dataclass(frozen=True)
class HeldSlots:
    """Slots of a rank."""

    states: list[str]
    values: dict[int, list[float]]
    """Smallest and largest element of each tensor, by the iteration of an offered save."""

    def is_whole(self, iteration: int) -> bool:
        """Return whether the save is offered, and all its elements equal its iteration."""
        values = self.values.get(iteration)
        return values is not None and set(values) == {float(iteration)}

    def __str__(self) -> str:
        by_iteration = {iteration: sorted(set(values)) for iteration, values in self.values.items()}
        return f"slots {', '.join(self.states)}; offered: {by_iteration}"


def held(node: Node) -> HeldSlots:
    """Return the slots of rank 0 in the agent of `node`; the rank's process has ended."""
    rank = node.rank([])
    slab, offers = rank.checkpointer.link.take_slab()
    if slab is None:
        return HeldSlots([], {})
    values: dict[int, list[float]] = {}
    for offer in offers:
        slot = OfferedSlot(slab, offer, 0)
        values[offer.iteration] = []
        for item in slot.meta.template.items:
            if item.kind == MASTER:
                end = item.byte_offset + 4 * item.numel
                low, high = slot.data[item.byte_offset : end].view(torch.float32).aminmax()
                values[offer.iteration] += [float(low), float(high)]
    states = [SlotState(slot.header.state).name for slot in slab.slots]
    rank.close()
    return HeldSlots(states, values)


def held_in(where: Path) -> HeldSlots:
    """Return the slots in the agent of a child that ran in `where`, and end that agent."""
    node = Node(where)
    try:
        return held(node)
    finally:
        node.close()
