"""The load of a job, from the choice of a checkpoint to the report.

Start reading at `load`, whose six steps are the rest of this package.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any, Literal

import torch

from megatron_flashckpt.catalog.directory import read_facts
from megatron_flashckpt.catalog.lineage import Facts, Save, choose
from megatron_flashckpt.collectives import run_and_agree, run_on_rank_0, this_rank
from megatron_flashckpt.errors import FlashCkptError, UnsupportedError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format.file_names import RELEASE
from megatron_flashckpt.file_format.run_object import Ancestors
from megatron_flashckpt.load import argument_source, loader, training_state
from megatron_flashckpt.load.argument_source import ArgumentSource
from megatron_flashckpt.load.candidates import Candidates
from megatron_flashckpt.load.checkpoint_source import CheckpointSource
from megatron_flashckpt.load.late_names import may_be_late
from megatron_flashckpt.load.load_request import LoadRequest
from megatron_flashckpt.load.loader import LoadedCheckpoint
from megatron_flashckpt.load.memory_checkpoints import (
    HeldInMemory,
    MemoryCheckpoint,
    held_in_memory,
)
from megatron_flashckpt.load.memory_source import open_memory
from megatron_flashckpt.load.named_checkpoint import Offered, offered_by, refuse_path_inside
from megatron_flashckpt.load.storage_source import open_stored
from megatron_flashckpt.megatron_lm import announcements
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.stock import LoadCall, checkpointing, unwrap
from megatron_flashckpt.megatron_lm.vocabulary import least_words
from megatron_flashckpt.save.gc_pause import gc_paused
from megatron_flashckpt.save.session import session
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.retrying_store import RetryingStore, load_patience_s
from megatron_flashckpt.storage.store import Store

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
    if is_resume:
        # A run that opens while a save is pending would leave that save without a tracker.
        session.checkpointer(margs.save).end_saves()
    memory = _held_in_memory(margs) if is_resume else HeldInMemory()
    load_dir = _load_directory(call, margs, memory.checkpoints)
    directory = _LoadDirectory(margs, load_dir, memory)
    candidates = _candidates(margs, directory, memory)
    refusal = argument_source.disagreement(directory.argument_sources)
    request = _request(call, margs, refusal, is_release=candidates.iteration == RELEASE)
    loaded = _load_first_undamaged(candidates, request, margs, directory)
    candidates.report()
    if loaded is None:
        _refuse_foreign(candidates, request)
        _refuse_start_from_scratch(candidates, margs, load_dir)
        if getattr(margs, "use_checkpoint_args", False):
            # Without a checkpoint to load, no collective has raised this rank's refusal so far.
            run_and_agree(request.raise_refusal)
        if is_resume:
            _open_run(margs, candidates.other_program, (), directory.facts)
        return None
    assert load_dir is not None
    iteration = training_state.apply(call, margs, request.model_state, loaded)
    if is_resume:
        _continue_from(loaded, margs, directory.facts)  # ends after all ranks have begun it
    else:
        if call.optimizer is not None:
            _report_unused_memory(margs, load_dir)
        _await_all_ranks()
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
    """Return whether the directory has a tracker, or a checkpoint that no tracker names yet."""
    if load_dir is None:
        return False
    if checkpointing().checkpoint_exists(load_dir):
        return True
    return bool(choose(read_facts(_store(margs, load_dir))).candidates)


def _store(margs: Any, load_dir: str) -> Store:
    """Return the store to load from; its retries end before other ranks' collectives time out."""
    minutes = getattr(margs, "distributed_timeout_minutes", None)
    patience_s = load_patience_s(None if minutes is None else 60.0 * minutes)
    return RetryingStore(open_store(load_dir), total_s=patience_s)


class _LoadDirectory:
    """The directory that a job loads from, and what rank 0 has seen there."""

    def __init__(self, margs: Any, load_dir: str | None, memory: HeldInMemory) -> None:
        self.path = load_dir
        self.store = None if load_dir is None else _store(margs, load_dir)
        self.facts: Facts | None = None
        """Facts on which the last choice depended; on rank 0 only."""
        self.argument_sources: dict[str, ArgumentSource] = {}
        """Those of rank 0, which come with each choice."""
        self._margs = margs
        self._held = {held.save: held.ancestors for held in memory.checkpoints}

    def choose(self) -> Offered:
        """Return the checkpoints that directory and memory offer now. Collective."""
        offered, self.argument_sources = run_on_rank_0(
            lambda: (self._offered(), argument_source.chosen_sources())
        )
        return offered

    def _offered(self) -> Offered:
        if self.store is None or self.path is None:
            return Offered()
        refuse_path_inside(self.path, self.store)
        step = getattr(self._margs, "ckpt_step", None)
        wait_s = self._wait_s() if may_be_late(self.path) else 0.0
        self.facts, offered = offered_by(
            self.store, int(step) if step else None, self._held, wait_s
        )
        return offered

    def _wait_s(self) -> float:
        """Return how long rank 0 waits for late names: half of what other ranks wait at most."""
        wait_s = session.config.probe_wait_s or 0.0
        minutes = getattr(self._margs, "distributed_timeout_minutes", None)
        return wait_s if minutes is None else min(wait_s, 30.0 * minutes)


def _candidates(margs: Any, directory: _LoadDirectory, memory: HeldInMemory) -> Candidates:
    """Return the checkpoints that may be loaded. Collective."""
    # A job that names an iteration, or finetunes a model, accepts no other checkpoint.
    is_exact = getattr(margs, "ckpt_step", None) or margs.finetune
    return Candidates(
        directory.choose,
        memory,
        str(directory.path),
        rank=this_rank(),
        fall_back=session.config.damaged == "fall_back" and not is_exact,
    )


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
    candidates: Candidates, request: LoadRequest, margs: Any, directory: _LoadDirectory
) -> LoadedCheckpoint | None:
    """Fill the model from the first undamaged candidate; None if there is no candidate. Collective.

    Raises:
        FlashCkptError: a candidate failed, and no other may be loaded; on every rank.
    """
    while (iteration := candidates.iteration) is not None:
        announcements.announce_loading(margs, directory.path, iteration)
        try:
            # One pause for both steps: a collection between them would scan all decoded objects.
            with gc_paused():
                return loader.load(request, _opened(candidates, directory))
        except FlashCkptError as error:
            candidates.refuse(error)
    return None


def _opened(candidates: Candidates, directory: _LoadDirectory) -> CheckpointSource:
    """Open the current candidate, on which all ranks agree. Collective."""
    candidate = candidates.current
    if isinstance(candidate, MemoryCheckpoint):
        return open_memory(candidate, session.config)
    assert candidate is not None
    assert directory.store is not None
    return open_stored(directory.store, candidate, session.config)


def _refuse_foreign(candidates: Candidates, request: LoadRequest) -> None:
    """Raise an error if neither this package nor Megatron can load the named checkpoint."""
    problem = candidates.offered.foreign
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
    if this_rank() != 0 or not margs.save:
        return
    with contextlib.suppress(FlashCkptError):  # the next save reports a lost agent
        if held := session.checkpointer(margs.save).link.saves_of_node():
            logger.warning(
                "iteration %d of %s in host memory is not used, because --load names %s; start "
                "with --load %s to resume from it",
                max(iteration for iteration, _ in held),
                margs.save,
                load_dir,
                margs.save,
            )


def _await_all_ranks() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def _continue_from(loaded: LoadedCheckpoint, margs: Any, facts: Facts | None) -> None:
    """Open the run that continues the loaded checkpoint. Collective."""
    hit("load.unadopted")
    origin = loaded.origin
    _open_run(margs, origin.save, origin.ancestors, facts, origin.source)
    if origin.source == "storage":
        session.resumed(margs.save, origin.iteration)
    hit("load.adopted")


def _open_run(
    margs: Any,
    save: Save | None,
    ancestors: Ancestors,
    facts: Facts | None,
    source: Literal["memory", "storage"] = "storage",
) -> None:
    """Open the run under which this job saves. Agents drop all saves that it does not continue.

    Collective. A job that finetunes a model begins a new history, from iteration 0. One that only
    evaluates opens none: another job may train there, and the directory may be read-only.

    Raises:
        OtherWriterError: another job trains there.
        StorageError: the save directory cannot be written.
    """
    if getattr(margs, "skip_train", False):
        _await_all_ranks()
        return
    checkpointer = session.checkpointer(margs.save)
    if margs.finetune:
        checkpointer.runs.open(None, (), "scratch")
    elif save is None:
        checkpointer.runs.open(None, (), "scratch", facts)
    else:
        checkpointer.runs.open(save, ancestors, source, facts)


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
