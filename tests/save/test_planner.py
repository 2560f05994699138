"""The plan of a save is that of the last one exactly while the sections are equal."""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.megatron_lm.enumeration import Enumeration, Section
from megatron_flashckpt.save.planner import Planner


def planner() -> Planner:
    link = mock.Mock()
    link.client().fetch_template.return_value = None
    return Planner(0, 1, link, mock.Mock())


def piece(key: str, numel: int) -> Piece:
    return Piece(key, "weight", "F32", (numel,), (0,), (numel,), 0, numel)


def enumeration(*, unused: int = 0, **changed: Any) -> Enumeration:
    """Return two blocks with a changed section in the first one, and further unused tensors."""
    section = Section(piece("middle", 16), 1, 8, 24)
    first = [Section(piece("first", 3), 0), msgspec.structs.replace(section, **changed)]
    result = Enumeration()
    result.add_block(first, [torch.zeros(3), *(torch.zeros(64) for _ in range(2 + unused))])
    result.add_block([Section(piece("last", 5), 0)], [torch.zeros(5)])
    return result


@pytest.mark.parametrize(
    "change",
    [
        *({"tensor": 2}, {"start": 0, "end": 16}, {"end": None}, {"early": True}, {"unused": 1}),
        *({"piece": piece("middle", 15)}, {"piece": piece("other", 16)}),
    ],
)
def test_a_plan_is_made_anew_if_anything_of_a_section_changes(change: dict[str, Any]) -> None:
    made = planner()
    before = made.plan(enumeration())
    made.plans.take_origin()
    after = made.plan(enumeration(**change))
    expected = planner().plan(enumeration(**change))
    assert after[1:] == expected[1:] != before[1:]
    assert made.plan(enumeration(**change)) is after
    assert made.plans.take_origin() == ("kept" if "piece" not in change else "computed")


def test_copies_name_the_tensors_of_all_blocks_in_layout_order() -> None:
    pieces = enumeration(early=True)
    plan = planner().plan(pieces)
    (early,) = plan.early
    assert (early.source, early.start, early.end, early.offset) == (1, 8, 24, 0)
    assert [(c.source, c.start, c.end, c.offset) for c in plan.late] == [
        (0, 0, None, 64),
        (3, 0, None, 76),
    ]
    assert [pieces.tensors[copy.source].numel() for copy in plan.late] == [3, 5]
