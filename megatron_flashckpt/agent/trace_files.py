"""Traces of saves: one file per save and node, in the Chrome trace format that Perfetto opens.

Each rank is a process of the trace; its tracks are the training thread, the copy thread and the
agent's work for the rank. The agent's own process shows the commit, up to the report of the result.
Times are wall-clock times, so that files of several nodes can be merged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from megatron_flashckpt.agent.worker import Worker
from megatron_flashckpt.config import Trace
from megatron_flashckpt.file_format.file_names import iteration_dir
from megatron_flashckpt.storage.posix_files import temporary_name
from megatron_flashckpt.tracing import Recorder, Span

logger = logging.getLogger(__name__)

#: Saves whose phases are in memory. Older ones are written, or will not be requested.
_MOST = 8
#: Number of an agent's process in the trace: beyond those of ranks.
_AGENT = 1_000_000
#: Names of a trainer's threads, for people.
_TRACKS = {"MainThread": "training", "flashckpt-stage": "copies"}


@dataclasses.dataclass
class _Save:
    iteration: int
    spans: list[tuple[int | None, Span]] = dataclasses.field(default_factory=list)
    """Spans with their rank; None: work of the agent for all ranks."""


class Traces:
    """Phases of the node's saves. Without a directory, nothing is recorded."""

    def __init__(self, root: str, trace: Trace) -> None:
        self._root = root
        #: Distinguishes this save directory's files from those of other jobs.
        self._key = xxhash.xxh3_64_hexdigest(root.encode())[:8]
        self.first_rank = 0
        """Lowest rank of this node; distinguishes its files from those of other nodes."""
        self._lock = threading.Lock()
        self._saves: dict[str, _Save] = {}
        #: Writes all files, one after the other; no trainer and no save waits for it.
        self._worker = Worker("traces", "a trace of a save was not written")
        self.configure(trace)

    def configure(self, trace: Trace) -> None:
        """Use another directory or another number of kept traces from now on."""
        self._directory = Path(self._root, trace.directory) if trace.directory else None
        self._keep = trace.keep

    def add(self, iteration: int, save_id: str, rank: int | None, spans: Iterable[Span]) -> None:
        """Record phases of a save."""
        if self._directory is None:
            return
        with self._lock:
            save = self._saves.setdefault(save_id, _Save(iteration))
            save.spans += [(rank, span) for span in spans]
            while len(self._saves) > _MOST:
                del self._saves[next(iter(self._saves))]

    @contextlib.contextmanager
    def recording(self, iteration: int, save_id: str, rank: int | None) -> Iterator[None]:
        """Record the phases of this thread's work for a save inside the context."""
        if self._directory is None:
            yield
            return
        recorder = Recorder()
        try:
            with recorder.recording():
                yield
        finally:
            self.add(iteration, save_id, rank, recorder.spans)

    def write(self, save_id: str) -> None:
        """Have the trace of a save written, replacing its former version."""
        if self._directory is not None:
            self._worker.add(functools.partial(self._write, save_id))

    def close(self, within_s: float) -> None:
        """Return when all traces are written, or after `within_s`."""
        self._worker.close(within_s)

    def _write(self, save_id: str) -> None:
        """Write the trace of a save; a failure is only logged."""
        directory = self._directory  # read once: a later run may change it
        with self._lock:
            save = self._saves.get(save_id)
            if directory is None or save is None:
                return
            spans = list(save.spans)
        suffix = f"-{self._key}.rank_{self.first_rank:05d}.trace.json"
        name = f"{iteration_dir(save.iteration)}-{save_id}{suffix}"
        encoded = msgspec.json.encode(
            chrome_trace(save.iteration, save_id, self.first_rank, spans, self._root)
        )
        temporary = directory / temporary_name(name)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(encoded)
                os.replace(temporary, directory / name)
            finally:
                temporary.unlink(missing_ok=True)
            self._prune(directory, suffix)
        except OSError as error:
            logger.warning("no trace of iteration %d: %s", save.iteration, error)

    def _prune(self, directory: Path, suffix: str) -> None:
        """Delete this node's traces of this save directory, except the newest ones."""
        traces = [path for path in directory.iterdir() if path.name.endswith(suffix)]
        traces.sort(key=lambda path: path.lstat().st_mtime_ns)
        for path in traces[: -self._keep]:
            path.unlink(missing_ok=True)


def chrome_trace(
    iteration: int,
    save_id: str,
    first_rank: int,
    spans: Iterable[tuple[int | None, Span]],
    root: str,
) -> dict[str, Any]:
    """Return the trace of one save on one node, for Perfetto and chrome://tracing.

    Format: "Trace Event Format", Google, 2016 (complete events `X`, names `M`).

    Args:
        first_rank: lowest rank of the node.
        root: the save directory.
    """
    to_wall = time.time() - time.monotonic()
    host = socket.gethostname()
    events: list[dict[str, Any]] = []
    tracks: dict[tuple[int, str], int] = {}
    for rank, span in spans:
        pid = _AGENT + first_rank if rank is None else rank
        tid = tracks.setdefault((pid, span.thread), len(tracks) + 1)
        times = {"ts": 1e6 * (span.start + to_wall), "dur": 1e6 * span.seconds}
        events.append(
            {"name": span.name, "cat": "save", "ph": "X", "pid": pid, "tid": tid, **times}
        )
    for (pid, thread), tid in tracks.items():
        # The number of a pool's thread is left out.
        track = _TRACKS.get(thread, f"agent: {thread.partition('_')[0]}")
        events.append(_name("thread_name", pid, tid, track))
    for pid in sorted({pid for pid, _ in tracks}):
        name = f"rank {pid}" if pid < _AGENT else f"agent on {host}"
        events.append(_name("process_name", pid, 0, name))
    facts = {"iteration": iteration, "save": save_id, "host": host, "root": root}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
