"""Which checkpoint a job goes on from, and what stock Megatron does when it goes on."""

from __future__ import annotations

import copy
import logging
import os
from typing import Any

import torch

from megatron_flashckpt.collectives import from_first
from megatron_flashckpt.errors import FlashCkptError, UnsupportedError
from megatron_flashckpt.failpoints import reach
from megatron_flashckpt.load.candidates import Candidates, Named, named_in, with_save
from megatron_flashckpt.load.loader import Loaded, load_from_memory, load_from_storage
from megatron_flashckpt.load.memory_checkpoints import InMemory, held_in_memory
from megatron_flashckpt.load.plan import LoadRequest
from megatron_flashckpt.megatron_lm import announcements, side_state
from megatron_flashckpt.megatron_lm.compat import feature, takes
from megatron_flashckpt.megatron_lm.hyper_parameters import load_hyper_parameters
from megatron_flashckpt.megatron_lm.model_geometry import ModelGeometry
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.requantization import fill_from_masters
from megatron_flashckpt.megatron_lm.stock import LoadCall, checkpointing, unwrap
from megatron_flashckpt.save.session import session
from megatron_flashckpt.storage.opening import open_storage
from megatron_flashckpt.storage.patient import PatientStorage

logger = logging.getLogger(__name__)

#: Values of --dist-ckpt-strictness with which Megatron, too, goes on in spite of differences.
_LENIENT = ("log_unexpected", "log_all", "ignore_all")


def load(call: LoadCall, margs: Any) -> tuple[int, Any] | None:
    """Load a checkpoint of ours, or return None: there is none, or it is one of Megatron's own.

    Called by all ranks together.
    """
    stock = checkpointing()
    load_dir = getattr(margs, call.load_arg)
    pretrained = getattr(margs, "pretrained_checkpoint", None)
    memory = _in_memory(margs, load_dir)
    if not memory and pretrained is not None and not stock.checkpoint_exists(load_dir):
        stock.print_rank_0(
            f"Checkpoint file not found in load directory {load_dir} attempting to finetune with "
            f"checkpoint in {pretrained}"
        )
        load_dir = pretrained
        if stock.checkpoint_exists(load_dir):
            margs.finetune = True
    state = _model_state(margs)
    loaded, is_strange = _load_newest(call, margs, state, load_dir, memory)
    if loaded is not None:
        return _go_on(call, margs, state, loaded, load_dir, is_strange=is_strange)
    if _goes_on_in_place(margs, load_dir):
        # What is in memory, or on its way to storage, belongs to a past that nobody wants; it must
        # not come back later.
        session.checkpointer(margs.save).link.adopt(None, 0)
    return None


def _model_state(margs: Any) -> ModelState:
    """Return what knows the model's geometry: that of its saves, if there are to be any."""
    if margs.save:
        return session.checkpointer(margs.save).model_state
    return ModelState(session.config.replicated)


def _load_newest(
    call: LoadCall, margs: Any, state: ModelState, load_dir: str | None, memory: list[InMemory]
) -> tuple[Loaded | None, bool]:
    """Fill the model from the newest checkpoint that can be used; None: there is none. Collective.

    Returns:
        What was loaded, and whether it is of another history than what is in memory.
    """
    step = getattr(margs, "ckpt_step", None)
    storage = None if load_dir is None else _patient(margs, load_dir)

    def look() -> Named:
        if storage is None:
            return Named(None)
        found = named_in(storage, int(step) if step else None)
        return with_save(found, storage) if memory else found

    named = from_first(look)
    # Who names an iteration, or wants to tune a model, wants that one and no other.
    fall_back = session.config.damaged == "fall_back" and not step and not margs.finetune
    candidates = Candidates(storage, named, memory, rank=_rank(), fall_back=fall_back)
    request = _request(call, margs)
    while (current := candidates.current) is not None:
        try:
            if isinstance(current, InMemory):
                announcements.announce_loading(margs, load_dir, current.offer.iteration)
                loaded = load_from_memory(request, state, _rank(), current, session.config)
            else:
                announcements.announce_loading(margs, load_dir, current)
                assert storage is not None
                loaded = load_from_storage(
                    request, state, _rank(), storage, current, session.config
                )
        except FlashCkptError as error:
            candidates.refuse(error)
        else:
            candidates.report()
            return loaded, candidates.strange
    candidates.report()
    if named.foreign is not None and request.optimizer is not None:
        raise UnsupportedError(named.foreign)
    return None, False


def _patient(margs: Any, load_dir: str) -> PatientStorage:
    """Return the storage to load from, whose retries end before the other ranks' collectives do."""
    minutes = getattr(margs, "distributed_timeout_minutes", None)
    return PatientStorage(open_storage(load_dir), None if minutes is None else 60.0 * minutes)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _request(call: LoadCall, margs: Any) -> LoadRequest:
    wants_optimizer = not (margs.finetune or margs.no_load_optim)
    return LoadRequest(
        chunks=unwrap(call.model),
        optimizer=call.optimizer if wants_optimizer else None,
        strict=call.strict and getattr(margs, "dist_ckpt_strictness", None) not in _LENIENT,
        fill=not call.skip_model_and_optimizer,
    )


def _in_memory(margs: Any, load_dir: str | None) -> list[InMemory]:
    """Return the checkpoints in memory, if loads come from where saves go. Collective."""
    usable = (
        session.config.restore_from_memory
        and _goes_on_in_place(margs, load_dir)
        and not getattr(margs, "ckpt_step", None)
        and not margs.finetune
    )
    if not usable:
        return []
    try:
        return held_in_memory(session.checkpointer(margs.save))
    except FlashCkptError as error:
        logger.error("memory of an earlier run cannot be used: %s", error)
        return []


def _goes_on_in_place(margs: Any, load_dir: str | None) -> bool:
    """Return whether loads come from where saves go: only then they are of one history."""
    if not margs.save or not load_dir:
        return False
    return bool(os.path.realpath(margs.save) == os.path.realpath(load_dir))


def _go_on(
    call: LoadCall,
    margs: Any,
    state: ModelState,
    loaded: Loaded,
    load_dir: str,
    *,
    is_strange: bool,
) -> tuple[int, Any]:
    """Do what stock does once the tensors are in place, in its order; return what it returns."""
    stock = checkpointing()
    common = loaded.common
    stock.set_checkpoint_version(common["checkpoint_version"])
    set_loaded_iteration = feature("set_loaded_iteration")
    if set_loaded_iteration is not None:
        set_loaded_iteration(loaded.origin.iteration)
    iteration = 0 if margs.finetune else int(common["iteration"])
    if margs.finetune:
        stock.print_rank_0("could not find arguments in the checkpoint ...")
    else:
        _check_and_take_args(margs, common["args"])
    stock.print_rank_0(f" checkpoint version {common['checkpoint_version']}")
    chunks = unwrap(call.model)
    _finish_optimizer(call, margs, loaded, state.geometry(chunks))
    side_state.load_extra_states(chunks, state.geometry(chunks), loaded.side.objects)
    # After the extra states, in which delayed scaling keeps its scales.
    if not call.skip_model_and_optimizer and state.geometry(chunks).quantized:
        fill_from_masters(call.model, call.optimizer)
    if not margs.finetune:
        _finish_rank(margs, common["args"], loaded.side.rank_state)
    if _goes_on_in_place(margs, load_dir):
        reach("load.unadopted")
        link = session.checkpointer(margs.save).link
        if is_strange:
            # Nothing that is in memory, or on its way to storage, may come back later.
            link.adopt(None, 0)
        link.adopt(loaded.origin.save_id, loaded.origin.iteration)
        if loaded.origin.source == "storage":
            session.resumed(margs.save, loaded.origin.iteration)
        reach("load.adopted")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    origin = loaded.origin
    announcements.announce_loaded(
        load_dir, iteration, (origin.iteration, origin.source), _said(loaded)
    )
    return iteration, common["num_floating_point_operations_so_far"]


def _said(loaded: Loaded) -> str:
    report = loaded.report
    if loaded.origin.source == "memory":
        own, verb = report.held_nbytes, "copied"
        place = " from its slot in host memory"
    else:
        own, verb, place = report.read_nbytes, "read", ""
    speed = (own + report.received_nbytes) / 2**20 / max(report.seconds, 1e-9)
    return (
        f"rank 0 {verb} {own / 2**20:.1f} MiB{place} and received "
        f"{report.received_nbytes / 2**20:.1f} MiB from other ranks in {report.seconds:.2f} s "
        f"({speed:.0f} MiB/s), with at most {report.memory_nbytes / 2**20:.0f} MiB of memory "
        "beside the model"
    )


def _check_and_take_args(margs: Any, saved: Any) -> None:
    stock = checkpointing()
    stock.check_checkpoint_args(_as_of_this_layout(saved, margs))
    margs.consumed_train_samples = getattr(saved, "consumed_train_samples", 0)
    margs.skipped_train_samples = getattr(saved, "skipped_train_samples", 0)
    update = stock.update_num_microbatches
    # Since core 0.9 it can say what it did.
    verbose = {"verbose": True} if takes(update, "verbose") else {}
    update(consumed_samples=margs.consumed_train_samples, **verbose)
    margs.consumed_valid_samples = getattr(saved, "consumed_valid_samples", 0)


def _finish_optimizer(call: LoadCall, margs: Any, loaded: Loaded, geometry: ModelGeometry) -> None:
    """Hyper-parameters and scheduler; or, where no optimizer state is loaded, fresh masters."""
    optimizer = call.optimizer
    if margs.finetune or margs.no_load_optim:
        if (margs.fp16 or margs.bf16) and optimizer is not None:
            optimizer.reload_model_params()
        return
    if optimizer is not None:
        for change in load_hyper_parameters(optimizer, loaded.side.optimizer, geometry):
            checkpointing().print_rank_0(f"  flashckpt: {change}, as the checkpoint says")
    if call.scheduler is not None and loaded.common["opt_param_scheduler"] is not None:
        call.scheduler.load_state_dict(loaded.common["opt_param_scheduler"])


def _as_of_this_layout(saved: Any, margs: Any) -> Any:
    """Return the checkpoint's args with what may differ made equal, for Megatron's own check."""
    lenient = copy.copy(saved)
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "padded_vocab_size",
    ):
        setattr(lenient, name, getattr(margs, name, None))
    return lenient


def _finish_rank(margs: Any, saved: Any, state: dict[str, Any] | None) -> None:
    """Random and rerun state, by Megatron's rules for a changed world."""
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
        except Exception as error:  # of whatever release saved it; as stock does
            checkpointing().print_rank_0(
                f"Unable to restore RerunMachine from checkpoint: {error}. Skipping."
            )
    # Random state last: nothing after it may draw from the generators.
    if not margs.no_load_rng and state["rng"] is not None:
        side_state.load_rng_state(state["rng"])


def _is_rerun(machine: Any, state: Any) -> bool:
    """Return whether `state` is of a machine that ran; releases before core 0.11 do not ask."""
    validate = getattr(machine, "validate_state_dict", None)
    return state is not None if validate is None else bool(validate(state))
