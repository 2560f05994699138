"""The sums of copies are put into the description of a slot that has room for nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from megatron_flashckpt.config import Best, Retention
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.layout.piece import MASTER, Piece
from megatron_flashckpt.layout.template import PlanCache
from megatron_flashckpt.megatron_lm.copy_check import Comparison
from megatron_flashckpt.megatron_lm.cutting import LocalPiece
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import EncodedMeta, SlotHeader, SlotState

#: Up to the largest that settings take.
AGES: list[Any] = [None, 0, 24, 24.0, 0.5, 10**9, 1e9]


@pytest.mark.parametrize("age", AGES, ids=repr)
@pytest.mark.parametrize("value", [1, 1.0, -(2**63), 1e-308], ids=repr)
def test_sums_leave_the_rest_of_a_description_as_long_as_it_was(age: Any, value: Any) -> None:
    """Fields that are declared as floats are encoded as the integers that they were given as."""
    tensor = torch.arange(100, dtype=torch.float32)
    local = LocalPiece(Piece("norm.weight", MASTER, "F32", (100,), (0,), (100,), 0, 100), tensor)
    layout = PlanCache(lambda name: None, lambda name, encoded: None).layout([local.piece])
    comparison = Comparison([local], [], frozenset({"norm.weight"}))
    meta = EncodedMeta(
        root="/a",
        rank=0,
        world_size=1,
        coordinates=Coordinates(),
        template_fingerprint=layout.template_fingerprint,
        template=msgspec.Raw(layout.encoded_template),
        placement=layout.placement,
        common=b"",
        description={"value": value},
        retention=Retention(max_age_hours=age, best=Best(metric="loss")),
        metrics={"loss": value},
        sums=comparison.room,
    )
    encoded = msgspec.msgpack.encode(meta)
    slab = Slab.create(1, len(encoded), layout.nbytes, "0")
    (slot,) = slab.slots
    slot.set_header(SlotHeader(SlotState.STAGING, 1, "a" * 12, len(encoded), layout.nbytes))
    slot.set_meta(encoded)
    with slot.data() as data:
        data[:400] = tensor.numpy().tobytes()
    comparison.write(slot, layout)
    written = slot.meta
    assert written.sums is not None
    assert [(each.key, each.numel) for each in written.sums] == [("norm.weight", 100)]
    assert written.sums != comparison.room
    assert (written.retention.max_age_hours, written.metrics) == (age, {"loss": value})
    slab.close()
