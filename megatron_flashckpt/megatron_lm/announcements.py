"""Log lines and hooks of stock Megatron around a save and a load.

These are log lines in Megatron's wording (users scrape them), one_logger, wandb, TensorBoard,
fault-tolerance hooks and the progress log. A hook is called if this Megatron release has it.
Megatron's barriers are omitted, because a save does not wait for other ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import torch

from megatron_flashckpt.collectives import this_rank, world_size
from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.file_format.file_names import RELEASE, TRACKER, iteration_dir
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.compat import feature, takes
from megatron_flashckpt.megatron_lm.job_flags import why_left
from megatron_flashckpt.megatron_lm.stock import checkpointing, original, stock_module
from megatron_flashckpt.metrics import report_metric

FORMAT = "flashckpt"


def _now() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")


def _is_last_rank() -> bool:
    return this_rank() == world_size() - 1


def _place() -> str:
    """Return this rank's place in tensor and pipeline parallelism, as Megatron writes it."""
    place, (tensor, pipeline, _) = parallel.coordinates(), parallel.model_sizes()
    return f"[ t {place.tp + 1}/{tensor}, p {place.pp + 1}/{pipeline} ]"


@dataclasses.dataclass(frozen=True)
class AnnouncedSave:
    """Data of a save that `announce_committed` needs."""

    iteration: int
    root: str
    productive_metrics: Any
    first_rank: bool
    last_rank: bool
    place: str


def ask_for_memory_saves(args: Any, interval: int | None) -> None:
    """Make Megatron's training loop save to memory only every `interval` iterations.

    The loop reads the argument in every iteration. If no ordinary save is due, the loop calls
    `save_checkpoint` with `non_persistent_ckpt`.

    Raises:
        UnsupportedError: the loop of this release has no such argument.
    """
    if interval is None:
        return
    if not hasattr(args, "non_persistent_save_interval"):
        raise UnsupportedError(
            f"memory_interval: {interval} is set, but this Megatron-LM has no "
            "--non-persistent-save-interval (core 0.10 was the first): unset memory_interval, or "
            "train with a newer release"
        )
    given = args.non_persistent_save_interval
    if given:
        message = f"--non-persistent-save-interval {given} overrides memory_interval {interval}"
    else:
        args.non_persistent_save_interval = interval
        message = f"memory_interval {interval}: as with --non-persistent-save-interval {interval}"
    checkpointing().print_rank_0(f"  flashckpt: {message}; these saves stay in host memory")


@functools.cache
def announce_left_to_megatron(flag: str) -> None:
    """Log once that Megatron's own functions save and load in this job."""
    checkpointing().print_rank_0(
        f"  flashckpt: with {flag} {why_left(flag)}: Megatron's own functions save and load this "
        "job; they read Megatron's own formats only"
    )


@contextlib.contextmanager
def save_hooks() -> Iterator[None]:
    """Report to the fault-tolerance monitor, if there is one, that checkpointing is in progress."""
    monitor = feature("ft_integration")
    if monitor is None:
        yield
        return
    monitor.on_checkpointing_start()
    try:
        yield
    finally:
        monitor.on_checkpointing_end(is_async_finalization=False)


def announce_save(
    args: Any, iteration: int, root: str, *, memory_only: bool, pending: bool
) -> AnnouncedSave:
    """Log that a save begins; return the data that `announce_committed` needs.

    Args:
        pending: whether an earlier save is not committed yet.
    """
    stock = checkpointing()
    asynchronous = getattr(args, "async_save", None)
    if asynchronous and pending:
        stock.print_rank_0(
            "WARNING: Starting a checkpoint save before previous has finished. Consider increasing "
            "the checkpoint interval."
        )
    start = feature("on_save_checkpoint_start")
    metrics = start(asynchronous) if start is not None else None
    stock.print_rank_0(
        f"[{_now()}] saving checkpoint at iteration {iteration:7d} to "
        f"{'host memory' if memory_only else root} in {FORMAT} format"
    )
    return AnnouncedSave(iteration, root, metrics, this_rank() == 0, _is_last_rank(), _place())


def announce_staged(args: Any, save: AnnouncedSave) -> None:
    """Log Megatron's line for a save that is committed while training continues."""
    if getattr(args, "async_save", None):
        checkpointing().print_rank_0(
            f"  [{_now()}] scheduled an async checkpoint save at iteration {save.iteration:7d} to "
            f"{save.root}"
        )


def announce_drain(args: Any) -> None:
    """Log that the process waits for saves that are not committed yet."""
    if getattr(args, "async_save", None):
        checkpointing().print_rank_0(
            "Unfinalized async checkpoint saves. Finalizing them synchronously now."
        )


def saves_after_training(args: Any, iteration: int) -> bool:
    """Return whether Megatron's `pretrain` saves `iteration` after its loop has ended."""
    interval = getattr(args, "save_interval", None)
    is_last = iteration == getattr(args, "train_iters", None)
    is_trained = not getattr(args, "skip_train", False)
    return is_last and is_trained and bool(interval and iteration % interval)


def announce_committed(args: Any, save: AnnouncedSave) -> None:
    """Log that the save is committed, and do what else Megatron's finalizers do.

    No communication.
    Also called while the process exits; the process group may be destroyed by then.
    """
    if save.first_rank:
        print(
            f"  [{_now()}] successfully saved checkpoint from iteration {save.iteration:7d} to "
            f"{save.root} {save.place}",
            flush=True,
        )
        compact = feature("_maybe_compact_rollout_bank")
        if compact is not None and getattr(args, "rl_durable_rollout_bank", False):
            compact(save.iteration)
    log = feature("append_to_progress_log")
    if (
        log is not None
        and getattr(args, "log_progress", False)
        # Without --async-save Megatron's loop has written "Saved checkpoint" already.
        and getattr(args, "async_save", None)
        and torch.distributed.is_initialized()
    ):
        # Since core 0.18 the directory comes first.
        place = (args.save,) if takes(log, "save_dir") else ()
        log(*place, f"Saved async checkpoint\tIteration: {save.iteration}", barrier=False)
    if not save.last_rank:
        return
    success = feature("on_save_checkpoint_success")
    if success is not None:
        success(save.productive_metrics, getattr(args, "async_save", None))
    wandb = feature("wandb_utils")
    if wandb is not None and not _wandb_is_over():
        wandb.on_save_checkpoint_success(
            f"{save.root}/{iteration_dir(save.iteration)}",
            f"{save.root}/{TRACKER}",
            save.root,
            save.iteration,
        )


def evaluate_and_report(*args: Any, **kwargs: Any) -> Any:
    """Run Megatron's own `evaluate` and report its losses as metrics of the next checkpoint.

    A loss is named as in TensorBoard, e.g. `lm loss validation`. Only the last pipeline stage knows
    the loss, which is enough. With several validation sets the current set is unknown, so no loss
    is reported.
    """
    result = original("training", "evaluate")(*args, **kwargs)
    losses = result[0]  # None if the time limit was reached
    if losses and not getattr(checkpointing().get_args(), "multiple_validation_sets", False):
        for name, loss in losses.items():
            report_metric(f"{name} validation", loss)
    return result


def announce_loading(args: Any, root: str | None, iteration: int) -> None:
    """Log which checkpoint is loaded, in Megatron's words for the requested format."""
    kind = "distributed " if getattr(args, "use_dist_ckpt", False) else ""
    if iteration == RELEASE:
        checkpointing().print_rank_0(f" loading release {kind}checkpoint from {root}")
        return
    checkpointing().print_rank_0(f" loading {kind}checkpoint from {root} at iteration {iteration}")


def announce_loaded(root: str, iteration: int, origin: tuple[int, str], summary: str) -> None:
    """Log the loaded iteration and its source, as Megatron does after a load.

    Args:
        iteration: the iteration from which training continues; 0 for fine-tuning.
        origin: the loaded iteration and its source (`memory` or `storage`).
        summary: bytes and time of the load, as text.
    """
    stock = checkpointing()
    loaded, source = origin
    stock.print_rank_0(
        f"  successfully loaded checkpoint from {root} {_place()} at iteration {iteration}"
    )
    stock.print_rank_0(f"  flashckpt: iteration {loaded} was restored from {source}: {summary}")
    wandb = feature("wandb_utils")
    if wandb is not None and _is_last_rank():
        wandb.on_load_checkpoint_success(f"{root}/{iteration_dir(loaded)}", root)
    monitor = feature("ft_integration")
    if monitor is not None and iteration > 0:
        monitor.on_checkpoint_loaded(is_local_chkpt=source == "memory")


def write_scalars(scalars: dict[str, float], iteration: int) -> None:
    """Write scalars of `iteration` to Megatron's metric writers, on the rank that has a writer.

    The last rank has one if the job was started with `--tensorboard-dir` or `--wandb-project`.
    """
    if (tensorboard := _writer("get_tensorboard_writer")) is not None:
        for name, value in scalars.items():
            tensorboard.add_scalar(name, value, iteration)
        tensorboard.flush()
    if not _wandb_is_over() and (wandb := _writer("get_wandb_writer")) is not None:
        # Weights & Biases drops steps before the newest one, and training has continued since
        # the save. `curr_iteration` counts from 0 and may have been logged already, hence + 1.
        current = getattr(checkpointing().get_args(), "curr_iteration", None)
        wandb.log(scalars, max(iteration, 0 if current is None else current + 1))


def _wandb_is_over() -> bool:
    """Return whether Megatron's run of Weights & Biases has ended.

    Megatron ends the run before it waits for the last save, so the last save is not logged there.
    """
    wandb = _writer("get_wandb_writer")
    return wandb is not None and getattr(wandb, "run", None) is None


def _writer(getter: str) -> Any:
    """Return a writer; None on ranks without one and in releases without `getter`."""
    return getattr(stock_module("global_vars"), getter, lambda: None)()
