"""The checkpoints that a job may resume from: the best one, and others if it is damaged.

All ranks try the candidates together and refuse the same ones: an error of one rank is raised on
all ranks with one class (`collectives`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from megatron_flashckpt.catalog.lineage import Candidate, Save
from megatron_flashckpt.collectives import world_size
from megatron_flashckpt.errors import (
    CorruptCheckpointError,
    FlashCkptError,
    MissingStateError,
    NotCommittedError,
    RenamedCheckpointError,
    first_few,
    for_listing,
    is_damage,
)
from megatron_flashckpt.file_format.file_names import RELEASE
from megatron_flashckpt.load.memory_checkpoints import HeldInMemory, MemoryCheckpoint
from megatron_flashckpt.load.named_checkpoint import Offered
from megatron_flashckpt.load.offers import HeldSave

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
        choose: returns what the load directory and memory offer. Collective. It is called once
            more if a checkpoint is removed while it loads.
        memory: the saves that ranks hold.
        place: the load directory, for messages.
        fall_back: True if the job may lose iterations; False if the job must stop instead.
        begins_anew: True if training begins anew, with weights from `place`.

    Raises:
        FlashCkptError: what a person has named cannot be loaded, and the job must not load
            another checkpoint; on all ranks.
    """

    def __init__(
        self,
        choose: Callable[[], Offered],
        memory: HeldInMemory,
        place: str,
        *,
        rank: int,
        fall_back: bool,
        begins_anew: bool = False,
    ) -> None:
        self._choose = choose
        self._held = {checkpoint.save: checkpoint for checkpoint in memory.checkpoints}
        self._incomplete = memory.incomplete
        self._place = place
        self._rank = rank
        self._fall_back = fall_back
        self._begins_anew = begins_anew
        self._refused: list[_RefusedCandidate] = []
        self._tried: set[Candidate] = set()
        self._offer()
        if rank == 0:
            report_unused(self.offered.unused)
        self._refuse_missing()
        newest = next((save.iteration for save, _ in self.offered.candidates), None)
        if self.offered.problem is not None and not fall_back and newest is not None:
            raise CorruptCheckpointError(
                f"{self.offered.problem}; write {newest} (the newest committed iteration) into "
                "it, or choose an iteration with --ckpt-step"
            )

    def _offer(self) -> None:
        """Have the checkpoints chosen by what the directory holds now. Collective."""
        self.offered = self._choose()
        self._left = [other for other in self.offered.candidates if other not in self._tried]

    @property
    def current(self) -> MemoryCheckpoint | Save | None:
        """The checkpoint to load now: one in memory, one in storage, or None.

        None also if Megatron loads its own one (`other_program`).
        """
        if not self._left or self.other_program is not None:
            return None
        save, in_memory = self._left[0]
        return self._held[save] if in_memory else save

    @property
    def other_program(self) -> Save | None:
        """The checkpoint of another program that is to be loaded; None: it is one of ours."""
        save = self._left[0].save if self._left else None
        return save if save is not None and not save.save_id else None

    @property
    def iteration(self) -> int | None:
        """Iteration of `current`."""
        return None if self.current is None else self._left[0].save.iteration

    def _refuse_missing(self) -> None:
        """Refuse the iteration that tracker or `--ckpt-step` names, and that cannot be loaded."""
        missing = self.offered.missing
        best = self.iteration
        if missing is None:
            return
        # A release is in storage only, and a person wants its weights alone.
        is_release = missing.iteration == RELEASE
        is_held = isinstance(self.current, MemoryCheckpoint)
        if best is not None and best >= missing.iteration and (is_held or not is_release):
            return  # memory holds it
        error = missing.report.error()
        is_wanted = is_release or isinstance(error, RenamedCheckpointError)
        if is_wanted or not self._fall_back or best is None:
            raise error
        self.offered = self.offered._replace(missing=None)
        self._note(_RefusedCandidate(missing.iteration, "storage", str(error), True, True))

    def refuse(self, error: FlashCkptError) -> None:
        """Replace `current`, which could not be loaded, by the next candidate. Collective.

        Storage is tried after any failure of a checkpoint in memory, but an older iteration in
        storage only if the job may lose iterations. Of the checkpoints in one place, an older one
        is tried only after damage. A checkpoint that is gone was removed by a job's janitor while
        it loaded, so what the directory holds now decides.

        Raises:
            FlashCkptError: no other candidate may be loaded: `error`, or a list of all damaged
                checkpoints.
        """
        current = self._left.pop(0)
        self._tried.add(current)
        damage = is_damage(error)
        save = current.save
        if current.in_memory:
            iteration = save.iteration
            self._note(_RefusedCandidate(iteration, "memory", str(error), damage, False))
            if not damage:
                # The error comes from the job: every checkpoint in memory would fail.
                self._left = [other for other in self._left if not other.in_memory]
            if not self._fall_back and self.iteration != iteration:
                raise error
            if (not damage and self.current is None) or self.iteration == RELEASE:
                # A release has weights only; this load wants all state.
                raise error
        elif isinstance(error, NotCommittedError):
            if self._rank == 0:
                logger.warning("%s; another checkpoint is chosen", error)
            self._offer()
            if self.current is None:
                raise error
        elif isinstance(error, RenamedCheckpointError) and save.iteration != self.offered.named:
            # This is a copy or a new name of an older checkpoint: nothing is damaged or lost.
            if self._rank == 0:
                logger.warning("%s; it is not loaded", for_listing(str(error)))
            if self.current is None:
                raise error
            self._refuse_missing()
        else:
            # A person has named a release or a renamed directory, and does not want an older
            # checkpoint. Nor would that be whole: this load takes only the weights of a release.
            is_wanted = save.iteration == RELEASE or isinstance(error, RenamedCheckpointError)
            if is_wanted or not (damage and self._fall_back):
                raise error
            self._note(_RefusedCandidate(save.iteration, "storage", str(error), damage, False))
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

    def _raise_nothing_left(self, error: FlashCkptError) -> None:
        tried = [refused for refused in self._refused if refused.damage]
        if len(tried) == 1:
            raise error
        listed = "\n  ".join(
            f"{refused.iteration} in {refused.source}: {refused.problem}" for refused in tried
        )
        raise CorruptCheckpointError(
            f"{self._place}: every checkpoint is damaged:\n  {listed}\nRestore one of them "
            "from a copy, choose another iteration with --ckpt-step, or start with another --load"
        ) from error

    def _report_incomplete(self) -> None:
        """Log the newest save in memory that is incomplete and newer than `current`."""
        save = next(iter(self._incomplete), None)
        # Iterations of another training are no measure.
        resumed = None if self._begins_anew else self.iteration
        if save is None or self._rank != 0 or (resumed or -1) >= save.iteration:
            return
        at = "starts from scratch" if resumed is None else f"resumes from iteration {resumed}"
        if self._begins_anew:
            at = f"begins anew with the weights in {self._place}"
        logger.warning("%s; training %s", _incompleteness(save), at)

    def report(self) -> None:
        """Log on rank 0 which checkpoints are not used, why, and that `current` is used instead."""
        self._report_incomplete()
        damaged = [refused for refused in self._refused if refused.damage]
        if self._rank != 0 or not (damaged or self.offered.problem):
            return
        lines = [f"DAMAGED CHECKPOINT in {self._place}"]
        if self.offered.problem is not None:
            lines.append(f"the tracker: {self.offered.problem}")
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
    return (
        f"iteration {save.iteration} in host memory, saved by {save.world_size} ranks, is "
        f"incomplete and not used: ranks {first_few(save.missing)} do not have their parts "
        "(a rank died while it copied, a node is gone, or ranks moved to other nodes)"
    )


def report_unused(unused: Mapping[Save, str]) -> None:
    """Log why the newest save in memory that does not count is not used.

    Args:
        unused: reasons by save.
    """
    newest = max(unused, key=lambda save: save.order, default=None)
    if newest is not None:
        logger.warning(
            "iteration %d in host memory (save %s) is not used: %s",
            *(newest.iteration, newest.save_id, unused[newest]),
        )


def refuse_to_drop(incomplete: Iterable[HeldSave]) -> None:
    """Raise an error if the job has another number of ranks than a save that it would drop.

    Args:
        incomplete: the saves in memory of which the job's ranks do not hold every part.

    Raises:
        MissingStateError: names the number of ranks that may load the save.
    """
    ranks = world_size()
    for save in incomplete:
        if save.world_size != ranks:
            raise MissingStateError(
                f"{_incompleteness(save)}; this job has {ranks} ranks, and there is no other "
                f"checkpoint. Start the job with {save.world_size} ranks, on the same nodes; or "
                "set 'restore_from_memory: false' to begin anew"
            )
