"""The load of a job of Megatron's own training loop: Megatron's args as data, and back.

`resume.load` knows no args. Here they become a `LoadPolicy`, and what the checkpoint says of args,
counters, the rerun machine and the scheduler's overrides is set in Megatron's order.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from typing import Any

from megatron_flashckpt.load import resume, training_state
from megatron_flashckpt.load.load_policy import LoadPolicy
from megatron_flashckpt.load.loader import LoadedCheckpoint
from megatron_flashckpt.megatron_lm import announcements, stock
from megatron_flashckpt.megatron_lm.compat import (
    feature,
    is_known_to_msc_alone,
    keeps_given_rates,
    loads_itself,
    takes,
)
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.megatron_lm.megatron_job import job_of
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.side_state import COMMON_STATE, MEGATRON_STATE, is_rerun
from megatron_flashckpt.megatron_lm.stock import checkpointing
from megatron_flashckpt.megatron_lm.vocabulary import least_words
from megatron_flashckpt.save.session import session

#: Values of --dist-ckpt-strictness with which Megatron, too, continues in spite of differences.
_LENIENT = ("log_unexpected", "log_all", "ignore_all")


def load(call: stock.LoadCall, margs: Any) -> tuple[int, Any] | None:
    """Load a checkpoint of this package; return None if Megatron's own function must load.

    All ranks call this together.

    Returns:
        `(iteration, floating point operations so far)`, as Megatron's own function; or None if the
        directory holds no checkpoint, or one in Megatron's own formats, or only Megatron's own
        client for storage knows it.
    """
    load_dir = getattr(margs, call.load_arg)
    if is_known_to_msc_alone(margs, load_dir):
        return None
    saves = session.checkpointer(margs.save) if margs.save else None
    is_concerned = saves is not None and session.startup(margs.save).concerns(call.optimizer)
    apply = _Apply(
        margs,
        job_of(margs, call.model, call.optimizer, call.scheduler),
        saves.model_state if saves and is_concerned else ModelState(session.config.replicated),
    )
    resumes = call.optimizer is not None and _saves_where_it_loads(margs, load_dir)
    result = resume.load(
        resume.LoadCall(
            job=apply.job,
            directory=load_dir,
            policy=_policy(call, margs),
            config=session.config,
            model_state=apply.model_state,
            saves=saves,
            resumes=resumes,
            announce=lambda root, step: announcements.announce_loading(margs, root, step),
            apply=apply,
        )
    )
    margs.finetune = result.policy.weights_only
    loaded = result.loaded
    if loaded is None:
        return None
    origin = loaded.origin
    if resumes and apply.job.trains and origin.source == "storage":
        session.resumed(margs.save, origin.iteration)
    assert result.directory is not None
    announcements.announce_loaded(
        result.directory,
        apply.iteration,
        (origin.iteration, origin.source),
        resume.summary(loaded),
    )
    return apply.iteration, loaded.side.common.get("num_floating_point_operations_so_far", 0)


def _policy(call: stock.LoadCall, margs: Any) -> LoadPolicy:
    strictness = getattr(margs, "dist_ckpt_strictness", None)
    step = getattr(margs, "ckpt_step", None)
    minutes = getattr(margs, "distributed_timeout_minutes", None)
    return LoadPolicy(
        step=int(step) if step else None,
        weights_only=bool(margs.finetune),
        wants_optimizer=not margs.no_load_optim,
        wants_rng=not margs.no_load_rng,
        strict=call.strict and strictness not in _LENIENT,
        keeps_all_weights=strictness == "raise_all",
        words=least_words(margs),
        fill=not call.skip_model_and_optimizer,
        needs=COMMON_STATE if margs.finetune else MEGATRON_STATE,
        caller_loads=functools.partial(loads_itself, margs),
        uses_checkpoint_args=bool(getattr(margs, "use_checkpoint_args", False)),
        pretrained=getattr(margs, "pretrained_checkpoint", None),
        timeout_s=None if minutes is None else 60.0 * minutes,
    )


def _saves_where_it_loads(margs: Any, load_dir: str | None) -> bool:
    """Return whether the job loads from its save directory, so that both share one history."""
    if not margs.save or not load_dir:
        return False
    return bool(os.path.realpath(margs.save) == os.path.realpath(load_dir))


@dataclasses.dataclass
class _Apply:
    """Sets all state outside of tensors, in the order of Megatron's own load."""

    margs: Any
    job: JobState
    model_state: ModelState
    iteration: int = 0
    """The iteration from which training resumes."""

    def __call__(self, loaded: LoadedCheckpoint, policy: LoadPolicy) -> None:
        margs, common, module = self.margs, loaded.side.common, checkpointing()
        module.set_checkpoint_version(common["checkpoint_version"])
        set_loaded_iteration = feature("set_loaded_iteration")
        if set_loaded_iteration is not None:
            set_loaded_iteration(loaded.origin.iteration)
        if policy.weights_only:
            module.print_rank_0("could not find arguments in the checkpoint ...")
        else:
            _check_and_take_args(margs, common["args"])
        module.print_rank_0(f" checkpoint version {common['checkpoint_version']}")
        for change in training_state.apply(self.job, policy, self.model_state, loaded):
            module.print_rank_0(f"  flashckpt: {change}, as the checkpoint says")
        if training_state.takes_weights_only(policy, loaded):
            return
        overrides = getattr(margs, "override_opt_param_scheduler", False) and keeps_given_rates()
        has_both = self.job.optimizer is not None and self.job.scheduler is not None
        is_loaded = policy.wants_optimizer and common["opt_param_scheduler"] is not None
        if overrides and has_both and is_loaded:
            _take_given_rates(margs, self.job.optimizer, self.job.scheduler)
        _restore_rerun_state(margs, common["args"], loaded.side.rank_state)
        training_state.apply_random_state(policy, loaded)
        target: int | None = getattr(margs, "override_ckpt_iteration", None)
        self.iteration = int(common["iteration"] if target is None else target)


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


def _restore_rerun_state(margs: Any, saved: Any, state: dict[str, Any] | None) -> None:
    """Set the state of the rerun machine, by Megatron's rules for a changed world."""
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
    if get_machine is not None and same_world and is_rerun(get_machine(), state["rerun"]):
        try:
            get_machine().load_state_dict(state["rerun"])
        except Exception as error:  # another release may have saved the state; as stock does
            checkpointing().print_rank_0(
                f"Unable to restore RerunMachine from checkpoint: {error}. Skipping."
            )
