"""Global tensors that consist of the local tensors of several ranks."""

from __future__ import annotations

import torch

from megatron_flashckpt.convert.common.tensor_parts import global_tensors, part_of
from megatron_flashckpt.layout.piece import WEIGHT
from megatron_flashckpt.megatron_lm.tensor_geometry import Geometry, Run


def test_a_copy_never_stands_for_the_main_copy_whatever_the_order_of_ranks() -> None:
    run = Run("w", (4,), (0,), (4,), 0, 0, 4)
    main = Geometry("w", (run,), main=True, replica=0, resizable=False)
    copy = Geometry("w", (run,), main=False, replica=0, resizable=False)
    values = {True: torch.arange(4.0), False: torch.full((4,), -1.0)}
    for order in ((main, copy), (copy, main)):
        (whole,) = global_tensors(part_of(one, WEIGHT, values[one.main]) for one in order)
        assert torch.equal(whole.read(((0,), (4,))), values[True])
    assert global_tensors([part_of(copy, WEIGHT, values[False])]) == []
