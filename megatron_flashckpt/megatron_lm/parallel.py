"""Position of this rank in the parallel layout, independent of Megatron's release."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_flashckpt.file_format.commit_record import Coordinates


def data_parallel() -> tuple[int, int]:
    """Return `(count, index)` of the replicas of dense parameters, with context parallelism."""
    return (
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def tensor_ranks() -> int:
    """Return the number of ranks that may hold copies of one tensor, of experts or other layers."""
    ranks: int = parallel_state.get_tensor_model_parallel_world_size()
    if hasattr(parallel_state, "get_expert_tensor_parallel_world_size"):  # since core 0.9
        ranks = max(ranks, parallel_state.get_expert_tensor_parallel_world_size())
    return ranks


def is_in_embedding_group() -> bool:
    """Return whether Megatron keeps this rank's word embeddings equal to those of other stages."""
    return bool(parallel_state.is_rank_in_embedding_group(ignore_virtual=True))


def data_parallel_group(*, with_context_parallel: bool = True) -> Any:
    """Return the group of the replicas of dense parameters."""
    return parallel_state.get_data_parallel_group(with_context_parallel=with_context_parallel)


def expert_data_parallel_group() -> Any:
    """Return the group of the replicas of expert parameters."""
    if hasattr(parallel_state, "get_expert_data_parallel_group"):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_modulo_expert_parallel_group()  # before core 0.9


def expert_data_parallel() -> tuple[int, int]:
    """Return `(count, index)` of the replicas of expert parameters."""
    group = expert_data_parallel_group()
    return dist.get_world_size(group), dist.get_rank(group)


def replica_ranks(*, expert: bool) -> list[int]:
    """Return the ranks of the replicas of expert or dense parameters, in group order."""
    group = expert_data_parallel_group() if expert else data_parallel_group()
    return dist.get_process_group_ranks(group)


def model_sizes() -> tuple[int, int, int]:
    """Return the tensor, pipeline and expert parallel sizes, which determine the sharding."""
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )


def coordinates() -> Coordinates:
    """Return this rank's coordinates. No communication."""
    return Coordinates(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(),
        cp=parallel_state.get_context_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
        edp=expert_data_parallel()[1],
    )
