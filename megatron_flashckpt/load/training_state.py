"""The state outside of tensors that every load sets: param groups, scheduler, modules, generators.

Megatron's args and counters, which only its own loop has, are set by `megatron_load`.
"""

from __future__ import annotations

from megatron_flashckpt.load.load_policy import LoadPolicy
from megatron_flashckpt.load.loader import LoadedCheckpoint
from megatron_flashckpt.megatron_lm import side_state
from megatron_flashckpt.megatron_lm.hyper_parameters import load_hyper_parameters
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.quantized import fill_from_masters


def takes_weights_only(policy: LoadPolicy, loaded: LoadedCheckpoint) -> bool:
    """Return whether a new training begins with the weights of `loaded`."""
    return policy.weights_only or loaded.origin.is_release


def apply(
    job: JobState, policy: LoadPolicy, model_state: ModelState, loaded: LoadedCheckpoint
) -> list[str]:
    """Set the state of model, optimizer and scheduler from `loaded`.

    All ranks call this after their tensors are filled; `apply_random_state` comes last.

    Returns:
        One line per setting of the optimizer that the checkpoint has changed.
    """
    optimizer, changes = job.optimizer, []
    geometry = model_state.geometry(job.chunks)
    if takes_weights_only(policy, loaded) or not policy.wants_optimizer:
        if optimizer is not None:
            optimizer.reload_model_params()  # makes new masters, if the weights are not fp32
    else:
        if optimizer is not None:
            changes = load_hyper_parameters(optimizer, loaded.side.param_groups, geometry)
        scheduler_state = loaded.side.common["opt_param_scheduler"]
        if job.scheduler is not None and scheduler_state is not None:
            job.scheduler.load_state_dict(scheduler_state)
    side_state.load_extra_states(job.chunks, geometry, loaded.side.objects)
    # Fill after the extra states, which hold the scales of delayed scaling.
    if policy.fill and geometry.quantized:
        fill_from_masters(job.wrapped, optimizer)
    return changes


def apply_random_state(policy: LoadPolicy, loaded: LoadedCheckpoint) -> None:
    """Set this rank's random generators. The last step: nothing after it may draw from them.

    Raises:
        UnsupportedError, MissingStateError: a random state cannot be restored.
    """
    state = loaded.side.rank_state
    if policy.wants_rng and state is not None and state["rng"] is not None:
        side_state.load_rng_state(state["rng"])
