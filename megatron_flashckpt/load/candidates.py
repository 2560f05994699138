"""The checkpoints that a job may resume from: the named one, and older ones if it is damaged.

All ranks try the candidates together and refuse the same ones: an error of one rank is raised on
all ranks with one class (`collectives`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from megatron_flashckpt.catalog import listing
from megatron_flashckpt.collectives import run_on_rank_0, world_size
from megatron_flashckpt.errors import (
    CorruptCheckpointError,
    FlashCkptError,
    MissingStateError,
    NotCommittedError,
    RenamedCheckpointError,
    is_damage,
)
from megatron_flashckpt.file_format.file_names import (
    RELEASE,
    iteration_dir,
    next_attempt,
    run_of,
)
from megatron_flashckpt.load.memory_checkpoints import HeldInMemory, MemoryCheckpoint
from megatron_flashckpt.load.named_checkpoint import NamedCheckpoint
from megatron_flashckpt.load.offers import HeldSave
from megatron_flashckpt.storage.base import Storage

logger = logging.getLogger(__name__)

_RULE = "=" * 88


class _RefusedCandidate(NamedTuple):
    iteration: int
    source: str
    problem: str
    damage: bool
    gone: bool
    """True if the checkpoint does not exist, and perhaps never did."""


class Candidates:
    """The checkpoint to load, and its successors if it is damaged. Equal on all ranks.

    Args:
        storage: the load directory, or None.
        named: the checkpoint that the directory names; equal on all ranks.
        memory: the saves that ranks hold.
        fall_back: True if the job may lose iterations; False if the job must stop instead.
    """

    def __init__(
        self,
        storage: Storage | None,
        named: NamedCheckpoint,
        memory: HeldInMemory,
        *,
        rank: int,
        fall_back: bool,
    ) -> None:
        self.storage = storage
        self.named = named
        checkpoints = memory.checkpoints
        self.is_other_history = _is_other_history(named, checkpoints)
        """True if the checkpoint in storage belongs to another history than those in memory."""
        unusable = self.is_other_history or is_set_back(named, checkpoints)
        self._memory = [] if unusable else list(checkpoints)
        self._incomplete = memory.incomplete
        self._rank = rank
        self._fall_back = fall_back
        self._stored = named.iteration
        self._refused: list[_RefusedCandidate] = []
        if self.is_other_history and rank == 0 and storage is not None:
            logger.warning(
                "iteration %d in host memory (save %s) is not used: %s/%s holds save %s, which "
                "this job has not written: it was put there from a copy, converted, or saved by "
                "another job",
                checkpoints[0].offer.iteration,
                checkpoints[0].offer.save_id,
                storage.place,
                iteration_dir(named.iteration or 0),
                named.save_id,
            )
        if named.problem is not None and not fall_back:
            raise CorruptCheckpointError(
                f"{named.problem}; write {named.iteration} (the newest committed iteration) into "
                "it, or choose an iteration with --ckpt-step"
            )

    @property
    def current(self) -> MemoryCheckpoint | int | None:
        """The checkpoint to load now: one in memory, an iteration in storage, or None."""
        if self._memory and _is_ahead(self._memory[0], self._stored):
            return self._memory[0]
        return self._stored

    @property
    def iteration(self) -> int | None:
        """Iteration of `current`."""
        current = self.current
        return current.offer.iteration if isinstance(current, MemoryCheckpoint) else current

    def _tried_in_storage(self) -> set[int]:
        return {refused.iteration for refused in self._refused if refused.source == "storage"}

    def refuse(self, error: FlashCkptError) -> None:
        """Replace `current`, which could not be loaded, by the next candidate. Collective.

        Storage is tried after any failure of a checkpoint in memory, but an older iteration in
        storage only if the job may lose iterations. Of the checkpoints in one place, an older one
        is tried only after damage.

        Raises:
            FlashCkptError: no other candidate may be loaded: `error`, or a list of all damaged
                checkpoints.
        """
        current = self.current
        damage = is_damage(error)
        if isinstance(current, MemoryCheckpoint):
            iteration = current.offer.iteration
            self._note(_RefusedCandidate(iteration, "memory", str(error), damage, False))
            # An error that is no damage comes from the job: every checkpoint in memory would fail.
            self._memory = [other for other in self._memory if damage and other is not current]
            if not self._fall_back and self.iteration != iteration:
                raise error
            if (not damage and self.current is None) or self.current == RELEASE:
                # A release has weights only; this load wants all state.
                raise error
        elif current is not None:
            # A person has named a release or a renamed directory, and does not want an older
            # checkpoint. Nor would that be whole: this load takes only the weights of a release.
            is_wanted = current == RELEASE or (
                isinstance(error, RenamedCheckpointError) and current == self.named.iteration
            )
            if is_wanted or not (damage and self._fall_back):
                raise error
            gone = isinstance(error, NotCommittedError)
            self._note(_RefusedCandidate(current, "storage", str(error), damage, gone))
            self._stored = self._next_stored(gone=gone)
            if self.current is None:
                self._raise_nothing_left(error)

    def _note(self, refused: _RefusedCandidate) -> None:
        self._refused.append(refused)
        if self._rank == 0:
            logger.error(
                "iteration %d was not restored from %s: %s",
                refused.iteration,
                refused.source,
                refused.problem,
            )

    def _next_stored(self, *, gone: bool) -> int | None:
        """Return the newest committed iteration that was not tried. Collective.

        Iterations newer than the named one come last, because a user may have set the tracker back.

        Args:
            gone: True if the named iteration does not exist; then newer ones do not come last.
        """

        def find() -> int | None:
            assert self.storage is not None
            tried = self._tried_in_storage()
            untried = [
                iteration
                for iteration in listing.committed_iterations(self.storage)
                if iteration not in tried
            ]
            older = [iteration for iteration in untried if gone or iteration < min(tried)]
            return max(older or untried, default=None)

        return run_on_rank_0(find)

    def _raise_nothing_left(self, error: FlashCkptError) -> None:
        tried = [refused for refused in self._refused if refused.damage]
        if len(tried) == 1:
            raise error
        assert self.storage is not None
        listed = "\n  ".join(
            f"{refused.iteration} in {refused.source}: {refused.problem}" for refused in tried
        )
        raise CorruptCheckpointError(
            f"{self.storage.place}: every checkpoint is damaged:\n  {listed}\nRestore one of them "
            "from a copy, or start with another --load"
        ) from error

    def unreachable_memory(self) -> MissingStateError | None:
        """Return an error that names a save that the job can load with another number of ranks."""
        ranks = world_size()
        for save in self._incomplete:
            if save.world_size != ranks:
                return MissingStateError(
                    f"{_incompleteness(save)}; this job has {ranks} ranks, and there is no other "
                    f"checkpoint. Start the job with {save.world_size} ranks, on the same nodes; "
                    "or set 'restore_from_memory: false' to start from scratch"
                )
        return None

    def _report_incomplete(self) -> None:
        """Log the newest save in memory that is incomplete and newer than `current`."""
        save = next(iter(self._incomplete), None)
        resumed = self.iteration
        if save is None or self._rank != 0 or (resumed or -1) >= save.iteration:
            return
        at = "starts from scratch" if resumed is None else f"resumes from iteration {resumed}"
        logger.warning("%s; training %s", _incompleteness(save), at)

    def report(self) -> None:
        """Log on rank 0 which checkpoints are not used, why, and that `current` is used instead."""
        self._report_incomplete()
        damaged = [refused for refused in self._refused if refused.damage]
        if self._rank != 0 or not (damaged or self.named.problem):
            return
        lines = [f"DAMAGED CHECKPOINT in {self.storage.place if self.storage else 'memory'}"]
        if self.named.problem is not None:
            lines.append(f"the tracker: {self.named.problem}")
        lines += [
            f"iteration {refused.iteration} in {refused.source}: {refused.problem}"
            for refused in damaged
        ]
        resumed = self.iteration
        if resumed is None:
            lines.append("TRAINING STARTS FROM SCRATCH: there is no other checkpoint")
        else:
            source = "memory" if isinstance(self.current, MemoryCheckpoint) else "storage"
            newest = max(damaged, default=None)
            lost = "nothing is lost"
            if newest is not None and newest.iteration > resumed:
                at_most = "at most " if newest.gone else ""
                count = newest.iteration - resumed
                lost = f"{at_most}{count} iteration{'s are' if count > 1 else ' is'} lost"
            lines.append(f"TRAINING RESUMES FROM ITERATION {resumed} in {source}: {lost}")
        lines.append(
            "all damaged data was left unchanged; set 'damaged: stop' to stop the job instead"
        )
        logger.error("\n%s\n%s\n%s", _RULE, "\n  ".join(lines), _RULE)


def _incompleteness(save: HeldSave) -> str:
    """Return why a save in memory cannot be loaded."""
    ranks = ", ".join(map(str, save.missing[:8]))
    more = f" and {len(save.missing) - 8} more" if len(save.missing) > 8 else ""
    return (
        f"iteration {save.iteration} in host memory, saved by {save.world_size} ranks, is "
        f"incomplete and not used: ranks {ranks}{more} do not have their parts "
        "(a rank died while it copied, a node is gone, or ranks moved to other nodes)"
    )


def _is_ahead(held: MemoryCheckpoint, stored: int | None) -> bool:
    """Return whether memory is at least as new as `stored`, the iteration to load from storage.

    Memory is ahead of storage if the job crashed before a staged save was committed.
    """
    return stored is None or held.offer.iteration >= stored


def _is_other_history(named: NamedCheckpoint, memory: Sequence[MemoryCheckpoint]) -> bool:
    """Return whether the save in storage is known to be no ancestor of the saves in memory.

    All saves of one start of a job share a run id. A start knows the save that it resumed from, and
    agents know the saves that they committed. A replacement agent may know neither; then an older
    checkpoint in storage counts as the same history.
    """
    if named.save_id is None or not memory:
        return False
    lineage = frozenset[str]().union(*(checkpoint.lineage for checkpoint in memory))
    held = {checkpoint.offer.save_id for checkpoint in memory}
    known = {run_of(save) for save in lineage | held} | {next_attempt(save) for save in held}
    if run_of(named.save_id) in known or named.save_id in known:
        return False
    return bool(lineage) or memory[0].offer.iteration == named.iteration


def newest_committed(memory: Sequence[MemoryCheckpoint]) -> int:
    """Return the newest committed iteration that agents know of; -1 if they know of none."""
    return max((checkpoint.committed for checkpoint in memory), default=-1)


def is_set_back(named: NamedCheckpoint, memory: Sequence[MemoryCheckpoint]) -> bool:
    """Return whether storage names an older checkpoint than the newest committed one.

    In that case a user has removed the newest one or set the tracker back, which is respected.
    """
    return newest_committed(memory) > (-1 if named.iteration is None else named.iteration)
