"""Megatron's flags that decide how a job's state may be staged."""

from __future__ import annotations

from typing import Any

_GRAPH_FLAGS = ("enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph")


def changes_beside_steps(args: Any) -> str | None:
    """Return the flag under which the state changes in other places than `optimizer.step()`.

    Late copies of a save are ordered before the step and before nothing else. None: no such flag.
    """
    if getattr(args, "perform_rl_step", False):
        return "--perform-rl-step"  # swaps weights, and moves them off the GPU for inference
    if getattr(args, "offload_optimizer_states", False):
        return "--offload-optimizer-states"  # frees them on the GPU in every iteration
    if (
        getattr(args, "vision_pretraining", False)
        and getattr(args, "vision_pretraining_type", "") == "dino"
    ):
        return "--vision-pretraining-type dino"  # the teacher follows by momentum after the step
    return None


def captures_graphs(args: Any) -> bool:
    """Return whether the job captures CUDA graphs in its first iterations."""
    impl = getattr(args, "cuda_graph_impl", None)
    return impl not in (None, "none") or any(getattr(args, flag, False) for flag in _GRAPH_FLAGS)
