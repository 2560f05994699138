"""The load of a job, from the choice of a checkpoint to the report.

Start reading at `load`, whose six steps are the rest of this package.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from megatron_flashckpt.collectives import run_and_agree, run_on_rank_0, this_rank
from megatron_flashckpt.errors import FlashCkptError, UnsupportedError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format.file_names import RELEASE
from megatron_flashckpt.load import argument_source, loader, training_state
from megatron_flashckpt.load.candidates import Candidates
from megatron_flashckpt.load.checkpoint_source import CheckpointSource
from megatron_flashckpt.load.late_tracker import await_tracker
from megatron_flashckpt.load.loader import LoadedCheckpoint
from megatron_flashckpt.load.memory_checkpoints import (
    HeldInMemory,
    MemoryCheckpoint,
    held_in_memory,
)
from megatron_flashckpt.load.memory_source import open_memory
from megatron_flashckpt.load.named_checkpoint import (
    NamedCheckpoint,
    named_in,
    refuse_path_inside,
    with_save,
)
from megatron_flashckpt.load.request import LoadRequest
from megatron_flashckpt.load.storage_source import open_stored
from megatron_flashckpt.megatron_lm import announcements
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.stock import LoadCall, checkpointing, unwrap
from megatron_flashckpt.megatron_lm.vocabulary import least_words
from megatron_flashckpt.save.gc_pause import gc_paused
from megatron_flashckpt.save.session import session
from megatron_flashckpt.storage.opening import open_storage
from megatron_flashckpt.storage.patient import RetryingStorage

logger = logging.getLogger(__name__)

#: Values of --dist-ckpt-strictness with which Megatron, too, continues in spite of differences.
_LENIENT = ("log_unexpected", "log_all", "ignore_all")


def load(call: LoadCall, margs: Any) -> tuple[int, Any] | None:
    """Load a checkpoint of this package; return None if Megatron's own function must load.

    All ranks call this together. The steps of a load:

    1. choose: list the checkpoints in memory and the one that the load directory names;
    2. agree: all ranks open the same checkpoint and know what its ranks stored;
    3. plan: each rank lists its reads, and all ranks agree that no state is missing;
    4. read: fill the tensors from memory or storage;
    5. apply: set arguments, param groups, scheduler and random state;
    6. report: inform the agent, and write the log.

    If steps 2 to 4 find damage, they start again with the next checkpoint.

    Returns:
        `(iteration, floating point operations so far)`, as Megatron's own function; or None if the
        directory holds no checkpoint, or one in Megatron's own formats.
    """
    load_dir = getattr(margs, call.load_arg)
    is_resume = call.optimizer is not None and _saves_where_it_loads(margs, load_dir)
    memory = _held_in_memory(margs) if is_resume else HeldInMemory()
    load_dir = _load_directory(call, margs, memory.checkpoints)
    candidates, refusal = _candidates(margs, load_dir, memory)
    request = _request(call, margs, refusal, is_release=candidates.iteration == RELEASE)
    loaded = _load_first_undamaged(candidates, request, margs, load_dir)
    candidates.report()
    if loaded is None:
        _refuse_foreign(candidates, request)
        _refuse_start_from_scratch(candidates, margs, load_dir)
        if getattr(margs, "use_checkpoint_args", False):
            # Without a checkpoint to load, no collective has raised this rank's refusal so far.
            run_and_agree(request.raise_refusal)
        if is_resume:
            _forget_saves(margs)
        return None
    assert load_dir is not None
    iteration = training_state.apply(call, margs, request.model_state, loaded)
    if call.optimizer is not None and not is_resume:
        _report_unused_memory(margs, load_dir)
    if is_resume:
        _continue_from(loaded, margs, is_other_history=candidates.is_other_history)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    origin = loaded.origin
    announcements.announce_loaded(
        load_dir, iteration, (origin.iteration, origin.source), _summary(loaded)
    )
    return iteration, loaded.side.common["num_floating_point_operations_so_far"]


# ---------------------------------------------------------------------- choose


def _held_in_memory(margs: Any) -> HeldInMemory:
    """Return the saves in memory, if the job may load the newest of them. Collective."""
    usable = (
        session.config.restore_from_memory
        and not getattr(margs, "ckpt_step", None)
        and not margs.finetune
    )
    if not usable:
        return HeldInMemory()
    try:
        return held_in_memory(session.checkpointer(margs.save))
    except FlashCkptError as error:
        logger.error("checkpoints in host memory cannot be used: %s", error)
        return HeldInMemory()


def _load_directory(call: LoadCall, margs: Any, memory: Sequence[MemoryCheckpoint]) -> str | None:
    """Return the load directory; that of a pretrained model if there is no other checkpoint.

    Collective, because a file system may show ranks different states of a directory.
    """
    stock = checkpointing()
    load_dir: str | None = getattr(margs, call.load_arg)
    pretrained: str | None = getattr(margs, "pretrained_checkpoint", None)
    if memory or pretrained is None or run_on_rank_0(lambda: _holds_checkpoint(margs, load_dir)):
        return load_dir
    stock.print_rank_0(
        f"Checkpoint file not found in load directory {load_dir} attempting to finetune with "
        f"checkpoint in {pretrained}"
    )
    if run_on_rank_0(lambda: stock.checkpoint_exists(pretrained)):
        margs.finetune = True
    return pretrained


def _holds_checkpoint(margs: Any, load_dir: str | None) -> bool:
    """Return whether the directory has a tracker, or a commit that no tracker names yet."""
    if load_dir is None:
        return False
    if checkpointing().checkpoint_exists(load_dir):
        return True
    return named_in(_retrying_storage(margs, load_dir), None).iteration is not None


def _candidates(
    margs: Any, load_dir: str | None, memory: HeldInMemory
) -> tuple[Candidates, FlashCkptError | None]:
    """Return the checkpoints that may be loaded, and why this rank must not load. Collective."""
    step = getattr(margs, "ckpt_step", None)
    storage = None if load_dir is None else _retrying_storage(margs, load_dir)

    def find_named() -> NamedCheckpoint:
        if storage is None or load_dir is None:
            return NamedCheckpoint(None)
        refuse_path_inside(load_dir)
        if not memory.checkpoints:
            return named_in(storage, int(step) if step else None)
        find = functools.partial(named_in, storage, None)
        named = await_tracker(find, storage, memory.checkpoints, _tracker_wait_s(margs))
        return with_save(named, storage)

    named, sources = run_on_rank_0(lambda: (find_named(), argument_source.chosen_sources()))
    # A job that names an iteration, or finetunes a model, accepts no other checkpoint.
    fall_back = session.config.damaged == "fall_back" and not step and not margs.finetune
    candidates = Candidates(storage, named, memory, rank=this_rank(), fall_back=fall_back)
    return candidates, argument_source.disagreement(sources)


def _tracker_wait_s(margs: Any) -> float:
    """Return how long rank 0 waits for the tracker: half of what the other ranks wait at most."""
    wait_s = session.config.probe_wait_s or 0.0
    minutes = getattr(margs, "distributed_timeout_minutes", None)
    return wait_s if minutes is None else min(wait_s, 30.0 * minutes)


def _retrying_storage(margs: Any, load_dir: str) -> RetryingStorage:
    """Return the storage to load from; its retries end before other ranks' collectives time out."""
    minutes = getattr(margs, "distributed_timeout_minutes", None)
    return RetryingStorage(open_storage(load_dir), None if minutes is None else 60.0 * minutes)


def _request(
    call: LoadCall, margs: Any, refusal: FlashCkptError | None, *, is_release: bool
) -> LoadRequest:
    strictness = getattr(margs, "dist_ckpt_strictness", None)
    wants_optimizer = not (margs.finetune or margs.no_load_optim or is_release)
    return LoadRequest(
        model_state=_model_state(call, margs),
        chunks=unwrap(call.model),
        optimizer=call.optimizer if wants_optimizer else None,
        strict=call.strict and strictness not in _LENIENT,
        # A job that finetunes may drop a head; Megatron's own load looks for it only with this.
        refuses_unexpected=not margs.finetune or strictness == "raise_all",
        words=least_words(margs),
        finetune=margs.finetune,
        fill=not call.skip_model_and_optimizer,
        refusal=refusal,
    )


def _model_state(call: LoadCall, margs: Any) -> ModelState:
    """Return the model state of the job's saves, or a new one for a model that is not saved."""
    if margs.save and session.startup(margs.save).concerns(call.optimizer):
        return session.checkpointer(margs.save).model_state
    return ModelState(session.config.replicated)


# ---------------------------------------------------------------------- agree, plan, read


def _load_first_undamaged(
    candidates: Candidates, request: LoadRequest, margs: Any, load_dir: str | None
) -> LoadedCheckpoint | None:
    """Fill the model from the first undamaged candidate; None if there is no candidate. Collective.

    Raises:
        FlashCkptError: a candidate failed, and no other may be loaded; on every rank.
    """
    while (iteration := candidates.iteration) is not None:
        announcements.announce_loading(margs, load_dir, iteration)
        try:
            # One pause for both steps: a collection between them would scan all decoded objects.
            with gc_paused():
                return loader.load(request, _opened(candidates))
        except FlashCkptError as error:
            candidates.refuse(error)
    return None


def _opened(candidates: Candidates) -> CheckpointSource:
    """Open the current candidate, on which all ranks agree. Collective."""
    candidate = candidates.current
    if isinstance(candidate, MemoryCheckpoint):
        return open_memory(candidate, session.config)
    assert candidate is not None
    assert candidates.storage is not None
    return open_stored(candidates.storage, candidate, session.config)


def _refuse_foreign(candidates: Candidates, request: LoadRequest) -> None:
    """Raise an error if neither this package nor Megatron can load the named checkpoint."""
    problem = candidates.named.foreign
    if problem is not None and request.optimizer is not None:
        raise UnsupportedError(problem)


def _refuse_start_from_scratch(candidates: Candidates, margs: Any, load_dir: str | None) -> None:
    """Raise an error if the job would drop saves that it loads with another number of ranks.

    Raises:
        MissingStateError: on all ranks.
    """
    refusal = candidates.unreachable_memory()
    if refusal is not None and not run_on_rank_0(lambda: _holds_checkpoint(margs, load_dir)):
        raise refusal


# ---------------------------------------------------------------------- report


def _saves_where_it_loads(margs: Any, load_dir: str | None) -> bool:
    """Return whether the job loads from its save directory, so that both share one history."""
    if not margs.save or not load_dir:
        return False
    return bool(os.path.realpath(margs.save) == os.path.realpath(load_dir))


def _report_unused_memory(margs: Any, load_dir: str) -> None:
    """Log on rank 0 that host memory holds saves to --save, which another --load does not use."""
    agent = session.checkpointer(margs.save).link.current if margs.save else None
    if this_rank() != 0 or agent is None:
        return
    with contextlib.suppress(FlashCkptError):  # the next save reports a lost agent
        if held := agent.saves_of_node():
            logger.warning(
                "iteration %d of %s in host memory is not used, because --load names %s; start "
                "with --load %s to resume from it",
                max(iteration for iteration, _ in held),
                margs.save,
                load_dir,
                margs.save,
            )


def _forget_saves(margs: Any) -> None:
    """Have the agent drop all saves in memory and pending writes, which must not be resumed."""
    session.checkpointer(margs.save).link.resume_from(None, 0)


def _continue_from(loaded: LoadedCheckpoint, margs: Any, *, is_other_history: bool) -> None:
    """Tell the agent from which save training resumes.

    Args:
        is_other_history: True if the saves in memory belong to another history than the loaded one.
    """
    hit("load.unadopted")
    if is_other_history:
        _forget_saves(margs)
    origin = loaded.origin
    session.checkpointer(margs.save).link.resume_from(origin.save_id, origin.iteration)
    if origin.source == "storage":
        session.resumed(margs.save, origin.iteration)
    hit("load.adopted")


def _summary(loaded: LoadedCheckpoint) -> str:
    """Return a log line with the bytes, seconds and memory of the load on rank 0."""
    report = loaded.report
    if loaded.origin.source == "memory":
        own, verb, place = report.held_nbytes, "copied", " from its node's memory"
    else:
        own, verb, place = report.read_nbytes, "read", ""
    speed = (own + report.received_nbytes) / 2**20 / max(report.seconds, 1e-9)
    return (
        f"rank 0 {verb} {own / 2**20:.1f} MiB{place} and received "
        f"{report.received_nbytes / 2**20:.1f} MiB from other ranks in {report.seconds:.2f} s "
        f"({speed:.0f} MiB/s), with at most {report.memory_nbytes / 2**20:.0f} MiB of memory "
        "in addition to the model"
    )
