"""Checkpointers of this process by save directory, shared by the replaced Megatron functions.

Megatron's functions belong to no object that could hold state. So this module holds the package's
only global object, `session`.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import sys
import weakref
from collections.abc import Hashable, Sequence

import torch.distributed as dist

from megatron_flashckpt import exit_status, forks
from megatron_flashckpt.agent.protocol import Outcome
from megatron_flashckpt.config import Config, load_config
from megatron_flashckpt.errors import SaveFailedError
from megatron_flashckpt.megatron_lm import announcements
from megatron_flashckpt.megatron_lm.stock import get_args
from megatron_flashckpt.save.checkpointer import Checkpointer
from megatron_flashckpt.save.open_checkpointer import OpenCheckpointer, reports_on
from megatron_flashckpt.save.request import SaveReport
from megatron_flashckpt.save.run import Run
from megatron_flashckpt.save.save_reports import SaveReports, node_count, say
from megatron_flashckpt.save.startup import Startup
from megatron_flashckpt.storage.opening import absolute
from megatron_flashckpt.tracing import Recorder

logger = logging.getLogger(__name__)

_Agreed = tuple[frozenset[str], frozenset[str]]
"""Keys of tensors that are quantized and frozen (`ModelState`)."""


@dataclasses.dataclass
class _MegatronSaves(OpenCheckpointer):
    """The saves of Megatron's own training loop to one directory."""

    announced: dict[int, announcements.AnnouncedSave] = dataclasses.field(default_factory=dict)
    """Saves to storage that have no outcome yet, by iteration."""
    last: announcements.AnnouncedSave | None = None
    """The last save that was staged or skipped."""

    def expects_save_of(self, iteration: int) -> bool:
        """Return whether Megatron still saves `iteration` after its loop, if the job does not exit.

        The loop may end with an exit in the last iteration, too.
        """
        is_due = announcements.saves_after_training(get_args(), iteration)
        return is_due and self.reports.last_requested != iteration

    def announce(self, outcome: Outcome, own: Recorder | None, failures: int) -> None:
        announcements.write_scalars(_scalars(outcome, own, failures), outcome.iteration)
        save = None if outcome.kept else self.announced.pop(outcome.iteration, None)
        if save is not None and outcome.error is None:
            announcements.announce_committed(get_args(), save)


class Session:
    """The checkpointers of this process."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._begin()

    def _begin(self) -> None:
        """Set the state of a process that has neither loaded nor saved."""
        self._open: dict[str, _MegatronSaves] = {}
        self.ready: set[str] = set()
        """Save directories, as given, whose startup is complete. Looked up in every iteration."""
        #: Keys that the ranks had gathered about the model, by closed save directory.
        self._agreed: dict[str, _Agreed] = {}
        #: By save directory. Kept because a script may reopen a checkpointer after training.
        self._reports: dict[str, SaveReports] = {}
        self._runs: dict[str, Run] = {}
        self._nodes: Sequence[Hashable] | None = None
        self._fork_depth = forks.depth()
        #: The group of all ranks of this attempt. Weak, so that it can end.
        self._world: weakref.ref[dist.ProcessGroup] | None = None

    def checkpointer(self, root: str) -> Checkpointer:
        """Return the checkpointer for save directory `root`; create it on first use."""
        self._forget_inherited()
        if (opened := self._find(root)) is None:
            given, root = root, absolute(root)
            announcements.ask_for_memory_saves(get_args(), self.config.memory_interval)
            checkpointer = Checkpointer(given, self.config)
            if root in self._agreed:
                # A script may close the checkpointer before its last save.
                checkpointer.model_state.note_keys(*self._agreed.pop(root))
            # The run is kept for the last save: the job's store may be gone by then.
            checkpointer.runs.run = self._runs.setdefault(root, checkpointer.runs.run)
            startup = Startup(checkpointer, self.note_nodes)
            if root not in self._reports:
                self._reports[root] = reports_on(root, checkpointer.rank)
            opened = _MegatronSaves(checkpointer, self._reports[root], startup)
            self._open[root] = opened
            exit_status.watch()
            if self._nodes is not None:
                checkpointer.model_state.note_nodes(self._nodes)
        return opened.checkpointer

    def _find(self, root: str) -> _MegatronSaves | None:
        """Return what is open for save directory `root`, or None.

        Every key is its own absolute name. So a root that is a key, as in nearly every iteration,
        needs no `absolute`, which takes 10 us there; a relative one follows the working directory.
        """
        return self._open.get(root) or self._open.get(absolute(root))

    def startup(self, root: str) -> Startup:
        """Return the phases that come before the first save to `root`."""
        self.checkpointer(root)
        return self._open[absolute(root)].startup

    def begin_attempt(self) -> None:
        """Forget an earlier attempt of this process, which an in-process restart has ended.

        Called where training begins: before Megatron builds the model, and by a load that training
        continues from. A program may make its process groups anew in between; then its attempt and
        its history continue. The earlier attempt ends as after a crash: the agent keeps its slots.
        """
        self._forget_inherited()
        world = dist.group.WORLD
        if world is None:
            return
        if self._world is not None and self._world() is not world:
            for root, opened in self._open.items():
                say(
                    opened.checkpointer.rank,
                    f"training was restarted in this process: the agent has the saves to {root}",
                )
                opened.checkpointer.close(leave=False)
            self._begin()
        self._world = weakref.ref(world)

    def _forget_inherited(self) -> None:
        """Forget the parent's checkpointers in a forked child; the parent still trains."""
        if forks.depth() != self._fork_depth:
            self._begin()

    def _forget_open(self) -> None:
        """Forget the checkpointers; a later save in this process starts from phase 1."""
        self._open.clear()
        self.ready.clear()

    def note_nodes(self, nodes: Sequence[Hashable]) -> None:
        """Note the node of every rank, for all present and later checkpointers of this process."""
        self._nodes = nodes
        for opened in self._open.values():
            opened.checkpointer.model_state.note_nodes(nodes)

    def resumed(self, root: str, iteration: int) -> None:
        """Note that training resumes from a checkpoint in storage, perhaps not the newest."""
        self._open[absolute(root)].reports.note_durable(iteration)

    def saved(self, root: str, save: announcements.AnnouncedSave, report: SaveReport) -> None:
        """Keep `save` for the announcement of its commit, or report why the save was skipped."""
        opened = self._open[absolute(root)]
        opened.saved(report)
        if not report.is_repeat:
            opened.last = save
        if report.copies is not None and not report.request.memory_only:
            opened.announced[save.iteration] = save

    def save_requested(self, root: str, iteration: int) -> bool:
        """Note that `iteration` is trained; return whether `flashckpt save-now` wants it saved."""
        opened = self._find(root)
        return opened is not None and opened.checkpointer.link.save_requested(iteration)

    def wait_copied(self) -> None:
        """Wait until no copy is running: then the state of the model may change."""
        self._forget_inherited()
        for opened in self._open.values():
            opened.checkpointer.link.stager.wait_copied()

    def finalize(
        self, *, blocking: bool, last: bool = False, exits: bool = False, announces: bool = True
    ) -> None:
        """Report the outcomes of saves; with `blocking`, wait for all pending saves.

        Args:
            last: True at the end of training: the last save must go to storage.
            exits: True if the process ends now, so that Megatron saves no more.
            announces: print Megatron's own line if there are saves to wait for.

        Raises:
            SaveFailedError: a save failed and `on_failure` is `raise`, or as many saves in a row
                failed as `failures_in_a_row` says, or the first save failed
                (`stop_on_failed_first_save`).
        """
        self._forget_inherited()
        reasons: dict[str, str] = {}
        for root, opened in self._open.items():
            if last:
                self._write_last(opened, exits=exits)
            if blocking and announces and opened.checkpointer.pending:
                announcements.announce_drain(get_args())
            outcomes = opened.collect(blocking=blocking)
            if not outcomes:  # nearly always: the loop calls this in every iteration
                continue
            reason = opened.report(outcomes, last=last)
            if reason is not None:
                reasons[root] = reason
        if reasons:
            raise SaveFailedError("; ".join(reasons.values()))

    def _write_last(self, opened: _MegatronSaves, *, exits: bool) -> None:
        """Save the last state to storage, unless Megatron itself does."""
        iteration, save = opened.unwritten, opened.last
        if iteration is None or (not exits and opened.expects_save_of(iteration)):
            return
        if opened.write_last() and save is not None:
            opened.announced[iteration] = save

    def expects_save(self) -> bool:
        """Return whether Megatron saves once more, after its training loop has ended.

        A checkpointer that was closed would need other memory for this save, while the agent and
        CUDA still hold that of the earlier ones.
        """
        margs = get_args()
        last: int | None = getattr(margs, "train_iters", None)
        return last is not None and any(
            opened.expects_save_of(last) for opened in self._open.values()
        )

    def close(self, *, leave: bool) -> None:
        """Close all checkpointers; with `leave`, free the host memory (no restart is expected)."""
        for root, opened in self._open.items():
            state = opened.checkpointer.model_state
            self._agreed[root] = state.quantized_keys, state.frozen_keys
            opened.close(leave=leave)
        self._forget_open()

    def end(self) -> bool:
        """Wait for pending saves, so that a job that ends right after its last save commits it.

        After an unhandled exception, do not wait: other ranks may be dead, this rank's GPU may
        hang, and a restart waits for this process to end. The agent finishes alone and keeps the
        slots.

        In a forked child, which may call this through `sys.exit`, do nothing: the parent still
        trains and gets the outcomes.

        Returns:
            False if the exit status of the process must show that the last save failed.
        """
        crashed = getattr(sys, "last_value", None) is not None
        try:
            self.finalize(blocking=not crashed, last=not crashed, exits=True)
        except SaveFailedError as error:
            logger.error("%s", error)
        if crashed:
            self.abandon()
            return True
        self.close(leave=True)
        return self._report_last_saves()

    def _report_last_saves(self) -> bool:
        """Report on rank 0 the last saves that are not durable; return False to exit with 1.

        Rank 0 decides alone, because every commit needs rank 0. If other ranks exited
        with their own status, the launcher might end rank 0 before its report.
        """
        reports = [report for report in self._reports.values() if report.rank == 0]
        self._reports.clear()
        verdicts = [
            (verdict, report)
            for report in reports
            if (verdict := report.last_failure()) is not None
        ]
        fails = self.config.exit_nonzero_unless_durable
        if not fails:
            status = "the exit status is not changed ('exit_nonzero_unless_durable' is false)"
        elif exit_status.is_success():
            status = "the exit status is 1 ('exit_nonzero_unless_durable: false' turns that off)"
        else:
            status = "the exit status is the one that the script has chosen"
        agent = self.config.agent
        for verdict, report in verdicts:
            logger.error(
                "%s%s; %s", verdict, report.where_held(agent, node_count(self._nodes)), status
            )
        return not (verdicts and fails)

    def at_exit(self) -> None:
        """End the session, and the process with status 1 if the last save is not durable."""
        # Read before `end`: a SIGTERM handler that calls `sys.exit` later cannot set the status.
        succeeds = exit_status.is_success()
        try:
            ended_well = self.end()
        except BaseException:  # Ctrl-C among others; Python ignores what a handler at exit raises
            logger.exception("it is unknown whether the last save is durable")
            ended_well = not self.config.exit_nonzero_unless_durable
        if succeeds and not ended_well:
            exit_status.fail()

    def abandon(self) -> None:
        """Disconnect after a crash; the agent keeps the slots for a restart."""
        for opened in self._open.values():
            opened.checkpointer.abandon()
        self._forget_open()


def _scalars(outcome: Outcome, own: Recorder | None, failures: int) -> dict[str, float]:
    """Return the scalars of a save that has an outcome, for TensorBoard and similar writers.

    The outcome of a committed save holds the timings of all ranks, of which the slowest counts.

    Args:
        own: this rank's recorder of the save, if known.
        failures: number of consecutive failed saves, including this one.
    """
    blocked_s = 0.0 if own is None else own.blocked_s
    if outcome.kept:
        return {"checkpoint/memory/blocked_ms": 1000 * blocked_s}
    scalars: dict[str, float] = {"checkpoint/failures_in_a_row": failures}
    if (cost := outcome.cost) is not None:
        blocked_s = max(blocked_s, cost.blocked_s)
        scalars["checkpoint/staged_s"] = cost.staged_s
        scalars["checkpoint/durable_s"] = cost.durable_s
        scalars["checkpoint/bytes"] = cost.nbytes
        scalars["checkpoint/gb_per_s"] = cost.nbytes / 1e9 / max(cost.durable_s, 1e-9)
    scalars["checkpoint/blocked_ms"] = 1000 * blocked_s
    return scalars


# Read the settings when training starts: a wrong setting must not fail at iteration 1,000.
session: Session = Session(load_config())
atexit.register(session.at_exit)
