"""Megatron's own writers of curves: TensorBoard, Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_flashckpt.megatron_lm.stock import checkpointing, stock_module


def write_scalars(scalars: Callable[[], dict[str, float]], iteration: int) -> None:
    """Write scalars beside Megatron's own of `iteration`, on the rank that has a writer.

    That is the last one, if the job was started with `--tensorboard-dir` or `--wandb-project`.

    Args:
        scalars: called only if there is a writer.
    """
    tensorboard = _writer("get_tensorboard_writer")
    wandb = None if wandb_is_over() else _writer("get_wandb_writer")
    if tensorboard is None and wandb is None:
        return
    found = scalars()
    if tensorboard is not None:
        for name, value in found.items():
            tensorboard.add_scalar(name, value, iteration)
        tensorboard.flush()
    if wandb is not None:
        # Steps behind the newest one are dropped there, and training has gone on meanwhile. The
        # loop counts an iteration that it has logged already as its current one, from 0.
        current = getattr(checkpointing().get_args(), "curr_iteration", None)
        wandb.log(found, max(iteration, 0 if current is None else current + 1))


def wandb_is_over() -> bool:
    """Return whether Megatron's run of Weights & Biases has ended.

    Megatron ends it before it waits for the last save, of which nothing can be said there.
    """
    wandb = _writer("get_wandb_writer")
    return wandb is not None and getattr(wandb, "run", None) is None


def _writer(getter: str) -> Any:
    """Return a writer; None on other ranks, and in releases that do not have it."""
    return getattr(stock_module("global_vars"), getter, lambda: None)()
