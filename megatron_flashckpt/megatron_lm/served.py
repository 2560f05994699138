"""Refuses Megatron arguments that are not served, and lists the limits of the figures."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.megatron_lm.job_flags import left_to_megatron

#: Optimizers whose states are one element per element of the parameter.
_OPTIMIZERS = ("adam", "sgd", "lion", "muon", "dist_muon")
#: Types of optimizer state without scales.
_UNSCALED = ("fp32", "bf16")


def refuse_unserved(args: argparse.Namespace) -> None:
    """Raise UnsupportedError if flashckpt cannot save or load a job with `args`."""
    reasons = [*_models(args), *_states(args), *_quantized(args)]
    if reasons:
        raise UnsupportedError(
            f"no figures, because flashckpt does not serve this job: {'; '.join(reasons)}"
        )


def _models(args: argparse.Namespace) -> Iterator[str]:
    if (flag := left_to_megatron(args)) is not None:
        yield f"with {flag} Megatron's own functions save and load"
    if args.moe_use_legacy_grouped_gemm:
        yield (
            "--moe-use-legacy-grouped-gemm stores the weights of experts transposed; start "
            "without this flag"
        )
    if args.use_legacy_models and args.num_experts:
        yield "--use-legacy-models has experts that are not saved; start without this flag"


def _states(args: argparse.Namespace) -> Iterator[str]:
    if args.optimizer not in _OPTIMIZERS:
        yield (
            f"--optimizer {args.optimizer} keeps states that are not saved; use one of "
            f"{', '.join(_OPTIMIZERS)}"
        )
    if args.use_precision_aware_optimizer:
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(args, name) not in _UNSCALED:
                yield (
                    f"--{name.replace('_', '-')} {getattr(args, name)} keeps states with scales, "
                    f"which are not saved; use {' or '.join(_UNSCALED)}"
                )


def _quantized(args: argparse.Namespace) -> Iterator[str]:
    """Yield the reasons why FP8 or FP4 weights cannot be made from their saved masters."""
    if (weights := _quantized_weights(args)) is None:
        return
    for name in ("no_save_optim", "no_load_optim", "finetune", "optimizer_cpu_offload"):
        if getattr(args, name):
            yield f"{weights} needs the masters of the optimizer; start without " + (
                f"--{name.replace('_', '-')}"
            )
    # With other recipes Megatron keeps the masters outside the precision-aware optimizer.
    if args.use_precision_aware_optimizer and args.fp8_recipe == "delayed":
        yield (
            f"{weights} needs masters outside of the optimizer's states; start without "
            "--use-precision-aware-optimizer"
        )


def _quantized_weights(args: argparse.Namespace) -> str | None:
    """Return the given flag that makes weights FP8 or FP4; None without one."""
    flags = ("fp8_param_gather", "fp4_param_gather")
    return next((f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag)), None)


def notes(args: argparse.Namespace) -> list[str]:
    """Return a line for each argument that the figures do not fully take into account."""
    lines = []
    if (weights := _quantized_weights(args)) is not None:
        lines.append(
            f"{weights}: FP8 and FP4 weights are not saved, only their masters, so a checkpoint is "
            "smaller, by at most 2 bytes per parameter"
        )
    if args.optimizer in ("muon", "dist_muon"):
        lines.append(
            f"--optimizer {args.optimizer}: keeps one state of matrices, not two, so a checkpoint "
            "is smaller, by at most 4 bytes per parameter"
        )
    if (instances := args.num_distributed_optimizer_instances) > 1:
        lines.append(
            f"--num-distributed-optimizer-instances {instances}: ranks of the first instance write "
            f"more than these figures, up to {instances} times as much, and the other ranks less"
        )
    return lines
