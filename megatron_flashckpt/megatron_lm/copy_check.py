"""Finds the tensors whose copies differ between ranks: once per run, in its first committed save.

The ranks sum up their copies while training continues, the agents compare the sums when they
commit, and the outcome of the save tells. From then on every copy of these tensors is saved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from megatron_flashckpt.layout.copies import CopySum, added_up, compared_numel
from megatron_flashckpt.layout.copy_sums import weighed
from megatron_flashckpt.layout.piece import RANK_STATE, Piece
from megatron_flashckpt.layout.template import Layout
from megatron_flashckpt.megatron_lm.cutting import LocalPiece
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.memory.runs import Aside, Copy
from megatron_flashckpt.memory.slot import Slot
from megatron_flashckpt.tracing import phase

logger = logging.getLogger(__name__)

#: Of the places of copies that are only looked at; any element is aligned there.
_ALIGNMENT = 64
#: A message that names hundreds of tensors is read by nobody.
_MOST_NAMES = 20


class Comparison:
    """What one rank sums up in one save: copies that it saves, and copies that it does not."""

    def __init__(self, saved: list[LocalPiece], others: list[LocalPiece], keys: frozenset[str]):
        """Args: `saved`: all that the save has, in layout order; `keys`: of what has copies."""
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
        self.aside = Aside(copies, torch.empty(end, dtype=torch.uint8))
        """Copies to be made while the tensors do not change."""

    @property
    def room(self) -> tuple[CopySum, ...]:
        """Sums without a meaning that are as long as those to come."""
        return added_up((piece, 0) for _, piece in (*self._saved, *self._others))

    def write(self, slot: Slot, layout: Layout) -> None:
        """Put the sums into the description of a slot, when all copies have been made."""
        with phase("sums of copies"), slot.data() as data:
            sums = [
                (piece, weighed(piece, data[layout.template.items[number].byte_offset :]))
                for number, piece in self._saved
            ]
            content = self.aside.content.numpy()
            sums += [(piece, weighed(piece, content[begin:])) for begin, piece in self._others]
        # All other fields byte for byte, so that the description keeps its length: a setting that
        # was given as 24 would be encoded as 24.0.
        fields = msgspec.msgpack.decode(slot.encoded_meta(), type=dict[str, msgspec.Raw])
        fields["sums"] = msgspec.Raw(msgspec.msgpack.encode(added_up(sums)))
        slot.set_meta(msgspec.msgpack.encode(fields))


def _is_compared(piece: Piece) -> bool:
    return piece.kind != RANK_STATE and compared_numel(piece) > 0


class CopyCheck:
    """What is known of a job's copies. Used on the training thread; nothing communicates."""

    def __init__(self, state: ModelState, rank: int) -> None:
        self._state = state
        self._rank = rank
        self._is_done = False

    def begin(
        self, chunks: list[Any], optimizer: Any, saved: list[LocalPiece]
    ) -> Comparison | None:
        """Return what a save has to sum up; None if copies have been compared, or there are none.

        Args:
            saved: all that the save has, in layout order.
        """
        state = self._state
        if self._is_done or not state.copied_keys:
            return None
        unsaved = state.copied_keys - state.differing_keys
        others = state.copies(state.geometry(chunks), chunks, optimizer, unsaved)
        return Comparison(saved, others, state.copied_keys)

    def learn(self, iteration: int, differing: Iterable[str]) -> None:
        """Note what a committed save, in which all ranks took part, has found."""
        self._is_done = True
        found = sorted(set(differing) - self._state.differing_keys)
        self._state.differing_keys |= frozenset(found)
        if found and self._rank == 0:
            logger.warning(
                "iteration %d: ranks hold different copies of %s, which should be equal: Megatron "
                "lets them drift apart. This checkpoint has only the first copy of each. Later "
                "ones have all copies, so that a job in the same parallel layout resumes bit for "
                "bit",
                iteration,
                named(found),
            )


def named(keys: Iterable[str]) -> str:
    """Return how many tensors there are and, as far as anybody reads them, their names."""
    listed = sorted(keys)
    more = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    plural = "" if len(listed) == 1 else "s"
    return f"{len(listed)} tensor{plural} ({', '.join(listed[:_MOST_NAMES])}{more})"
