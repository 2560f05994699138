"""The state that Megatron's own load sets in addition to tensors, set in Megatron's order.

This state comprises arguments, counters, param groups, the scheduler, extra states of modules, the
rerun machine and the random generators.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron_flashckpt.load.loader import LoadedCheckpoint
from megatron_flashckpt.megatron_lm import side_state
from megatron_flashckpt.megatron_lm.compat import feature, keeps_given_rates, takes
from megatron_flashckpt.megatron_lm.hyper_parameters import load_hyper_parameters
from megatron_flashckpt.megatron_lm.model_geometry import ModelGeometry
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.requantization import fill_from_masters
from megatron_flashckpt.megatron_lm.stock import LoadCall, checkpointing, unwrap


def apply(call: LoadCall, margs: Any, model_state: ModelState, loaded: LoadedCheckpoint) -> int:
    """Set the state of the job from `loaded`; return the iteration from which training resumes.

    All ranks call this after their tensors are filled.

    Raises:
        UnsupportedError, MissingStateError: on this rank, if a random state cannot be restored.
    """
    stock = checkpointing()
    common, side = loaded.side.common, loaded.side
    stock.set_checkpoint_version(common["checkpoint_version"])
    set_loaded_iteration = feature("set_loaded_iteration")
    if set_loaded_iteration is not None:
        set_loaded_iteration(loaded.origin.iteration)
    if margs.finetune:
        stock.print_rank_0("could not find arguments in the checkpoint ...")
    else:
        _check_and_take_args(margs, common["args"])
    stock.print_rank_0(f" checkpoint version {common['checkpoint_version']}")
    chunks = unwrap(call.model)
    weights_alone = margs.finetune or loaded.origin.is_release
    if weights_alone or margs.no_load_optim:
        _renew_masters(margs, call.optimizer)
    else:
        _apply_to_optimizer(call, margs, loaded, model_state.geometry(chunks))
    side_state.load_extra_states(chunks, model_state.geometry(chunks), side.objects)
    # Fill after the extra states, which hold the scales of delayed scaling.
    if not call.skip_model_and_optimizer and model_state.geometry(chunks).quantized:
        fill_from_masters(call.model, call.optimizer)
    if weights_alone:
        return 0
    _apply_rank_state(margs, common["args"], side.rank_state)
    target: int | None = getattr(margs, "override_ckpt_iteration", None)
    return int(common["iteration"] if target is None else target)


def _check_and_take_args(margs: Any, saved: Any) -> None:
    stock = checkpointing()
    stock.check_checkpoint_args(_as_of_this_layout(saved, margs))
    margs.consumed_train_samples = getattr(saved, "consumed_train_samples", 0)
    margs.skipped_train_samples = getattr(saved, "skipped_train_samples", 0)
    if (target := getattr(margs, "override_ckpt_iteration", None)) is not None:
        _rewind(margs, saved, target)
    update = stock.update_num_microbatches
    # The function can log its changes since core 0.9.
    verbose = {"verbose": True} if takes(update, "verbose") else {}
    update(consumed_samples=margs.consumed_train_samples, **verbose)
    margs.consumed_valid_samples = getattr(saved, "consumed_valid_samples", 0)


def _rewind(margs: Any, saved: Any, target: int) -> None:
    """Set the data's position to that of iteration `target` (--override-ckpt-iteration)."""
    print_rank_0 = checkpointing().print_rank_0
    margs.consumed_train_samples = target * margs.global_batch_size
    margs.skipped_train_samples = 0
    print_rank_0(
        f"--override-ckpt-iteration: start at iteration {target} "
        f"(consumed_train_samples {margs.consumed_train_samples})"
    )
    saved_size = getattr(saved, "global_batch_size", margs.global_batch_size)
    if saved_size != margs.global_batch_size:
        print_rank_0(
            f"WARNING: --override-ckpt-iteration counts {margs.global_batch_size} samples per "
            f"iteration, but the checkpoint was saved at --global-batch-size {saved_size}: the "
            "data may start at another sample"
        )


def _as_of_this_layout(saved: Any, margs: Any) -> Any:
    """Return the checkpoint's args with this job's values of the args that may differ.

    Megatron's own check then accepts them.
    """
    adapted = copy.copy(saved)
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "padded_vocab_size",
    ):
        setattr(adapted, name, getattr(margs, name, None))
    return adapted


def _renew_masters(margs: Any, optimizer: Any) -> None:
    """Create new masters from the loaded weights, if no optimizer state is loaded."""
    if (margs.fp16 or margs.bf16) and optimizer is not None:
        optimizer.reload_model_params()


def _apply_to_optimizer(
    call: LoadCall, margs: Any, loaded: LoadedCheckpoint, geometry: ModelGeometry
) -> None:
    """Set param groups and scheduler."""
    optimizer = call.optimizer
    if optimizer is not None:
        for change in load_hyper_parameters(optimizer, loaded.side.param_groups, geometry):
            checkpointing().print_rank_0(f"  flashckpt: {change}, as the checkpoint says")
    scheduler_state = loaded.side.common["opt_param_scheduler"]
    if call.scheduler is not None and scheduler_state is not None:
        call.scheduler.load_state_dict(scheduler_state)
        overrides = getattr(margs, "override_opt_param_scheduler", False)
        if overrides and optimizer is not None and keeps_given_rates():
            _take_given_rates(margs, optimizer, call.scheduler)


def _take_given_rates(margs: Any, optimizer: Any, scheduler: Any) -> None:
    """Replace the checkpoint's rates by this job's, as Megatron's own load does."""
    for group in optimizer.param_groups:
        prefix = "decoupled_" if group.get("is_decoupled_lr", False) else ""
        for bound in ("max_lr", "min_lr"):
            given = getattr(margs, f"{prefix}{bound.removeprefix('max_')}", None)
            if given is not None:
                group[bound] = given
    scheduler.num_steps = margs.consumed_train_samples
    scheduler.step(increment=0)
    checkpointing().print_rank_0(
        " > restored optimizer param_group max_lr/min_lr from runtime config because "
        "--override-opt-param-scheduler is set"
    )


def _apply_rank_state(margs: Any, saved: Any, state: dict[str, Any] | None) -> None:
    """Set rerun state and random generators, by Megatron's rules for a changed world."""
    same_world = all(
        getattr(saved, name, None) == getattr(margs, name, None)
        for name in ("world_size", "data_parallel_size")
    )
    if state is None:
        checkpointing().print_rank_0(
            "tensor or pipeline parallel size differs from the checkpoint's: RNG state and rerun "
            "state are ignored"
        )
        return
    if not same_world:
        checkpointing().print_rank_0("job sharding has changed: rerun state is ignored")
    get_machine = feature("get_rerun_state_machine")
    if get_machine is not None and same_world and _is_rerun(get_machine(), state["rerun"]):
        try:
            get_machine().load_state_dict(state["rerun"])
        except Exception as error:  # another release may have saved the state; as stock does
            checkpointing().print_rank_0(
                f"Unable to restore RerunMachine from checkpoint: {error}. Skipping."
            )
    # Random state last: nothing after it may draw from the generators.
    if not margs.no_load_rng and state["rng"] is not None:
        side_state.load_rng_state(state["rng"])


def _is_rerun(machine: Any, state: Any) -> bool:
    """Return whether `state` comes from a machine that ran; before core 0.11: if there is one."""
    validate = getattr(machine, "validate_state_dict", None)
    return state is not None if validate is None else bool(validate(state))
