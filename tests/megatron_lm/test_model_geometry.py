"""Geometry of fused tensors, from factories like those of Megatron's modules."""

from __future__ import annotations

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.megatron_lm.model_geometry import _geometry

TP, RANK = 2, 1


def factory(local: torch.Tensor, build) -> ShardedTensorFactory:
    def build_parts(key, tensor, replica_id, flattened_range):
        return build(key, tensor, replica_id)

    return ShardedTensorFactory("experts.fc", local, build_parts, None, (0, 0, 0))


def halves(key, tensor, replica_id):
    """Build SwiGLU: two halves, each a tensor-parallel shard of its half of the global tensor."""
    return [
        ShardedTensor.from_rank_offsets(
            key, part, (0, half * TP + RANK, 2 * TP), replica_id=replica_id
        )
        for half, part in enumerate(torch.chunk(tensor, 2, dim=0))
    ]


def transposed(key, tensor, replica_id):
    """Build what GroupedMLP built up to core 0.16; the real class needs a GPU."""
    return [
        ShardedTensor.from_rank_offsets(
            key, tensor.t().contiguous(), (0, RANK, TP), replica_id=replica_id
        )
    ]


def test_a_fused_tensor_has_one_run_per_part():
    geometry = _geometry("fc", factory(torch.zeros(8, 6), halves))
    assert [(run.offset, run.local_start, run.numel) for run in geometry.runs] == [
        ((4, 0), 0, 24),
        ((12, 0), 24, 24),
    ]


def test_a_tensor_stored_transposed_is_refused_at_once():
    with pytest.raises(UnsupportedError, match=r"experts\.fc: Megatron stores this tensor transp"):
        _geometry("fc", factory(torch.zeros(512, 256), transposed))
