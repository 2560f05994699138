"""Finds the tensors whose copies differ between ranks, once per run, in the first committed save.

The ranks sum their copies while training continues. The agents compare the sums at the commit and
report the differing tensors with the result of the save. Later saves write every copy of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from megatron_flashckpt.layout.copies import CopySum, added_up, compared_numel
from megatron_flashckpt.layout.copy_sums import weighted_sum
from megatron_flashckpt.layout.piece import RANK_STATE, Piece
from megatron_flashckpt.layout.template import Layout
from megatron_flashckpt.megatron_lm.cutting import LocalPiece
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.memory.runs import Copy, UnsavedCopies
from megatron_flashckpt.memory.slot import Slot
from megatron_flashckpt.tracing import phase

logger = logging.getLogger(__name__)

#: Alignment in bytes of copies that are only compared; sufficient for every element type.
_ALIGNMENT = 64
#: Maximum number of tensors that one message names.
_MOST_NAMES = 20


class Comparison:
    """Sums of one rank in one save: of copies that it saves and of copies that it only compares."""

    def __init__(self, saved: list[LocalPiece], others: list[LocalPiece], keys: frozenset[str]):
        """Select the copies to sum.

        Args:
            saved: all pieces of the save, in layout order.
            others: copies that the save does not contain.
            keys: keys of the tensors that have copies.
        """
        self._saved = [
            (number, local.piece)
            for number, local in enumerate(saved)
            if local.piece.key in keys and _is_compared(local.piece)
        ]
        self._others: list[tuple[int, Piece]] = []
        copies, end = [], 0
        for local in others:
            if _is_compared(local.piece):
                source = local.tensor[: compared_numel(local.piece)]
                copies.append(Copy(source, end, local.early))
                self._others.append((end, local.piece))
                end += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.unsaved = UnsavedCopies(copies, torch.empty(end, dtype=torch.uint8))
        """Copies to make before the tensors change."""

    @property
    def placeholder_sums(self) -> tuple[CopySum, ...]:
        """Placeholder sums of the same encoded length as the final sums."""
        return added_up((piece, 0) for _, piece in (*self._saved, *self._others))

    def write(self, slot: Slot, layout: Layout) -> None:
        """Write the sums into the slot's descriptor after all copies have been made."""
        with phase("sums of copies"), slot.data() as data:
            sums = [
                (piece, weighted_sum(piece, data[layout.template.items[number].byte_offset :]))
                for number, piece in self._saved
            ]
            content = self.unsaved.content.numpy()
            sums += [(piece, weighted_sum(piece, content[begin:])) for begin, piece in self._others]
        # Other fields are copied byte for byte, so that the descriptor keeps its length: a typed
        # decoder would turn a setting given as 24 into 24.0.
        fields = msgspec.msgpack.decode(slot.encoded_meta(), type=dict[str, msgspec.Raw])
        fields["sums"] = msgspec.Raw(msgspec.msgpack.encode(added_up(sums)))
        slot.set_meta(msgspec.msgpack.encode(fields))


def _is_compared(piece: Piece) -> bool:
    return piece.kind != RANK_STATE and compared_numel(piece) > 0


class CopyCheck:
    """State of the comparison of a job's copies. Used on the training thread; no communication."""

    def __init__(self, state: ModelState, rank: int) -> None:
        self._state = state
        self._rank = rank
        self._is_done = False

    def begin(
        self, chunks: list[Any], optimizer: Any, saved: list[LocalPiece]
    ) -> Comparison | None:
        """Return the sums to make in a save; None without copies or after their comparison.

        Args:
            saved: all pieces of the save, in layout order.
        """
        state = self._state
        if self._is_done or not state.copied_keys:
            return None
        unsaved = state.copied_keys - state.differing_keys
        others = state.copies(state.geometry(chunks), chunks, optimizer, unsaved)
        return Comparison(saved, others, state.copied_keys)

    def learn(self, iteration: int, differing: Iterable[str]) -> None:
        """Store the differing keys that a committed save of all ranks has found."""
        self._is_done = True
        new_keys = sorted(set(differing) - self._state.differing_keys)
        self._state.differing_keys |= frozenset(new_keys)
        if new_keys and self._rank == 0:
            logger.warning(
                "iteration %d: ranks hold different copies of %s, which should be equal: Megatron "
                "lets them drift apart. This checkpoint has only the first copy of each. Later "
                "ones have all copies, so that a job in the same parallel layout resumes bit for "
                "bit",
                iteration,
                named(new_keys),
            )


def named(keys: Iterable[str]) -> str:
    """Return the number of tensors and the first names."""
    listed = sorted(keys)
    more = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    plural = "" if len(listed) == 1 else "s"
    return f"{len(listed)} tensor{plural} ({', '.join(listed[:_MOST_NAMES])}{more})"
