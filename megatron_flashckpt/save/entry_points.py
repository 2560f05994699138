"""Wrappers of Megatron's training functions that run the phases of `Startup` before the first step.

The phases run in the load, if there is one; else when Megatron has built model and optimizer, so
that agent and slab become ready while data loaders are built and in the slow first step. Scripts
that build both without Megatron's `setup_model_and_optimizer` run the phases in `train_step`.

The launcher installs the wrappers at once. If only imports were swapped, `watch_from_import` has a
function that Megatron calls first install them.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import ConfigError
from megatron_flashckpt.megatron_lm import stock
from megatron_flashckpt.megatron_lm.compat import exists, has_async_utils
from megatron_flashckpt.megatron_lm.job_flags import (
    captures_graphs,
    converts_format,
    left_to_megatron,
)
from megatron_flashckpt.megatron_lm.megatron_job import job_of
from megatron_flashckpt.memory import cuda
from megatron_flashckpt.save.copy_figures import timed_on_gpu
from megatron_flashckpt.save.session import session
from megatron_flashckpt.storage.opening import is_url, refuse_unusable
from megatron_flashckpt.tracing import LOOP, Recorder
from megatron_flashckpt.waits import waiting

#: Megatron's arguments that write files to `--save`, with the remedy if that is an object store.
_ARGUMENTS = {
    "log_progress": "leave out --log-progress",
    "enable_ft_package": "leave out --enable-ft-package",
    "save_wgrads_interval": "leave out --save-wgrads-interval",
    "save_dgrads_interval": "leave out --save-dgrads-interval",
}


def watch() -> None:
    """Replace the functions around the training loop, so that the phases run without a load."""
    if stock.is_replaced("training", "train_step"):
        return
    if (training := stock.loaded("training")) is None:
        return
    stock.replace("training", "train_step", train_step)
    replacements = setup_model_and_optimizer, save_checkpoint_and_time, checkpoint_and_decide_exit
    for replacement in replacements:
        if hasattr(training, replacement.__name__):
            stock.replace("training", replacement.__name__, replacement)


def watch_from_import() -> None:
    """Have Megatron call `watch` before it builds the model, if only imports were swapped.

    Called by the modules whose imports are swapped. Megatron's `training` module imports them while
    it is itself being imported. So its own functions cannot be replaced yet, but those that it has
    imported before can: `initialize_megatron` before `async_utils`. Releases without `async_utils`
    have only `update_num_microbatches` by then, which is called before every step.
    """
    training = stock.loaded("training")
    if training is None or hasattr(training, "train_step"):
        return
    is_old = not exists(f"{training.__package__}.async_utils")
    name = "update_num_microbatches" if is_old else "initialize_megatron"
    if hasattr(training, name) and not stock.is_replaced("training", name):
        stock.replace("training", name, functools.partial(_watch_and_call, name))


def _watch_and_call(name: str, *args: Any, **kwargs: Any) -> Any:
    watch()
    return stock.original("training", name)(*args, **kwargs)


def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
    """Call Megatron's own function; then prepare the first save, if a load has not done so.

    Raises:
        ConfigError: `--save` names no directory that can be used.
        UnsupportedError: as `Startup.prepare`.
    """
    session.begin_attempt()
    margs = stock.get_args()
    if saves(margs):
        refuse_unusable(margs.save)  # now, because a large model takes minutes
        if is_url(margs.save):
            refuse_local_files(margs, session.config)
    built = stock.original("training", "setup_model_and_optimizer")(*args, **kwargs)
    if saves(margs) and margs.train_iters and not getattr(margs, "skip_train", False):
        model, optimizer, _ = built
        session.startup(margs.save).prepare(job_of(margs, model, optimizer))
    return built


def refuse_local_files(args: Any, config: Config) -> None:
    """Raise if anything would write files to `args.save`, which is a URL.

    As a path, a URL is a directory on a local disk of each node.

    Raises:
        ConfigError: names all of these settings, and how to do without them.
    """
    remedies = [remedy for name, remedy in _ARGUMENTS.items() if getattr(args, name, None)]
    if getattr(args, "wandb_project", None) and not getattr(args, "wandb_save_dir", None):
        remedies.append("give --wandb-save-dir")
    if config.agent.log_in_save_directory:
        remedies.append("set 'agent.log_in_save_directory: false'")
    if config.trace.directory and not os.path.isabs(config.trace.directory):
        remedies.append("give 'trace.directory' as an absolute path")
    if remedies:
        raise ConfigError(
            f"{args.save}: an object store takes no other files; {', '.join(remedies)}"
        )


def save_checkpoint_and_time(*args: Any, **kwargs: Any) -> Any:
    """Call Megatron's own function and measure how long the training loop waits for it.

    Megatron stops timers before and after its `save_checkpoint`. Each stop synchronizes the GPU
    and, until core 0.19, all ranks; training waits.

    Before a save, core 0.17 returns all cached GPU memory to the driver, for the worker process of
    its own asynchronous saves. A save of this package takes no GPU memory, so the cache stays:
    otherwise the next step has to allocate it again.
    """
    margs = stock.get_args()
    is_ours = saves(margs) and not converts_format(margs)
    keeping_cache = cuda.cache_kept() if is_ours else contextlib.nullcontext()
    recorder = Recorder(LOOP)
    with recorder.recording(), recorder.phase(LOOP), timed_on_gpu(recorder), keeping_cache:
        return stock.original("training", "save_checkpoint_and_time")(*args, **kwargs)


def train_step(*args: Any, **kwargs: Any) -> Any:
    """Call Megatron's own `train_step`; be prepared before the first step, dry-run a save after it.

    In releases whose loop never polls the results of saves, poll them before every step.

    Raises:
        UnsupportedError: as `Startup.prepare`; or the first step made state that cannot be saved.
        SaveFailedError: as `maybe_finalize_async_save`, in releases without that function.
    """
    step = stock.original("training", "train_step")
    margs = stock.get_args()
    if not _polls_every_iteration():
        session.finalize(blocking=False)
    if margs.save in session.ready or not saves(margs):
        return step(*args, **kwargs)
    arguments = stock.bind(step, args, kwargs)
    startup = session.startup(margs.save)
    scheduler = arguments.get("opt_param_scheduler")
    job = job_of(margs, arguments["model"], arguments["optimizer"], scheduler)
    startup.prepare(job)
    if captures_graphs(margs):
        # CUDA calls of other threads can break a graph capture; those of the copy thread cannot.
        # So page-locking and the creation of streams must end before the first capture.
        startup.checkpointer.link.wait_for_device_work()
    result = step(*args, **kwargs)
    if startup.dry_run(job):
        session.ready.add(margs.save)
    return result


def checkpoint_and_decide_exit(*args: Any, **kwargs: Any) -> Any:
    """Save what `flashckpt save-now` wants; then call Megatron's own function.

    Ranks may have heard of the request or not, so nothing here may wait for another rank: not
    Megatron's timers around a save, nor its gather of weights, nor a wait for the commit.
    """
    decide = stock.original("training", "checkpoint_and_decide_exit")
    margs = stock.get_args()
    if saves(margs) and _saves_alone(margs):
        iteration = stock.argument(decide, "iteration", args, kwargs)
        if session.save_requested(margs.save, iteration):
            named = stock.bind(decide, args, kwargs)
            taken = ("iteration", "model", "optimizer", "opt_param_scheduler")
            more = ("num_floating_point_operations_so_far", "checkpointing_context")
            iterator = {"train_data_iterator": named["train_data_iterator"]}
            with waiting("none"):
                stock.stock_module("training").save_checkpoint(
                    *(named[name] for name in (*taken, *more)), **iterator
                )
    return decide(*args, **kwargs)


def _saves_alone(margs: Any) -> bool:
    """Return whether a rank saves without other ranks, so that one of them may be missing."""
    others = ("overlap_param_gather", "dataloader_save")
    return not any(getattr(margs, name, None) for name in others)


def saves(margs: Any) -> bool:
    """Return whether this package saves the job's checkpoints."""
    return margs.save in session.ready or (bool(margs.save) and not left_to_megatron(margs))


@functools.cache
def _polls_every_iteration() -> bool:
    """Return whether Megatron's loop calls `maybe_finalize_async_save` in every iteration."""
    return has_async_utils()
