"""Sums of copies are written into slot metadata that has no other free bytes."""

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

#: Ages up to the largest accepted setting.
AGES: list[Any] = [None, 0, 24, 24.0, 0.5, 10**9, 1e9]


@pytest.mark.parametrize("age", AGES, ids=repr)
@pytest.mark.parametrize("value", [1, 1.0, -(2**63), 1e-308], ids=repr)
def test_writing_sums_keeps_the_length_of_the_slot_metadata(age: Any, value: Any) -> None:
    """Float fields set to an integer are encoded as integers, which changes their length."""
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
        sums=comparison.placeholder_sums,
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
    assert [(entry.key, entry.numel) for entry in written.sums] == [("norm.weight", 100)]
    assert written.sums != comparison.placeholder_sums
    assert (written.retention.max_age_hours, written.metrics) == (age, {"loss": value})
    slab.close()
