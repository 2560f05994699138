"""What the shims share within a process: the checkpointers, by save directory.

Stock Megatron's functions have no object to hang state on, so there is exactly one module-level
holder, here.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Hashable, Sequence

from megatron_flashckpt import exit_status, forks
from megatron_flashckpt.agent.protocol import Outcome
from megatron_flashckpt.catalog.tracker import tracked_iteration
from megatron_flashckpt.config import Config, load_config
from megatron_flashckpt.errors import FlashCkptError, SaveFailedError, UnsupportedError
from megatron_flashckpt.megatron_lm import announcements
from megatron_flashckpt.megatron_lm.metric_writers import write_scalars
from megatron_flashckpt.megatron_lm.stock import checkpointing
from megatron_flashckpt.save.checkpointer import Checkpointer
from megatron_flashckpt.save.loop_timer import LoopTimer
from megatron_flashckpt.save.reports import SaveReports
from megatron_flashckpt.save.request import SaveReport
from megatron_flashckpt.save.run_id import Run
from megatron_flashckpt.save.scalars import save_scalars
from megatron_flashckpt.save.startup import Startup
from megatron_flashckpt.storage.opening import open_storage

logger = logging.getLogger(__name__)

_Agreed = tuple[frozenset[str], frozenset[str], frozenset[str]]
"""Keys of quantized tensors, of tensors with copies, and of those that differ (`ModelState`)."""


@dataclasses.dataclass
class _Open:
    checkpointer: Checkpointer
    reports: SaveReports
    startup: Startup
    announced: dict[int, announcements.AnnouncedSave] = dataclasses.field(default_factory=dict)
    unwritten: announcements.AnnouncedSave | None = None
    """The last save, if it was skipped or is for memory only."""
    failures_in_a_row: int = 0

    def why_stop(self, failed: Outcome, config: Config, *, last: bool) -> str | None:
        """Return why training must stop after a failed save; None: it continues.

        Args:
            last: training has ended.
        """
        if config.on_failure == "raise":
            return failed.error
        is_first = config.stop_on_failed_first_save and not self.reports.has_committed
        if is_first and failed.lasts and not last:
            return (
                f"training stops, as no save of this start has succeeded yet and iteration "
                f"{failed.iteration} has failed for a reason that stays until somebody acts "
                f"('stop_on_failed_first_save: false' lets it continue): {failed.error}"
            )
        allowed = config.failures_in_a_row
        if allowed is None or self.failures_in_a_row < allowed:
            return None
        many = self.failures_in_a_row > 1
        return (
            f"{self.failures_in_a_row} save{'s in a row have' if many else ' has'} failed, and "
            f"'failures_in_a_row' is {allowed}; the last one, iteration {failed.iteration}: "
            f"{failed.error}"
        )


class Session:
    """The checkpointers of this process."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.loop_timer = LoopTimer()
        self._open: dict[str, _Open] = {}
        #: Save directories, as given, of which all phases of the start are over. Looked up in every
        #: iteration.
        self._ready: set[str] = set()
        #: What the ranks had told each other of the model, by save directory that was closed.
        self._agreed: dict[str, _Agreed] = {}
        #: By directory; Megatron may open a checkpointer again after it has ended training.
        self._reports: dict[str, SaveReports] = {}
        self._runs: dict[str, Run] = {}
        self._nodes: Sequence[Hashable] | None = None
        self._fork_depth = forks.depth()

    def checkpointer(self, root: str) -> Checkpointer:
        """Return the checkpointer for save directory `root`, made on first use."""
        given, root = root, os.path.abspath(root)
        self._forget_inherited()
        if root not in self._open:
            announcements.ask_for_memory_saves(
                checkpointing().get_args(), self.config.memory_interval
            )
            made = Checkpointer(given, self.config)
            if root in self._agreed:
                # Megatron ends asynchronous saves before it saves for the last time.
                state = made.model_state
                agreed = self._agreed.pop(root)
                state.quantized_keys, state.copied_keys, state.differing_keys = agreed
            # Or the last save would ask the job's store for an id, which may be gone by then.
            made.run = self._runs.setdefault(root, made.run)
            startup = Startup(made, self.note_nodes)
            self._open[root] = _Open(made, self._reports_of(root, made.rank), startup)
            exit_status.watch()
            if self._nodes is not None:
                made.model_state.note_nodes(self._nodes)
        return self._open[root].checkpointer

    def startup(self, root: str) -> Startup:
        """Return the phases that come before the first save to `root`."""
        self.checkpointer(root)
        return self._open[os.path.abspath(root)].startup

    def is_ready(self, root: str) -> bool:
        """Return whether all phases of the start of saves to `root` are over."""
        return root in self._ready

    def note_ready(self, root: str) -> None:
        self._ready.add(root)

    def _forget_inherited(self) -> None:
        """In a forked child, forget the checkpointers of the parent, which still trains."""
        if forks.depth() != self._fork_depth:
            self._fork_depth = forks.depth()
            self._forget_open()
            self._reports.clear()

    def _forget_open(self) -> None:
        """Forget the checkpointers; a job that saves later in this process starts from phase 1."""
        self._open.clear()
        self._ready.clear()

    def note_nodes(self, nodes: Sequence[Hashable]) -> None:
        """Note the node of every rank, for the checkpointers of this process, later ones too."""
        self._nodes = nodes
        for opened in self._open.values():
            opened.checkpointer.model_state.note_nodes(nodes)

    def _reports_of(self, root: str, rank: int) -> SaveReports:
        if root not in self._reports:
            self._reports[root] = SaveReports(root, rank)
            if rank == 0:
                # Now, while storage is known to answer: a failed save may have found that it hangs.
                with contextlib.suppress(FlashCkptError, OSError):
                    self._reports[root].found(tracked_iteration(open_storage(root)))
        return self._reports[root]

    def resumed(self, root: str, iteration: int) -> None:
        """Note that training continues from a checkpoint in storage, perhaps an older one."""
        self._open[os.path.abspath(root)].reports.found(iteration)

    def saved(
        self, root: str, save: announcements.AnnouncedSave, report: SaveReport, *, memory_only: bool
    ) -> None:
        """Remember what to say when `save` is committed, or report why it was skipped."""
        if report.is_repeat:
            return
        opened = self._open[os.path.abspath(root)]
        if not memory_only:
            opened.reports.wanted(save.iteration)
        if report.refusal is not None:
            opened.reports.skipped(save.iteration, report.refusal)
        opened.unwritten = save if memory_only or report.refusal is not None else None
        if not memory_only and not report.skipped:
            opened.announced[save.iteration] = save

    def wait_copied(self) -> None:
        """Return when nothing is being copied: the state of the model may change."""
        self._forget_inherited()
        for opened in self._open.values():
            opened.checkpointer.link.stager.wait_copied()

    def finalize(self, *, blocking: bool, last: bool = False, announces: bool = True) -> None:
        """Report what became of the saves; with `blocking`, of all of them.

        Args:
            last: training ends here, so what it called for last must be in storage.
            announces: say so, in Megatron's words, if there is something to wait for.

        Raises:
            SaveFailedError: a save failed and `on_failure` is `raise`, or `failures_in_a_row` did,
                or the first one did (`stop_on_failed_first_save`).
        """
        self._forget_inherited()
        failures = []
        for opened in self._open.values():
            if last:
                self._write_last(opened)
            if blocking and announces and opened.checkpointer.pending:
                announcements.announce_drain(checkpointing().get_args())
            outcomes = opened.checkpointer.wait() if blocking else opened.checkpointer.saves.poll()
            # Whoever follows the log or the latest artifact must end up with the newest.
            for outcome in sorted(outcomes, key=lambda outcome: outcome.iteration):
                if not self._report(opened, outcome):
                    opened.failures_in_a_row += 1
                    failures.append(opened.why_stop(outcome, self.config, last=last))
                elif not outcome.kept:  # what went to memory says nothing of storage
                    opened.failures_in_a_row = 0
        if reasons := [reason for reason in failures if reason]:
            raise SaveFailedError("; ".join(reasons))

    def _write_last(self, opened: _Open) -> None:
        """Save to storage what was called for last, if it was skipped or is in memory only."""
        save, opened.unwritten = opened.unwritten, None
        if save is None or announcements.saves_after_training(
            checkpointing().get_args(), save.iteration
        ):
            return
        try:
            if opened.checkpointer.write_last() is None:
                return
        except UnsupportedError as error:
            opened.reports.wanted(save.iteration)
            opened.reports.skipped(save.iteration, str(error))
            return
        opened.reports.wanted(save.iteration)
        opened.announced[save.iteration] = save
        if opened.checkpointer.rank == 0:
            print(
                f"  flashckpt: the last save, iteration {save.iteration}, is written to storage "
                "before the job ends",
                flush=True,
            )

    def _report(self, opened: _Open, outcome: Outcome) -> bool:
        """Log one outcome; return whether it is a success."""
        own = opened.checkpointer.saves.traces.end(outcome.save_id)
        failures = opened.failures_in_a_row + 1 if outcome.error is not None else 0
        write_scalars(lambda: save_scalars(outcome, own, failures), outcome.iteration)
        if outcome.kept:
            opened.reports.kept(outcome)
            return True
        save = opened.announced.pop(outcome.iteration, None)
        if outcome.error is not None:
            opened.reports.failed(outcome)
            return False
        if save is not None:
            announcements.announce_committed(checkpointing().get_args(), save)
        opened.reports.committed(outcome)
        return True

    def close(self, *, leave: bool) -> None:
        """Hang up; with `leave`, give the host memory back (no restart is expected)."""
        for root, opened in self._open.items():
            state = opened.checkpointer.model_state
            agreed = (state.quantized_keys, state.copied_keys, state.differing_keys)
            self._agreed[root] = agreed
            opened.reports.has_agent = opened.checkpointer.close(leave=leave)
        self._forget_open()

    def end(self) -> bool:
        """Wait for pending saves, so that a job that ends right after its last save commits it.

        After an unhandled exception wait for no save: other ranks may be dead, this rank's GPU may
        hang, and a restart waits for this process to end. The agent finishes alone and keeps the
        slots.

        Do nothing in a forked child, which may come here by `sys.exit`: its parent still trains,
        and the outcomes are the parent's.

        Returns:
            False if the process must exit with a status that says that the last save has failed.
        """
        crashed = getattr(sys, "last_value", None) is not None
        try:
            self.finalize(blocking=not crashed, last=not crashed)
        except SaveFailedError as error:
            logger.error("%s", error)
        if crashed:
            self.abandon()
            return True
        self.close(leave=True)
        return self._ended_well()

    def _ended_well(self) -> bool:
        """Report on rank 0 which last saves are not durable; return whether all is well.

        Rank 0 decides alone: nothing is committed without it. If other ranks exited with their
        own status, the launcher might end rank 0 before it has said why.
        """
        reports = [report for report in self._reports.values() if report.rank == 0]
        self._reports.clear()
        verdicts = [
            (verdict, report.has_agent)
            for report in reports
            if (verdict := report.verdict()) is not None
        ]
        fails = self.config.exit_nonzero_unless_durable
        if not fails:
            status = "the exit status is not changed ('exit_nonzero_unless_durable' is false)"
        elif exit_status.is_success():
            status = "the exit status is 1 ('exit_nonzero_unless_durable: false' turns that off)"
        else:
            status = "the exit status is the one that the script has chosen"
        for verdict, has_agent in verdicts:
            retry = ""
            if self.config.agent.persist_on_leave and has_agent:
                retry = "; if all ranks have staged it, the agents try to write it after this exit"
            logger.error("%s%s; %s", verdict, retry, status)
        return not (verdicts and fails)

    def at_exit(self) -> None:
        """End the session, and the process with status 1 if the last save is not durable."""
        # Before the end: a handler of SIGTERM that calls `sys.exit` cannot set the status any more.
        succeeds = exit_status.is_success()
        try:
            ended_well = self.end()
        except BaseException:  # Ctrl-C among others; Python ignores what a handler at exit raises
            logger.exception("it is unknown whether the last save is durable")
            ended_well = not self.config.exit_nonzero_unless_durable
        if succeeds and not ended_well:
            exit_status.fail()

    def abandon(self) -> None:
        """Hang up after a crash; the agent keeps the slots for a restart."""
        for opened in self._open.values():
            opened.checkpointer.abandon()
        self._forget_open()


def _make() -> Session:
    # Settings are read when training starts: a wrong one must not show up at iteration 1,000.
    made = Session(load_config())
    atexit.register(made.at_exit)
    return made


session: Session = _make()
