"""A checkpointer in use: its start, the saves that are under way, and the reports on them."""

from __future__ import annotations

import contextlib
import dataclasses

from megatron_flashckpt.agent.protocol import Outcome
from megatron_flashckpt.catalog.listing import newest_durable
from megatron_flashckpt.errors import FlashCkptError, UnsupportedError
from megatron_flashckpt.save.checkpointer import Checkpointer
from megatron_flashckpt.save.copy_figures import CopyFigures, idle_s
from megatron_flashckpt.save.request import SaveReport
from megatron_flashckpt.save.save_reports import SaveReports, say
from megatron_flashckpt.save.startup import Startup
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.tracing import LOOP, Recorder


def reports_on(root: str, rank: int) -> SaveReports:
    """Return the reports on saves to `root`, which know the newest durable checkpoint there."""
    reports = SaveReports(root, rank)
    if rank == 0:
        # Read now, while storage answers: storage may hang when a save fails.
        with contextlib.suppress(FlashCkptError, OSError):
            reports.note_durable(newest_durable(open_store(root)))
    return reports


@dataclasses.dataclass
class OpenCheckpointer:
    """The saves of one rank to one directory, from the start to the last report."""

    checkpointer: Checkpointer
    reports: SaveReports
    startup: Startup
    staged: list[SaveReport] = dataclasses.field(default_factory=list)
    """Saves whose figures are not reported yet, in order."""
    recorders: dict[str, Recorder] = dataclasses.field(default_factory=dict)
    """Timings of saves whose outcomes are not reported yet, by save id."""
    unwritten: int | None = None
    """Iteration of the last save if it was skipped or is for memory only; else None."""

    def saved(self, report: SaveReport) -> None:
        """Keep a save for its later reports, or report why it was skipped."""
        if report.is_repeat:
            return
        iteration, memory_only = report.request.iteration, report.request.memory_only
        if not memory_only:
            self.reports.note_agent_log(self.checkpointer.config.runtime_dir)
            self.reports.requested(iteration)
        if report.refusal is not None:
            self.reports.skipped(iteration, report.refusal)
        self.unwritten = iteration if memory_only or report.refusal is not None else None
        if report.copies is not None:
            self.recorders[report.save_id] = report.recorder
            self.staged.append(report)

    def write_last(self) -> bool:
        """Save the last state to storage, if its save was skipped or went to memory only.

        Returns:
            True if the save has begun.
        """
        iteration, self.unwritten = self.unwritten, None
        if iteration is None:
            return False
        try:
            report = self.checkpointer.write_last()
        except UnsupportedError as error:
            self.reports.requested(iteration)
            self.reports.skipped(iteration, str(error))
            return False
        if report is None:
            return False
        if report.copies is not None:
            self.recorders[report.save_id] = report.recorder
        self.reports.requested(iteration)
        say(
            self.checkpointer.rank,
            f"the last save, iteration {iteration}, is written to storage before the job ends",
        )
        return True

    def collect(self, *, blocking: bool) -> list[Outcome]:
        """Return the outcomes since the last call, in order of iterations.

        Args:
            blocking: wait for all pending saves.
        """
        checkpointer = self.checkpointer
        outcomes = checkpointer.wait() if blocking else checkpointer.saves.poll()
        self._report_staged()
        # So that the newest is the last in the log and the artifacts.
        return sorted(outcomes, key=lambda outcome: outcome.iteration) if outcomes else outcomes

    def _report_staged(self) -> None:
        """Report the saves whose copies have ended; the others follow in a later iteration."""
        while self.staged and (copies := self.staged[0].copies) and copies.are_known():
            report = self.staged.pop(0)
            if not copies.failed:
                say(self.checkpointer.rank, _staged_line(report, copies))

    def announce(self, outcome: Outcome, own: Recorder | None, failures: int) -> None:
        """Do what the training loop does at the end of a save, before it is reported.

        Args:
            own: this rank's timings of the save if they are known.
            failures: number of saves that have failed in a row.
        """

    def report(self, outcomes: list[Outcome], *, last: bool) -> str | None:
        """Log outcomes; return why training must stop, or None if it continues.

        Args:
            last: True if training has ended.
        """
        reason = None
        for outcome in outcomes:
            reports, own = self.reports, self.recorders.pop(outcome.save_id, None)
            failures = 0 if outcome.error is None else reports.failures_in_a_row + 1
            self.announce(outcome, own, failures)
            if outcome.kept:
                reports.kept(outcome)
            elif outcome.error is None:
                reports.committed(outcome)
            else:
                reports.failed(outcome)
                # A slow rank may learn of more failures; all ranks stop with one message.
                reason = reason or self._why_stop(outcome, last=last)
        return reason

    def _why_stop(self, failed: Outcome, *, last: bool) -> str | None:
        """Return why training must stop after a failed save, or None if training continues."""
        config = self.checkpointer.config
        if config.on_failure == "raise":
            return failed.error
        is_first = config.stop_on_failed_first_save and not self.reports.has_committed
        if is_first and failed.lasts and not last:
            return (
                f"training stops, because no save has succeeded since this start and iteration "
                f"{failed.iteration} has failed for a reason that persists until someone acts "
                f"('stop_on_failed_first_save: false' lets training continue): {failed.error}"
            )
        allowed = config.failures_in_a_row
        failures = self.reports.failures_in_a_row
        if allowed is None or failures < allowed:
            return None
        return (
            f"{failures} save{'s in a row have' if failures > 1 else ' has'} failed, "
            f"and 'failures_in_a_row' is {allowed}; the last one, iteration {failed.iteration}: "
            f"{failed.error}"
        )

    def close(self, *, leave: bool) -> None:
        """Close the checkpointer; with `leave`, free the host memory (no restart is expected)."""
        agent = self.checkpointer.link.current
        if agent is not None:
            self.reports.unit = agent.facts.life
        self.reports.has_agent = self.checkpointer.close(leave=leave)


def _staged_line(report: SaveReport, copies: CopyFigures) -> str:
    """Return the line of the job's log about a save whose figures are known. Called once."""
    request, recorder = report.request, report.recorder
    recorder.step_on_gpu_s = copies.step_wait_s()
    where = "as the training loop sees it" if recorder.call == LOOP else "in save_checkpoint"
    if request.must_wait:
        where += " before its wait for a durable checkpoint"
    if (idle := idle_s(recorder)) is not None:
        where += f", {1000 * idle:.1f} ms of them with an idle GPU"
    kept = " for host memory only" if request.memory_only else ""
    return (
        f"iteration {request.iteration} staged{kept}, {copies.nbytes / 2**20:.1f} MiB on rank 0, "
        f"blocked {1000 * recorder.call_s:.1f} ms {where}, then "
        f"{1000 * recorder.step_s:.1f} ms for the copies; {_copied(copies)}"
    )


def _copied(figures: CopyFigures) -> str:
    text = f"copied at {figures.nbytes / 1e9 / max(figures.seconds, 1e-9):.1f} GB/s"
    if figures.locked_nbytes is None:
        return text
    if figures.part_bytes_per_s is not None:
        text += f" (single parts {figures.part_bytes_per_s / 1e9:.1f})"
    total = figures.slab_nbytes
    return (
        f"{text}; of {total / 2**30:.1f} GiB of slots {figures.locked_nbytes / 2**30:.1f} are "
        f"page-locked, {figures.huge_nbytes / 2**30:.1f} in pages of 2 MiB"
    )
