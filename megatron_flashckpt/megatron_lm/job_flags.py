"""Finds the flags of a Megatron job that decide whether and when its state may be copied.

This module imports nothing, because `flashckpt plan` uses it without Megatron.
"""

from __future__ import annotations

from typing import Any

_GRAPH_FLAGS = ("enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph")
_SHARDED_WEIGHTS = "a rank holds a slice of its tensor rank's weights, which was never tried here"
_SELF_SHARDING = "the model shards its parameters itself, which this release does not support"
#: Flags under which Megatron itself saves and loads, and the reasons, by attribute of the args.
_LEFT_TO_MEGATRON = {
    "use_megatron_fsdp": ("--use-megatron-fsdp", _SELF_SHARDING),
    "use_custom_fsdp": ("--use-custom-fsdp", _SELF_SHARDING),  # name until core 0.13
    "use_torch_fsdp2": ("--use-torch-fsdp2", _SELF_SHARDING),
    # Of core 0.19. Megatron derives these numbers of slices from the flags.
    "gtp_weight_remat_size": ("--tensor-parallel-num-weight-shards", _SHARDED_WEIGHTS),
    "expert_gtp_weight_remat_size": (
        "--expert-tensor-parallel-num-weight-shards",
        _SHARDED_WEIGHTS,
    ),
    "inprocess_restart": (
        "--inprocess-restart",
        "a process may train again as another rank, which this release does not support",
    ),
    "freeze_all_layers": (
        "--freeze-all-layers",
        "a save records only the position in the data, which this release does not support",
    ),
    "logits_save_dir": (
        "--logits-save-dir",
        "Megatron writes the logits in its own saves",
    ),
}


def left_to_megatron(args: Any) -> str | None:
    """Return the given flag under which Megatron itself saves and loads; None without one."""
    flags = (flag for name, (flag, _) in _LEFT_TO_MEGATRON.items() if _is_given(args, name))
    return next(flags, None)


def _is_given(args: Any, name: str) -> bool:
    """Return whether a flag is set, a path is named, or a number is above 1."""
    value = getattr(args, name, None)
    return value > 1 if isinstance(value, int) and not isinstance(value, bool) else bool(value)


def why_left(flag: str) -> str:
    """Return the reason why Megatron itself saves and loads with `flag`."""
    return dict(_LEFT_TO_MEGATRON.values())[flag]


def converts_format(args: Any) -> bool:
    """Return whether the job loads a checkpoint, saves it in Megatron's own format, and exits."""
    return getattr(args, "ckpt_convert_format", None) is not None


def changes_outside_steps(args: Any) -> str | None:
    """Return the given flag under which tensors change outside `optimizer.step()`, or None.

    Only `optimizer.step()` waits for the late copies of a save.
    """
    if getattr(args, "perform_rl_step", False):
        return "--perform-rl-step"  # swaps weights and moves them off the GPU for inference
    if getattr(args, "offload_optimizer_states", False):
        return "--offload-optimizer-states"  # frees states on the GPU in every iteration
    if (
        getattr(args, "vision_pretraining", False)
        and getattr(args, "vision_pretraining_type", "") == "dino"
    ):
        return "--vision-pretraining-type dino"  # updates the teacher after the step
    return None


def captures_graphs(args: Any) -> bool:
    """Return whether the job captures CUDA graphs in its first iterations."""
    impl = getattr(args, "cuda_graph_impl", None)
    return impl not in (None, "none") or any(getattr(args, flag, False) for flag in _GRAPH_FLAGS)
