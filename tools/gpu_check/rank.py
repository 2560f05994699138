"""Rank with tensors on the GPU and without a model, with a real `Checkpointer` and a real agent."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch

from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.layout.piece import MASTER, Piece
from megatron_flashckpt.layout.read_plan import read_plan
from megatron_flashckpt.load.slot_chunks import OfferedSlot
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.cutting import LocalPiece
from megatron_flashckpt.megatron_lm.enumeration import Enumeration
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.megatron_lm.torch_dtypes import dtype_name
from megatron_flashckpt.memory.slot import SlotState
from megatron_flashckpt.save.checkpointer import Checkpointer, SaveRequest
from megatron_flashckpt.storage.opening import open_store
from tests.support.stored import read_all
from tests.support.trainer import config_of, end_agents
from tools.gpu_check.report import Report


class Node:
    """Runtime directory with its agent, and a save directory."""

    def __init__(self, where: Path) -> None:
        self.root = where / "save"
        self.runtime_dir = where / "run"
        self._ranks: list[Rank] = []

    def rank(self, tensors: list[torch.Tensor], **settings: Any) -> Rank:
        """Return rank 0 after another start; it saves `tensors`."""
        config = msgspec.structs.replace(config_of(self.runtime_dir), **settings)
        made = Rank(Checkpointer(str(self.root), config), tensors)
        self._ranks.append(made)
        return made

    def stored(self, rank: Rank, iteration: int) -> list[torch.Tensor]:
        """Return the tensors of a committed checkpoint, read and verified."""
        checkpoint = open_checkpoint(open_store(self.root), iteration)
        plan = read_plan(rank.pieces, checkpoint.sources(), checkpoint.place)
        read = [torch.empty(saved.numel(), dtype=saved.dtype) for saved in rank.tensors]
        read_all(checkpoint, plan, rank.pieces, Targets(rank.pieces, read), threads=4)
        return read

    def check_save(
        self, report: Report, rank: Rank, iteration: int, meanwhile: Callable[[], None]
    ) -> None:
        """Save, call `meanwhile`, change the tensors as a step does; compare what is stored."""
        expected = [tensor.cpu() for tensor in rank.tensors]
        rank.save(iteration)
        meanwhile()
        rank.before_step()
        for tensor in rank.tensors:
            tensor.add_(1.0)
        errors = rank.wait()
        report.must(f"save {iteration} is committed", not errors, "; ".join(errors))
        same = not errors and all(map(torch.equal, self.stored(rank, iteration), expected))
        report.must(f"save {iteration} holds the bytes of its step", same)

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        end_agents(self.runtime_dir)


def request(iteration: int, *, memory_only: bool = False) -> SaveRequest:
    """Return the request for a save without a model and without random states."""
    job = JobState(chunks=[], save_rng=False)
    return SaveRequest(iteration, job, memory_only=memory_only)


class Rank:
    def __init__(self, checkpointer: Checkpointer, tensors: list[torch.Tensor]) -> None:
        self.checkpointer = checkpointer
        self.tensors = tensors
        self._is_open = True
        checkpointer.model_state.owned = self._owned  # type: ignore[method-assign]

    @property
    def pieces(self) -> list[Piece]:
        return [
            Piece(
                *(f"w{number}", MASTER, dtype_name(tensor.dtype), (tensor.numel(),), (0,)),
                *((tensor.numel(),), 0, tensor.numel()),
            )
            for number, tensor in enumerate(self.tensors)
        ]

    def _owned(self, *_: Any) -> Enumeration:
        owned = Enumeration()
        owned.add(
            [
                LocalPiece(piece, tensor.reshape(-1))
                for piece, tensor in zip(self.pieces, self.tensors, strict=True)
            ]
        )
        return owned

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def save(self, iteration: int) -> None:
        """Start a save; late copies may run after the return."""
        self.checkpointer.save(request(iteration))

    def before_step(self) -> None:
        """Wait for late copies, as the hook of an optimizer's step does."""
        self.checkpointer.link.stager.before_change()

    def wait(self) -> list[str]:
        """Wait until all saves are durable; return the errors of those that failed."""
        return [
            outcome.error for outcome in self.checkpointer.wait(60.0) if outcome.error is not None
        ]

    def close(self) -> None:
        """Disconnect from the agent, which keeps the slots for the next start."""
        if self._is_open:
            self._is_open = False
            self.checkpointer.close(leave=False)


@contextlib.contextmanager
def node() -> Iterator[Node]:
    """Yield a node; end its agent and remove its files afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="n-") as where,
        mock.patch.object(parallel, "coordinates", Coordinates),
    ):
        made = Node(Path(where))
        try:
            yield made
        finally:
            made.close()


@dataclasses.dataclass(frozen=True)
class HeldSlots:
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
