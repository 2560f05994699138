"""A reference model that is loaded in the running job, as reinforcement learning does."""

from __future__ import annotations

import os
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.training import get_args, training
from megatron.training.training import get_model

from scripts import pretrain_gpt_tiny as tiny

#: Args that a load changes, or that the load of a reference model needs.
_KEPT = (
    *("no_load_optim", "no_load_rng", "finetune", "ckpt_step", "iteration"),
    *("consumed_train_samples", "consumed_valid_samples"),
)


def loading_step(forward_step: Any, when: str) -> Any:
    """Return `forward_step`, which loads a model before the first micro-batch of an iteration.

    Args:
        when: `iteration:step`, the iteration of the job, and that of the reference model.
    """
    iteration, _, step = when.partition(":")
    pending = [int(iteration)] if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" else []

    def wrapper(batches: Any, model: Any) -> Any:
        if get_args().curr_iteration + 1 in pending:
            pending.clear()
            _load(int(step))
        return forward_step(batches, model)

    return wrapper


def _load(step: int) -> None:
    args = get_args()
    kept = {name: getattr(args, name) for name in _KEPT}
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = torch.get_rng_state(), tracker.get_states()
    kind = tiny.ModelType.encoder_or_decoder
    model = get_model(tiny.model_provider, kind, wrap_with_ddp=False)
    args.no_load_optim = args.no_load_rng = args.finetune = True
    args.ckpt_step = step
    training.load_checkpoint(model, None, None)
    for name, value in kept.items():
        setattr(args, name, value)
    torch.set_rng_state(states[0])
    tracker.set_states(states[1])
