"""Training job on CPU ranks of this machine, with the times at which iterations ended."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.train import descendants
from benchmarks.train.starts import Start, new_process
from benchmarks.train.watch import Watch
from tests.support.forked.job import free_port

#: Ranks of a job on CPUs.
RANKS = 2
_ITERATION = re.compile(r" iteration +(\d+)/")
_LOAD_TIME, _SAVE_TIME = (
    re.compile(rf"{name}-checkpoint \.+: \(([\d.]+), ([\d.]+)\)") for name in ("load", "save")
)
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception)\b.*)$", re.M)
_POLL_S = 0.005
#: Seconds that an agent may take to exit after its job has ended.
_LEAVE_S = 10.0
_TAIL_LINES = 12


class JobError(Exception):
    """A job failed, took too long, or did not do what it was started for."""

    def __init__(self, what: str, log: str = "") -> None:
        super().__init__(what)
        self.log = log


@dataclasses.dataclass(frozen=True)
class Megatron:
    """Megatron installation, with the script that calls its `pretrain`."""

    script: Path
    flags: tuple[str, ...]
    env: dict[str, str]
    """Environment of every rank, without the variables that a launcher sets."""
    cwd: Path
    ranks: int = RANKS
    start: Start = new_process


class Job:
    """One job; `running` starts it and ends all its processes."""

    def __init__(
        self,
        megatron: Megatron,
        command: list[str],
        env: dict[str, str],
        on_iteration: Callable[[int], None],
        tracker: Path | None,
        silence_s: float,
    ) -> None:
        self.name = f"train-{uuid.uuid4().hex[:12]}"
        self.ended_at: dict[int, float] = {}
        """Time at which an iteration's log line arrived; a save begins after that line."""
        self._lines: list[str] = []
        self._on_iteration = on_iteration
        self._megatron, self._command, self._tracker = megatron, command, tracker
        self._silence_s = silence_s
        self._env = {
            **megatron.env,
            **env,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(megatron.ranks),
            "LOCAL_WORLD_SIZE": str(megatron.ranks),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": self.name,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "PYTHONUNBUFFERED": "1",
        }
        self.started_at = 0.0
        self._ranks: list[Any] = []
        self._watch: Watch | None = None
        self._outputs = Path(tempfile.mkdtemp(prefix="fc-job-"))
        self._earlier = descendants.descendants()

    def start(self) -> None:
        """Start the ranks; `end` ends them, even after an interrupted start."""
        outputs = [self._outputs / str(rank) for rank in range(self._megatron.ranks)]
        for output in outputs:
            output.touch()
        self._watch = Watch(outputs, self._tracker, self._on_line)
        self.started_at = time.perf_counter()
        for rank, output in enumerate(outputs):
            env = {**self._env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            cwd = self._megatron.cwd
            self._ranks.append(self._megatron.start(self._command, env, cwd, output))

    def _on_line(self, line: str, at: float) -> None:
        self._lines.append(line)
        if match := _ITERATION.search(line):
            iteration = int(match[1])
            self.ended_at.setdefault(iteration, at)
            self._on_iteration(iteration)

    @property
    def watch(self) -> Watch:
        assert self._watch is not None, "the job was not started"
        return self._watch

    @property
    def log(self) -> str:
        return "".join(list(self._lines))

    @property
    def load_s(self) -> float:
        """Seconds of Megatron's own timer around `load_checkpoint`, on the slowest rank."""
        matches = _LOAD_TIME.findall(self.log)
        if not matches:
            raise self.error("printed no time of a load")
        return float(matches[-1][1]) / 1000

    @property
    def blocked_s(self) -> list[float]:
        """Seconds of Megatron's own timer around each `save_checkpoint`, on the slowest rank."""
        return [float(match[1]) / 1000 for match in _SAVE_TIME.findall(self.log)]

    def wait_for(self, condition: Callable[[], bool], what: str, deadline: float) -> None:
        """Wait until `condition()` holds.

        Raises:
            JobError: a rank has ended before, `deadline` has passed, or the job is silent.
        """
        while not condition():
            if any(rank.poll() is not None for rank in self._ranks) and not condition():
                self.watch.finish()
                raise self.error(f"ended before {what}")
            self._check_progress(deadline, f"{what} did not come")
            time.sleep(_POLL_S)

    def wait(self, deadline: float) -> float:
        """Wait until all ranks have ended with status 0; return the time of the last end.

        Raises:
            JobError: a rank failed, `deadline` has passed, or the job is silent.
        """
        while any(rank.poll() is None for rank in self._ranks):
            if any(rank.poll() for rank in self._ranks):
                break
            self._check_progress(deadline, "it did not end")
            time.sleep(_POLL_S)
        ended_at = time.perf_counter()
        self.watch.finish()
        if statuses := [rank.returncode for rank in self._ranks if rank.poll()]:
            raise self.error(f"ended with {statuses[0]}")
        return ended_at

    def _check_progress(self, deadline: float, what: str) -> None:
        # An error before the last lines need not be the cause.
        now = time.perf_counter()
        if now > deadline:
            raise self._error(f"took too long: {what}")
        if now - self.watch.line_at > self._silence_s:
            raise self._error(f"printed nothing for {self._silence_s:g} s: {what}")

    def error(self, what: str) -> JobError:
        """Return an error with the last error, or the last lines, of the job's output."""
        return self._error(what, _ERROR.findall(self.log)[-1:])

    def _error(self, what: str, lines: Sequence[str] = ()) -> JobError:
        shown = [line for line in self.log.splitlines() if not line.startswith("WARNING:")]
        return JobError("\n  ".join([what, *(lines or shown[-_TAIL_LINES:])]), self.log)

    def kill(self) -> float:
        """Send SIGKILL to all ranks, but not to their agent; return the time before that."""
        killed_at = time.perf_counter()
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()
        return killed_at

    def end(self) -> None:
        """Kill every process of this job; remove its files in shared memory."""
        pids = {rank.pid for rank in self._ranks}
        left = {process.pid for process in descendants.end(self._earlier, pids, _LEAVE_S)}
        for rank in self._ranks:
            if rank.pid not in left:
                rank.wait()
        if self._watch is not None:
            self._watch.finish()
        shutil.rmtree(self._outputs, ignore_errors=True)
        # DLRover's saver names these files and the directory after the job.
        for file in Path("/dev/shm").glob(f"{self.name}_*"):
            file.unlink(missing_ok=True)
        shutil.rmtree(Path("/tmp/ckpt_sock") / self.name, ignore_errors=True)

    def await_agent(self) -> None:
        """Wait some seconds until no process of this ended job is left."""
        deadline = time.monotonic() + _LEAVE_S
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        """Return the living processes of this job, its agent included."""
        return descendants.living(self._earlier, {rank.pid for rank in self._ranks})


@contextlib.contextmanager
def running(
    megatron: Megatron,
    runner: tuple[str, ...],
    arguments: list[str],
    env: dict[str, str],
    on_iteration: Callable[[int], None],
    tracker: Path | None = None,
    silence_s: float = float("inf"),
) -> Iterator[Job]:
    """Yield a started job; end all its processes with the context.

    Args:
        tracker: Megatron's tracker file, which `Job.watch` observes.
        silence_s: a wait for the job fails if no rank prints a line for so long.
    """
    command = [*runner, str(megatron.script), *megatron.flags, *arguments]
    with descendants.orphans_come_here():
        job = Job(megatron, command, env, on_iteration, tracker, silence_s)
        try:
            job.start()
            yield job
        finally:
            with _undisturbed():
                job.end()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM: a second signal would leave processes of the job behind."""
    ignored = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            ignored[number] = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in ignored.items():
            signal.signal(number, handler)
