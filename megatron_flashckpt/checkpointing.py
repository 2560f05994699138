"""SHIM: the names of `megatron.training.checkpointing`.

Swap the imports in `megatron/training/training.py`:

    from megatron_flashckpt.checkpointing import load_checkpoint
    from megatron_flashckpt.checkpointing import save_checkpoint

All other names are those of Megatron's own module, so imports such as `from
megatron_flashckpt.checkpointing import checkpoint_exists` also work.
"""

from __future__ import annotations

from typing import Any

from megatron_flashckpt.load import megatron_load
from megatron_flashckpt.megatron_lm import announcements, side_state
from megatron_flashckpt.megatron_lm.compat import feature, has_async_utils
from megatron_flashckpt.megatron_lm.job_flags import (
    converts_format,
    left_to_megatron,
)
from megatron_flashckpt.megatron_lm.megatron_job import job_of
from megatron_flashckpt.megatron_lm.stock import (
    LoadCall,
    SaveCall,
    checkpointing,
    get_args,
    original,
)
from megatron_flashckpt.save import entry_points, equal_settings
from megatron_flashckpt.save.request import SaveRequest
from megatron_flashckpt.save.session import session
from megatron_flashckpt.waits import wait_of


def save_checkpoint(*args: Any, **kwargs: Any) -> None:
    """Stage a checkpoint of this rank; takes the arguments of Megatron's own `save_checkpoint`.

    All ranks call it, without a collective. It returns when training may continue, or later if the
    setting `wait` or `megatron_flashckpt.waiting` demands that. The agent makes the checkpoint
    durable, and `maybe_finalize_async_save` reports it. A non-persistent checkpoint stays in host
    memory, for any `--non-persistent-ckpt-type`.

    This function is the start of a save: Megatron's own actions around a save, and
    `Checkpointer.save`.

    Raises:
        SaveFailedError: the call waited for a durable save that failed, and `on_failure`,
            `failures_in_a_row` or `stop_on_failed_first_save` stops training.
        UnsupportedError: the job uses a feature that this release does not save.
        TypeError: Megatron's own function has no such argument.
    """
    call = SaveCall.of(args, kwargs)
    margs = get_args()
    if _is_saved_by_megatron(call, margs):
        original("checkpointing", "save_checkpoint")(*args, **kwargs)
        return
    checkpointer = session.checkpointer(margs.save)
    announced = announcements.announce_save(
        margs,
        call.iteration,
        margs.save,
        memory_only=call.non_persistent,
        pending=checkpointer.pending,
    )
    with announcements.save_hooks():
        request = _request(call, margs)
        session.startup(margs.save).check_alone(request.job)
        _save_dataloader(call, margs)
        report = checkpointer.save(request)
        session.saved(margs.save, announced, report)
        if report.copies is not None and not call.non_persistent:
            announcements.announce_staged(margs, announced)
        if request.must_wait:
            session.finalize(blocking=True, announces=False)


def _is_saved_by_megatron(call: SaveCall, margs: Any) -> bool:
    """Return whether Megatron's own function makes this save."""
    if _left_to_megatron(margs):
        return True
    if not has_async_utils():
        # Without `maybe_finalize_async_save`, each save reports the results of earlier ones.
        session.finalize(blocking=False)
    # A release checkpoint is made once, by hand, and is best kept in Megatron's own format.
    # `--ckpt-convert-format` demands one of Megatron's own formats.
    return call.release or converts_format(margs)


def _request(call: SaveCall, margs: Any) -> SaveRequest:
    """Return the request: the state to save, and the wait of training."""
    job = job_of(margs, call.model, call.optimizer, call.scheduler, call.floating_point_operations)
    wait = wait_of(session.config.wait)
    until_durable = wait == "durable" and not call.non_persistent
    # Without an optimizer, no step would wait for the copies.
    must_copy = call.optimizer is None or job.outside_steps is not None
    return SaveRequest(
        iteration=call.iteration,
        job=job,
        rerun=side_state.rerun_state(call.data_iterator),
        memory_only=call.non_persistent,
        blocking=wait == "staged" or must_copy,
        must_wait=until_durable,
    )


def _save_dataloader(call: SaveCall, margs: Any) -> None:
    """Call Megatron's function that saves the data loader's state, if this release has it."""
    save = feature("maybe_save_dataloader_state")
    if save is not None:
        save(call.data_iterator, call.iteration, getattr(margs, "dataloader_save", None))


def _left_to_megatron(margs: Any) -> bool:
    flag = left_to_megatron(margs)
    if flag is not None:
        announcements.announce_left_to_megatron(flag)
    return flag is not None


def load_checkpoint(*args: Any, **kwargs: Any) -> tuple[int, Any]:
    """Fill model, optimizer and side state; takes the arguments of Megatron's `load_checkpoint`.

    All ranks call it together. It loads the newest checkpoint that all ranks still have in host
    memory; else the one in storage that Megatron's tracker (or `--ckpt-step`) names. If that is
    damaged and `damaged` is `fall_back`, it loads the newest older one that is intact. Megatron's
    own loader reads directories in Megatron's own formats.

    A load without an optimizer, such as that of a reference model in a running job, reads storage
    only. Training does not continue from it, so memory and saves of the job stay as they are.

    Returns:
        `(iteration, floating point operations so far)`; `(0, 0)` if there is nothing to load.

    Raises:
        FlashCkptError: on every rank, with the same class; no file was changed.
    """
    call = LoadCall.of(args, kwargs)
    margs = get_args()
    if call.optimizer is not None:
        session.begin_attempt()
    # A job may load right after a save; only the optimizer's step waits for copies by itself.
    session.wait_copied()
    if _left_to_megatron(margs):
        left: tuple[int, Any] = original("checkpointing", "load_checkpoint")(*args, **kwargs)
        return left
    startup = session.startup(margs.save) if margs.save and not converts_format(margs) else None
    if startup is not None and startup.concerns(call.optimizer):
        # Refuse before the load a job that could not be saved later.
        startup.check(job_of(margs, call.model, call.optimizer))
    else:
        equal_settings.check(session.config)
    loaded = megatron_load.load(call, margs)
    if loaded is None:
        loaded = original("checkpointing", "load_checkpoint")(*args, **kwargs)
    if startup is not None and startup.concerns(call.optimizer):
        startup.prepare(job_of(margs, call.model, call.optimizer))
    return loaded


def __getattr__(name: str) -> Any:
    return getattr(checkpointing(), name)


entry_points.watch_from_import()
