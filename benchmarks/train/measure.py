"""One system in one round: a whole run with saves, then restarts from its checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.resources import drop_from_cache, fsync
from benchmarks.train.job import Job, JobError, Megatron, running
from benchmarks.train.sizes import Schedule
from benchmarks.train.storage_limit import StorageLimit
from benchmarks.train.systems import System
from benchmarks.train.watch import tracked
from tools.compat.tree import Run as Printed

#: File that names the newest checkpoint, and DLRover's additional file.
TRACKER, _DLROVER_TRACKER = "latest_checkpointed_iteration.txt", "dlrover_latest.txt"
#: New steps after a restart, whose losses are compared.
RESUMED_STEPS = 2
#: Start of this package's lines in a log.
_OWN_LINE = "flashckpt: "
#: Seconds that the last save may take to be committed after its job has ended.
_COMMIT_S = 60.0

#: Losses of all ranks by iteration, exactly or as printed, in a fixed order.
Losses = dict[int, list[str]]


@dataclasses.dataclass
class Restart:
    """Start of new ranks from a checkpoint."""

    resumed_from: int
    load_s: float
    """Seconds of Megatron's own timer around `load_checkpoint`."""
    first_step_s: float
    """Seconds from the start of the ranks, or from the kill, to the end of the first new step."""
    losses: Losses


@dataclasses.dataclass
class Measured:
    ended_at: dict[int, float]
    """Seconds from the start of the ranks to the end of each iteration."""
    exit_s: float
    """Seconds from the last iteration until all ranks have ended and the last save is durable."""
    losses: Losses
    owed_s: float = 0.0
    """Part of `exit_s` for an fsync of the last checkpoint, which the system has omitted."""
    saved: list[int] = dataclasses.field(default_factory=list)
    """Iterations of the system's checkpoints."""
    nbytes: int = 0
    blocked_s: list[float] = dataclasses.field(default_factory=list)
    """Seconds of Megatron's own timer around `save_checkpoint`, without the save at the end."""
    durable_s: list[float] = dataclasses.field(default_factory=list)
    """Seconds from the end of an iteration until the tracker names its save, likewise."""
    peak_nbytes: int = 0
    """Largest fall of the host's available memory from the start of the ranks to their end."""
    restarts: dict[str, Restart] = dataclasses.field(default_factory=dict)
    """Restarts by source: `storage`, `memory`."""
    restart_error: str = ""
    """Error of a failed restart; the other figures of the run count all the same."""


@dataclasses.dataclass
class Session:
    """Settings that all runs of a study share."""

    schedule: Schedule
    root: Path
    timeout_s: float
    progress: Callable[[str], None] = lambda step: None
    """Receives the name of the current step."""
    limit: StorageLimit | None = None
    restarts: bool = True
    """True if new ranks load the checkpoints of a run."""
    silence_s: float = float("inf")
    """Seconds without output after which a job counts as hanging."""
    ends_at: float = float("inf")
    """Time on the monotonic clock at which every job is ended."""

    def measure(self, system: System, megatron: Megatron) -> Measured:
        """Run a system once, and restart from its checkpoints.

        Raises:
            JobError: a job failed or took too long.
        """
        where = self.root / "run"
        where.mkdir()
        try:
            # Short: the path of an agent's socket has at most 107 bytes.
            with tempfile.TemporaryDirectory(prefix="fc") as agents:
                return _Measurement(self, system, megatron, where, Path(agents)).measure()
        finally:
            shutil.rmtree(where, ignore_errors=True)
            # Complete all writes of this system before the next one trains.
            os.sync()

    def warm_up(self, megatron: Megatron) -> None:
        """Train one iteration, so that the first run of a study does not start slower."""
        unsaved = System("warm-up", "warm-up", saves=False)
        session = dataclasses.replace(self, schedule=Schedule(interval=2, saves=0))
        # The next run reports the same failure.
        with contextlib.suppress(JobError):
            session.measure(unsaved, megatron)


class _Measurement:
    def __init__(
        self, session: Session, system: System, megatron: Megatron, where: Path, agents: Path
    ) -> None:
        self._session = session
        self._schedule = session.schedule
        self._system = system
        self._megatron = megatron
        self._where, self._agents = where, agents
        self._checkpoints = where / "checkpoints"

    def measure(self) -> Measured:
        result = self._whole_run()
        if self._system.saves and self._session.restarts:
            early = [number for number in result.saved if number <= self._schedule.resumed_from]
            if not early:
                raise JobError(f"there is no checkpoint before iteration {max(result.ended_at)}")
            self._cut_back(early[-1])
            drop_from_cache(self._files(self._checkpoints))
            try:
                self._restart(result, early[-1])
            except JobError as error:
                if self._system.hangs_with and self._system.hangs_with in error.log:
                    raise
                result.restart_error = str(error)
            else:
                self._check_limit(result)
        return result

    def _check_limit(self, result: Measured) -> None:
        """Raise JobError if the last save or the load went past the storage's limit."""
        times = {"save": result.exit_s, "load": result.restarts["storage"].load_s}
        for what, seconds in times.items():
            if self._session.limit and self._session.limit.was_passed(result.nbytes, seconds):
                raise JobError(
                    f"its {what} took {seconds:.1f} s: the storage's limit had no effect"
                )

    def _whole_run(self) -> Measured:
        last = self._schedule.iterations
        deadline = self._deadline()
        every = self._schedule.interval if self._system.saves else 0
        with self._running("whole", save_every=every, load=False) as job:
            ended_at = job.wait(deadline)
            if last not in job.ended_at:
                raise job.error(f"ended before iteration {last}")
            result = Measured(
                {number: at - job.started_at for number, at in sorted(job.ended_at.items())},
                ended_at - job.ended_at[last],
                self._losses("whole", job),
                peak_nbytes=job.watch.peak_nbytes,
            )
            if self._system.saves:
                newest = self._await_commit(job, last)
                committed_at = time.perf_counter()
                files = self._files(self._checkpoints / f"iter_{newest:07d}")
                fsync(files)
                result.owed_s = time.perf_counter() - committed_at
                result.exit_s = time.perf_counter() - job.ended_at[last]
                result.blocked_s = job.blocked_s
                tracked_at = job.watch.tracked_at
                result.durable_s = [
                    tracked_at[number] - job.ended_at[number]
                    for number in self._schedule.saved_at
                    if number in tracked_at
                ]
                result.saved = sorted(
                    int(directory.name[5:]) for directory in self._checkpoints.glob("iter_*")
                )
                result.nbytes = sum(file.stat().st_size for file in files)
            job.await_agent()
        return result

    def _restart(self, result: Measured, first: int) -> None:
        """Start new ranks from checkpoint `first`, and from memory if the system supports that."""
        again = self._system.from_memory
        newest = self._schedule.saved_after(first) if again else first
        with self._running("storage", save_every=newest if again else 0, load=True) as job:
            deadline = self._deadline()
            self._await_steps(job, newest, deadline, at_least=1 if again else RESUMED_STEPS)
            if again:
                job.wait_for(lambda: self._tracked() == newest, f"save {newest}", deadline)
            killed_at = job.kill()
            result.restarts["storage"] = Restart(
                first,
                job.load_s,
                self._first_step_s(job, first, job.started_at),
                self._losses("storage", job),
            )
            if not again:
                return
            # The agent of the killed ranks still runs and holds the newest checkpoint in memory.
            with self._running("memory", save_every=newest, load=True) as other:
                self._await_steps(other, newest, self._deadline(), at_least=RESUMED_STEPS)
                other.kill()
                if f"iteration {newest} was restored from memory" not in other.log:
                    own = [line.strip() for line in other.log.splitlines() if _OWN_LINE in line]
                    raise JobError(
                        "\n  ".join(["did not restore from memory; its log:", *own]), other.log
                    )
                result.restarts["memory"] = Restart(
                    newest,
                    other.load_s,
                    self._first_step_s(other, newest, killed_at),
                    self._losses("memory", other),
                )

    def _running(
        self, name: str, *, save_every: int, load: bool
    ) -> contextlib.AbstractContextManager[Job]:
        arguments = ["--train-iters", str(self._schedule.iterations)]
        arguments += self._system.flags
        if save_every:
            arguments += ["--save", str(self._checkpoints), "--save-interval", str(save_every)]
        if load:
            arguments += ["--load", str(self._checkpoints)]
        env = {
            "LOSS_LOG": str(self._where / f"{name}-losses"),
            "FLASHCKPT_RUNTIME_DIR": str(self._agents),
            "TMPDIR": str(self._where),
        }
        if limit := self._session.limit:
            env |= limit.environment(self._checkpoints)
        kind = "training" if name == "whole" else f"restart from {name}"
        self._session.progress(f"{kind}: starting")

        def on_iteration(iteration: int) -> None:
            self._session.progress(f"{kind}: step {iteration} of {self._schedule.iterations}")

        return running(
            self._megatron,
            self._system.runner,
            arguments,
            env,
            on_iteration,
            self._checkpoints / TRACKER if save_every else None,
            self._session.silence_s,
        )

    def _deadline(self) -> float:
        """Return the time at which a job that starts now is ended."""
        left_s = self._session.ends_at - time.monotonic()
        return time.perf_counter() + min(self._session.timeout_s, left_s)

    def _await_steps(self, job: Job, resumed_from: int, deadline: float, *, at_least: int) -> None:
        """Wait until `at_least` iterations after `resumed_from` have ended."""
        wanted = resumed_from + at_least
        job.wait_for(lambda: wanted in job.ended_at, f"iteration {wanted}", deadline)

    def _first_step_s(self, job: Job, resumed_from: int, began_at: float) -> float:
        first = min(job.ended_at)
        if first != resumed_from + 1:
            raise job.error(f"resumed with iteration {first}, not {resumed_from + 1}")
        return job.ended_at[first] - began_at

    def _await_commit(self, job: Job, iteration: int) -> int:
        """Return the newest checkpoint; wait for `iteration` if the system never skips a save."""
        deadline = time.perf_counter() + _COMMIT_S
        if self._system.leaves_out_saves and (newest := self._tracked()) is not None:
            return newest
        while self._tracked() != iteration:
            if time.perf_counter() > deadline:
                raise job.error(f"ended, but its newest checkpoint is that of {self._tracked()}")
            time.sleep(0.005)
        return iteration

    def _tracked(self) -> int | None:
        return tracked(self._checkpoints / TRACKER)

    def _cut_back(self, iteration: int) -> None:
        """Remove all checkpoints newer than `iteration`."""
        for directory in self._checkpoints.glob("iter_*"):
            if int(directory.name[5:]) > iteration:
                shutil.rmtree(directory)
        for tracker in (TRACKER, _DLROVER_TRACKER):
            if (self._checkpoints / tracker).exists():
                (self._checkpoints / tracker).write_text(str(iteration))

    @staticmethod
    def _files(directory: Path) -> list[Path]:
        return [path for path in directory.rglob("*") if path.is_file()]

    def _losses(self, name: str, job: Job) -> Losses:
        """Return the exact losses that the script wrote, or an old Megatron's printed losses."""
        losses: Losses = {}
        for file in sorted(self._where.glob(f"{name}-losses.*")):
            for line in file.read_text().splitlines():
                iteration, _, loss = line.partition(" ")
                losses.setdefault(int(iteration), []).append(f"{file.suffix[1:]}:{loss}")
        if losses:
            return losses
        printed = Printed(job.log, self._where).figures
        return {number: [str(loss), str(norm)] for number, (loss, norm) in printed.items()}
