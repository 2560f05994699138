"""The load of a job, from the choice of a checkpoint to the report.

Start reading at `load`, whose six steps are the rest of this package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from megatron_flashckpt.catalog.directory import read_facts
from megatron_flashckpt.catalog.lineage import Facts, Save, choose
from megatron_flashckpt.collectives import run_and_agree, run_on_rank_0, this_rank
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import FlashCkptError, UnsupportedError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format.file_names import RELEASE, TRACKER
from megatron_flashckpt.file_format.run_object import Ancestors
from megatron_flashckpt.load import argument_source, loader
from megatron_flashckpt.load.argument_source import ArgumentSource
from megatron_flashckpt.load.candidates import Candidates, refuse_to_drop, report_unused
from megatron_flashckpt.load.checkpoint_source import CheckpointSource
from megatron_flashckpt.load.late_names import may_be_late, read_settled
from megatron_flashckpt.load.load_policy import LoadPolicy
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
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.save.checkpointer import Checkpointer
from megatron_flashckpt.save.gc_pause import gc_paused
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.retrying_store import RetryingStore, load_patience_s
from megatron_flashckpt.storage.store import Store

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadCall:
    """A load: what to fill, from where, and what the caller does in between."""

    job: JobState
    """`optimizer` is the one to load into; None to load weights only."""
    directory: str | None
    """The directory to load from; None if there is only `policy.pretrained`."""
    policy: LoadPolicy
    config: Config
    model_state: ModelState
    """That of the job's saves, or a new one for a model that is not saved."""
    saves: Checkpointer | None
    """The checkpointer of the job's saves; None if it has none."""
    resumes: bool
    """True if training continues from what is loaded, so `saves` continues its history."""
    announce: Callable[[str | None, int], None]
    """Called on all ranks with the directory and iteration (or `RELEASE`) of every attempt."""
    apply: Callable[[LoadedCheckpoint, LoadPolicy], None]
    """Sets what is not in tensors. Called on all ranks when the tensors are filled."""


@dataclasses.dataclass(frozen=True)
class LoadResult:
    """Result of a load; equal on all ranks, except for `loaded`."""

    loaded: LoadedCheckpoint | None
    """None if there is no checkpoint, or one in Megatron's own formats."""
    policy: LoadPolicy
    """That of the call, or one of weights only for `pretrained`."""
    directory: str | None
    """The directory that was loaded from."""


def load(call: LoadCall) -> LoadResult:
    """Load a checkpoint of this package, if there is one.

    All ranks call this together. The steps of a load:

    1. choose: list the checkpoints in memory and the one that the load directory names;
    2. agree: all ranks open the same checkpoint and know what its ranks stored;
    3. plan: each rank lists its reads, and all ranks agree that no state is missing;
    4. read: fill the tensors from memory or storage;
    5. apply: set param groups, scheduler, random state, and what the caller adds;
    6. report: inform the agent, and write the log.

    If steps 2 to 4 find damage, they start again with the next checkpoint.

    Raises:
        FlashCkptError: on every rank; no file was changed.
    """
    resumed = call.saves if call.resumes else None
    if resumed is not None:
        # A run that opens while a save is pending would leave that save without a tracker.
        resumed.end_saves()
    memory = HeldInMemory() if resumed is None else _held_in_memory(call.policy, resumed)
    call, memory = _with_directory(call, memory)
    directory = _LoadDirectory(call, memory)
    candidates = _candidates(call, directory, memory)
    refusal = argument_source.disagreement(directory.argument_sources)
    request = _request(call, refusal, is_release=candidates.iteration == RELEASE)
    loaded = _load_first_undamaged(candidates, request, call, directory)
    candidates.report()
    result = LoadResult(loaded, call.policy, call.directory)
    if loaded is None:
        _refuse_foreign(candidates, request, call)
        if memory.incomplete:
            unused = run_on_rank_0(lambda: _unused_if_empty(call, HeldInMemory()))
            if unused is not None:
                refuse_to_drop(memory.incomplete)
        if call.policy.uses_checkpoint_args:
            # Without a checkpoint to load, no collective has raised this rank's refusal so far.
            run_and_agree(request.raise_refusal)
        if resumed is not None:
            _open_run(call, resumed, candidates.other_program, (), directory.facts)
        else:
            _report_unused_memory(call)
        return result
    call.apply(loaded, call.policy)
    if resumed is not None:
        hit("load.unadopted")
        origin = loaded.origin
        # This is collective, so no rank returns before all ranks have loaded.
        _open_run(call, resumed, origin.save, origin.ancestors, directory.facts, origin.source)
        hit("load.adopted")
    else:
        _report_unused_memory(call)
        _await_all_ranks()
    return result


# ---------------------------------------------------------------------- choose


def _held_in_memory(policy: LoadPolicy, saves: Checkpointer) -> HeldInMemory:
    """Return the saves in memory, if the job may load the newest of them. Collective."""
    if not (saves.config.restore_from_memory and policy.falls_back):
        return HeldInMemory()
    try:
        return held_in_memory(saves)
    except FlashCkptError as error:
        logger.error("checkpoints in host memory cannot be used: %s", error)
        return HeldInMemory()


def _with_directory(call: LoadCall, memory: HeldInMemory) -> tuple[LoadCall, HeldInMemory]:
    """Return the call and the memory; those of a pretrained model if nothing else counts.

    Collective, because a file system may show ranks different states of a directory.

    Raises:
        MissingStateError: see `refuse_to_drop`.
    """
    pretrained = call.policy.pretrained
    if pretrained is None:
        return call, memory
    unused = run_on_rank_0(lambda: _unused_if_empty(call, memory))
    if unused is None:
        return call, memory
    refuse_to_drop(memory.incomplete)
    # No save in memory is of the history of the pretrained model.
    memory = HeldInMemory((), memory.incomplete)
    if this_rank() == 0:
        report_unused(unused)
        print(  # Megatron's own line
            f"Checkpoint file not found in load directory {call.directory} attempting to finetune "
            f"with checkpoint in {pretrained}",
            flush=True,
        )
    call = dataclasses.replace(call, directory=pretrained)
    if not run_on_rank_0(lambda: _has_tracker(call)):
        return call, memory
    policy = dataclasses.replace(call.policy, weights_only=True, needs=LoadPolicy().needs)
    return dataclasses.replace(call, policy=policy), memory


def _has_tracker(call: LoadCall) -> bool:
    return _store(call).stat(TRACKER) is not None


def _unused_if_empty(call: LoadCall, memory: HeldInMemory) -> Mapping[Save, str] | None:
    """Return why saves in memory do not count, if directory and memory offer no checkpoint.

    None: the directory has a tracker, or there is a checkpoint that no tracker names yet.
    """
    if call.directory is None:
        return {}
    if _has_tracker(call):
        return None
    store = _store(call)
    facts = read_settled(
        lambda: read_facts(store, memory.ancestors), store.place, _wait_s(call, call.directory)
    )
    choice = choose(facts)
    return None if choice.candidates else choice.unused


def _wait_s(call: LoadCall, directory: str) -> float:
    """Return how long rank 0 waits for late names: half of what other ranks wait at most."""
    wait_s = (call.config.probe_wait_s or 0.0) if may_be_late(directory) else 0.0
    timeout_s = call.policy.timeout_s
    return wait_s if timeout_s is None else min(wait_s, timeout_s / 2)


def _store(call: LoadCall) -> Store:
    """Return the store to load from; its retries end before other ranks' collectives time out."""
    assert call.directory is not None
    patience_s = load_patience_s(call.policy.timeout_s)
    return RetryingStore(open_store(call.directory), total_s=patience_s)


class _LoadDirectory:
    """The directory that a job loads from, and what rank 0 has seen there."""

    def __init__(self, call: LoadCall, memory: HeldInMemory) -> None:
        self.path = call.directory
        self.store = None if call.directory is None else _store(call)
        self.facts: Facts | None = None
        """Facts on which the last choice depended; on rank 0 only."""
        self.argument_sources: dict[str, ArgumentSource] = {}
        """Those of rank 0, which come with each choice."""
        self._call = call
        self._held = memory.ancestors

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
        wait_s = _wait_s(self._call, self.path)
        self.facts, offered = offered_by(self.store, self._call.policy.step, self._held, wait_s)
        return offered


def _candidates(call: LoadCall, directory: _LoadDirectory, memory: HeldInMemory) -> Candidates:
    """Return the checkpoints that may be loaded. Collective."""
    return Candidates(
        directory.choose,
        memory,
        str(directory.path),
        rank=this_rank(),
        fall_back=call.config.damaged == "fall_back" and call.policy.falls_back,
        begins_anew=call.policy.weights_only,
    )


def _request(call: LoadCall, refusal: FlashCkptError | None, *, is_release: bool) -> LoadRequest:
    policy = call.policy
    wants_optimizer = policy.wants_optimizer and not (policy.weights_only or is_release)
    return LoadRequest(
        model_state=call.model_state,
        chunks=call.job.chunks,
        optimizer=call.job.optimizer if wants_optimizer else None,
        policy=policy,
        refusal=refusal,
    )


# ---------------------------------------------------------------------- agree, plan, read


def _load_first_undamaged(
    candidates: Candidates, request: LoadRequest, call: LoadCall, directory: _LoadDirectory
) -> LoadedCheckpoint | None:
    """Fill the model from the first undamaged candidate; None if there is no candidate. Collective.

    Raises:
        FlashCkptError: a candidate failed, and no other may be loaded; on every rank.
    """
    while (iteration := candidates.iteration) is not None:
        call.announce(directory.path, iteration)
        try:
            # One pause for both steps: a collection between them would scan all decoded objects.
            with gc_paused():
                return loader.load(request, _opened(candidates, call, directory))
        except FlashCkptError as error:
            candidates.refuse(error)
    return None


def _opened(candidates: Candidates, call: LoadCall, directory: _LoadDirectory) -> CheckpointSource:
    """Open the current candidate, on which all ranks agree. Collective."""
    candidate = candidates.current
    if isinstance(candidate, MemoryCheckpoint):
        return open_memory(candidate, call.config)
    assert candidate is not None
    assert directory.store is not None
    return open_stored(directory.store, candidate, call.config)


def _refuse_foreign(candidates: Candidates, request: LoadRequest, call: LoadCall) -> None:
    """Raise an error if neither this package nor the caller can load the named checkpoint."""
    other = candidates.other_program
    if other is not None and not call.policy.caller_loads(str(call.directory)):
        raise UnsupportedError(
            f"{call.directory}: iteration {other.iteration} is in a format of another program; "
            "write it in this package's format with 'flashckpt convert' (what is in a bucket, copy "
            "to a directory first), or load from another directory"
        )
    problem = candidates.offered.foreign
    if problem is not None and request.optimizer is not None:
        raise UnsupportedError(problem)


# ---------------------------------------------------------------------- report


def _report_unused_memory(call: LoadCall) -> None:
    """Log on rank 0 that host memory holds saves to --save, which another --load does not use."""
    if this_rank() != 0 or call.saves is None or call.job.optimizer is None:
        return
    with contextlib.suppress(FlashCkptError):  # the next save reports a lost agent
        if held := call.saves.link.client().saves_of_node():
            logger.warning(
                "iteration %d of %s in host memory is not used, because this job loads from %s; "
                "start with --load %s to resume from it",
                max(iteration for iteration, _ in held),
                call.saves.root,
                call.directory,
                call.saves.root,
            )


def _await_all_ranks() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def _open_run(
    call: LoadCall,
    saves: Checkpointer,
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
    if not call.job.trains:
        _await_all_ranks()
    elif call.policy.weights_only:
        saves.runs.open(None, (), "scratch")
    elif save is None:
        saves.runs.open(None, (), "scratch", facts)
    else:
        saves.runs.open(save, ancestors, source, facts)


def summary(loaded: LoadedCheckpoint) -> str:
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
