"""Training job on CPU ranks of this machine, with the times at which iterations ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.support.forked.job import free_port

RANKS = 2
#: Environment variables that identify the processes of a job: the job's name, or for agents their
#: runtime directory.
_JOB_KEY, _AGENTS_KEY = "BENCHMARK_TRAIN_JOB", "FLASHCKPT_RUNTIME_DIR"
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
    """Arguments of every job."""
    env: dict[str, str]
    """Environment of every rank, without the variables that a launcher sets."""
    cwd: Path


class Job:
    """One job; `running` starts it and ends all its processes."""

    def __init__(
        self,
        command: list[str],
        env: dict[str, str],
        cwd: Path,
        on_iteration: Callable[[int], None],
    ) -> None:
        self.name = f"train-{uuid.uuid4().hex[:12]}"
        self.ended_at: dict[int, float] = {}
        """Time at which an iteration's log line arrived; a save begins after that line."""
        self._marks = {(_JOB_KEY, self.name)}
        if _AGENTS_KEY in env:
            self._marks.add((_AGENTS_KEY, env[_AGENTS_KEY]))
        self._lines: list[str] = []
        self._on_iteration = on_iteration
        self._command, self._cwd = command, cwd
        self._env = {
            **env,
            _JOB_KEY: self.name,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": self.name,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "PYTHONUNBUFFERED": "1",
        }
        self.started_at = 0.0
        self._ranks: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []

    def start(self) -> None:
        """Start the ranks; `end` ends them, even after an interrupted start."""
        self.started_at = time.perf_counter()
        for rank in map(str, range(RANKS)):
            self._ranks.append(
                subprocess.Popen(
                    self._command,
                    env={**self._env, "RANK": rank, "LOCAL_RANK": rank},
                    cwd=self._cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                )
            )
        for process in self._ranks:
            reader = threading.Thread(target=self._read, args=(process,), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _read(self, rank: subprocess.Popen[str]) -> None:
        assert rank.stdout is not None
        with rank.stdout:
            for line in rank.stdout:
                now = time.perf_counter()
                self._lines.append(line)
                if match := _ITERATION.search(line):
                    iteration = int(match[1])
                    self.ended_at.setdefault(iteration, now)
                    self._on_iteration(iteration)

    @property
    def log(self) -> str:
        """Output of all ranks so far."""
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
            JobError: a rank has ended before, or `deadline` has passed.
        """
        while not condition():
            if any(rank.poll() is not None for rank in self._ranks) and not condition():
                self._join_readers()
                raise self.error(f"ended before {what}")
            if time.perf_counter() > deadline:
                raise self.error(f"took too long: {what} did not come")
            time.sleep(_POLL_S)

    def wait(self, deadline: float) -> float:
        """Wait until all ranks have ended with status 0; return the time of the last end.

        Raises:
            JobError: a rank failed, or `deadline` has passed.
        """
        while any(rank.poll() is None for rank in self._ranks):
            if any(rank.poll() for rank in self._ranks):
                break
            if time.perf_counter() > deadline:
                raise self.error("took too long to end")
            time.sleep(_POLL_S)
        ended_at = time.perf_counter()
        if statuses := [rank.returncode for rank in self._ranks if rank.poll()]:
            self._join_readers()
            raise self.error(f"ended with {statuses[0]}")
        return ended_at

    def error(self, what: str) -> JobError:
        """Return an error with the last error, or the last lines, of the job's output."""
        errors = _ERROR.findall(self.log)
        lines = [line for line in self.log.splitlines() if not line.startswith("WARNING:")]
        last = errors[-1:] or lines[-_TAIL_LINES:]
        return JobError("\n  ".join([what, *last]), self.log)

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
        self.kill()
        rest = self.processes()
        for process in rest:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(rest, timeout=_LEAVE_S)
        # A short wait: a reader ends with the last process that has the pipe, which may stay.
        self._join_readers()
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
        result = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if self._marks & process.environ().items():
                    result.append(process)
        return result

    def _join_readers(self) -> None:
        for reader in self._readers:
            reader.join(timeout=0.5)


@contextlib.contextmanager
def running(
    megatron: Megatron,
    runner: tuple[str, ...],
    arguments: list[str],
    env: dict[str, str],
    on_iteration: Callable[[int], None],
) -> Iterator[Job]:
    """Yield a started job; end all its processes with the context."""
    command = [*runner, str(megatron.script), *megatron.flags, *arguments]
    job = Job(command, {**megatron.env, **env}, megatron.cwd, on_iteration)
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


def kept_environment() -> dict[str, str]:
    """Return this process's environment without settings of the package."""
    return {name: value for name, value in os.environ.items() if not name.startswith("FLASHCKPT")}
