"""A checkpoint manager for Megatron-Bridge, named by its setting `checkpoint.custom_manager_class`.

Bridge checks the name before it imports the class. So the training script imports this module,
which allows the name.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from megatron.bridge.training import fault_tolerance
from megatron.bridge.training.callbacks import CallbackContext, should_fire
from megatron.bridge.training.checkpointing import (
    DATALOADER_STATE_SUBDIR,
    DefaultCheckpointManager,
    maybe_save_dataloader_state,
)
from megatron.bridge.training.state import TrainState
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from megatron.core.num_microbatches_calculator import update_num_microbatches

from megatron_flashckpt.checkpointer import Checkpointer, Resumed, SaveResult
from megatron_flashckpt.errors import NotCommittedError, UnsupportedError

register_allowed_target_prefix(__name__)

#: Key of Bridge's TrainState in the side state of a checkpoint.
_TRAIN_STATE = "bridge_train_state"


class FlashCheckpointManager:
    """Bridge's `CheckpointManager` on a `Checkpointer`; all ranks call the same methods.

    The checkpointer is made by the first load or save, because model and optimizer come with it.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        """Set up; nothing is read. Called by Bridge's `create_checkpoint_manager`."""
        self._config = checkpoint_config
        self._checkpointer: Checkpointer | None = None
        #: Calls of `on_checkpoint_save` for saves that have no result yet, by iteration.
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._is_checked = False
        self.checkpointing_context: dict[str, Any] = {}
        """Read by Bridge's `setup`."""
        if checkpoint_config.load is not None:
            # Bridge calls `load` if this names an iteration. Only `load`, which all ranks call,
            # finds out whether host memory holds a checkpoint. A fresh start needs it, too: it
            # checks that the job can be saved, and prepares the first save.
            local = types.SimpleNamespace(find_latest=lambda: 0)
            self.checkpointing_context["local_checkpoint_manager"] = local

    def save(self, ctx: Any, callback_manager: Any) -> None:
        """Stage a checkpoint, and return when training may continue.

        A non-persistent checkpoint stays in host memory. `on_checkpoint_save` is called on each
        rank by `finalize_async_saves`, once the checkpoint is durable.

        Args:
            ctx: Bridge's `CheckpointSaveContext`.
            callback_manager: Bridge's `CallbackManager` or None.

        Raises:
            UnsupportedError: the job uses a feature that this release does not save.
            SaveFailedError: as `Checkpointer.save`.
        """
        state, iterator = ctx.state, ctx.train_data_iterator
        checkpointer = self._opened(ctx)
        fault_tolerance.on_checkpointing_start(state)
        step = state.train_state.step
        if hasattr(getattr(iterator, "iterable", None), "save_state"):
            maybe_save_dataloader_state(
                *(ctx.model, iterator, step, self._dataloader_directory(state)),
                pg_collection=ctx.pg_collection,
            )
        progress = state.train_state.state_dict()
        progress["floating_point_operations_so_far"] = torch.tensor(
            ctx.num_floating_point_operations_so_far, dtype=torch.float64
        )
        checkpointer.save(step, {_TRAIN_STATE: progress}, memory_only=ctx.non_persistent_ckpt)
        if not ctx.non_persistent_ckpt and should_fire(callback_manager, "on_checkpoint_save"):
            context = CallbackContext(
                state=state,
                model=ctx.model,
                user_state=callback_manager.user_state,
                optimizer=ctx.optimizer,
            )
            self._callbacks[step] = functools.partial(
                callback_manager.fire, "on_checkpoint_save", context
            )
        fault_tolerance.on_checkpointing_end(global_state=state, is_async_finalization=False)

    def load(self, ctx: Any) -> tuple[int, int]:
        """Fill model, optimizer, scheduler, random generators and `TrainState`. Collective.

        If neither host memory nor storage holds a checkpoint, Bridge's own loader reads
        `pretrained_checkpoint`, if that is set.

        Args:
            ctx: Bridge's `CheckpointLoadContext`.

        Returns:
            The iteration, and the floating point operations so far; (0, 0) in a fresh start.

        Raises:
            FlashCkptError: as `Checkpointer.load`.
            NotCommittedError: the job must start from a checkpoint, and there is none.
        """
        config = self._config
        resumed = self._resumed(ctx) if config.load is not None else None
        if resumed is None and config.pretrained_checkpoint is not None:
            iteration, flops = DefaultCheckpointManager(config).load(ctx)
            return iteration, flops
        if resumed is None or config.finetune:
            return 0, 0
        self.checkpointing_context["dataloader_state_dir"] = self._dataloader_directory(ctx.state)
        train_state = _train_state(resumed, config.load)
        ctx.state.train_state = train_state
        update_num_microbatches(train_state.consumed_train_samples, verbose=True)
        fault_tolerance.on_checkpoint_loaded(resumed.source == "memory", ctx.state)
        return train_state.step, train_state.floating_point_operations_so_far

    def finalize_async_saves(
        self, state: Any, blocking: bool = False, terminate: bool = False
    ) -> None:
        """Report saves that have ended. Bridge calls it before every step, and at the end.

        Args:
            state: Bridge's `GlobalState`.
            blocking: wait until no save is pending.
            terminate: free the host memory, because training has ended.

        Raises:
            UnsupportedError: before the first step, the job uses a feature that is not saved.
            SaveFailedError: as `Checkpointer.poll` and `Checkpointer.close`.
        """
        self._refuse_unsupported(state.cfg)
        if self._checkpointer is None:
            return
        self._report(
            self._checkpointer.wait_until_durable() if blocking else self._checkpointer.poll()
        )
        if terminate:
            self._checkpointer.close()
            self._checkpointer = None

    # ------------------------------------------------------------------

    def _opened(self, ctx: Any) -> Checkpointer:
        """Return the checkpointer; the first load or save makes it."""
        self._refuse_unsupported(ctx.state.cfg)
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(
                self._config.save, ctx.model, ctx.optimizer, ctx.opt_param_scheduler
            )
        return self._checkpointer

    def _resumed(self, ctx: Any) -> Resumed | None:
        """Load from `checkpoint.load`; None if it holds no checkpoint, and host memory neither."""
        config = self._config
        resumed = self._opened(ctx).load(
            config.load,
            step=config.ckpt_step,
            weights_only=config.finetune,
            strict=ctx.strict,
        )
        must_load = ctx.state.cfg._checkpoint_load_required and not config.pretrained_checkpoint
        if resumed is None and must_load:
            raise NotCommittedError(
                f"{config.load}: holds no checkpoint, and Bridge's finetune() needs one; set "
                "checkpoint.pretrained_checkpoint, or name another directory"
            )
        return resumed

    def _report(self, results: list[SaveResult]) -> None:
        """Call `on_checkpoint_save` for durable saves, and forget the failed ones."""
        for result in results:
            callback = self._callbacks.pop(result.iteration, None)
            if callback is not None and result.error is None:
                callback()

    def _dataloader_directory(self, state: Any) -> str:
        """Return where the state of a data loader of Energon lies, as Bridge chooses it."""
        named: str | None = getattr(state.cfg.dataset, "dataloader_save", None)
        return named or f"{self._config.save}/{DATALOADER_STATE_SUBDIR}"

    def _refuse_unsupported(self, config: Any) -> None:
        """Refuse, by their names in Bridge's config, settings that a save would not honor."""
        if self._is_checked:
            return
        if found := unsupported(config):
            listed = "\n  ".join(found)
            raise UnsupportedError(
                f"FlashCheckpointManager does not support these settings of this job:\n  {listed}\n"
                "Nothing was saved or changed. Change these settings, or leave "
                "checkpoint.custom_manager_class out, so that Megatron-Bridge saves the job itself"
            )
        self._is_checked = True


def _train_state(resumed: Resumed, directory: str) -> Any:
    """Return Bridge's `TrainState` of the checkpoint that was loaded from `directory`."""
    if _TRAIN_STATE not in resumed.side:
        raise UnsupportedError(
            f"{directory}: iteration {resumed.iteration} was not saved by Megatron-Bridge and has "
            "no TrainState; set checkpoint.finetune to begin a new training with its weights"
        )
    train_state = TrainState()
    train_state.load_state_dict(resumed.side[_TRAIN_STATE])
    return train_state


def unsupported(config: Any) -> list[str]:
    """Return a line for each setting of Bridge's `ConfigContainer` that is refused."""
    checkpoint = config.checkpoint
    model = getattr(config.model, "transformer", config.model)
    refused = {
        "checkpoint.save is not set": not checkpoint.save,
        "peft: adapters are saved without their base model": config.peft is not None,
        "dist.use_megatron_fsdp or ddp.use_megatron_fsdp": (
            config.dist.use_megatron_fsdp or config.ddp.use_megatron_fsdp
        ),
        "dist.use_torch_fsdp2": config.dist.use_torch_fsdp2,
        "dist.use_decentralized_pg: process groups outside of parallel_state": (
            config.dist.use_decentralized_pg
        ),
        "model.restore_modelopt_state: state of ModelOpt": (
            getattr(config.model, "restore_modelopt_state", False)
        ),
        "checkpoint.save_optim, save_rng, load_optim or load_rng is false": not (
            checkpoint.save_optim
            and checkpoint.save_rng
            and checkpoint.load_optim
            and checkpoint.load_rng
        ),
        "optimizer.offload_optimizer_states: frees states while a save copies them": (
            getattr(config.optimizer, "offload_optimizer_states", False)
        ),
        "checkpoint.also_save_hf_checkpoint: use 'flashckpt convert --to hf'": (
            checkpoint.also_save_hf_checkpoint
        ),
        "checkpoint.most_recent_k: use the setting 'retention'": checkpoint.most_recent_k >= 0,
    }
    for name in ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"):
        refused[f"model.{name}: Bridge changes the order of these weights in a save"] = (
            getattr(model, name, None) is not None
        )
    return [line for line, is_refused in refused.items() if is_refused]
