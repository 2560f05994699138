"""Traces of saves: one file per save and node, in the Chrome trace format that Perfetto opens.

Each rank is a process of the trace; its tracks are the training thread, the copy thread and the
agent's work for the rank. The agent's own process shows the commit. Times are wall-clock times, so
that files of several nodes can be merged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from megatron_flashckpt.config import Trace
from megatron_flashckpt.file_format.file_names import iteration_dir
from megatron_flashckpt.storage.posix_files import temporary_name
from megatron_flashckpt.tracing import Recorder, Span

logger = logging.getLogger(__name__)

#: Saves whose phases are in memory. Older ones are written, or will not be requested.
_MOST = 8
#: Number of an agent's process in the trace: beyond those of ranks.
_AGENT = 1_000_000
_NAME = re.compile(r"iter_\d{7,}-\d{6,18}-[0-9a-f]{4}\.\d{5,18}\.\d{1,9}-rank_\d{5,}\.trace\.json")
#: Bytes at the end of a trace that contain its save directory: more than the longest path.
_TAIL_NBYTES = 2**14
#: Names of a trainer's threads, for people.
_TRACKS = {"MainThread": "training", "flashckpt-stage": "copies"}
_REPORTED = "result reported"


@dataclasses.dataclass
class _Save:
    iteration: int
    began: float = dataclasses.field(default_factory=time.time)
    spans: list[tuple[int | None, Span]] = dataclasses.field(default_factory=list)
    """Spans with their rank; None: work of the agent for all ranks."""


class Traces:
    """Phases of the node's saves. Without a directory, nothing is recorded."""

    def __init__(self, root: str, trace: Trace) -> None:
        self._root = root
        #: Whether a file in the directory is a trace of this save directory, by path.
        self._known: dict[Path, bool] = {}
        self.first_rank = 0
        """Lowest rank of this node; distinguishes its files from those of other nodes."""
        self._lock = threading.Lock()
        #: Held while a file is replaced, so that an older version cannot replace a newer one.
        self._writing = threading.Lock()
        self._saves: dict[str, _Save] = {}
        #: Saves with results that were reported after their trace was written.
        self._unwritten: set[str] = set()
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

    def add_later(self, rank: int, spans: dict[str, tuple[Span, ...]]) -> None:
        """Record phases that trainers report of known saves."""
        for save_id, save_spans in spans.items():
            known = self._saves.get(save_id)
            if known is not None:
                self.add(known.iteration, save_id, rank, save_spans)

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

    def note_reported(self, save_id: str, rank: int) -> None:
        """Record that a trainer receives the result of a save now."""
        known = self._saves.get(save_id)
        if known is not None:
            now = Span(_REPORTED, "MainThread", time.monotonic(), 0)
            self.add(known.iteration, save_id, rank, [now])
            self._unwritten.add(save_id)

    def write_reported(self) -> None:
        """Write the traces of saves with newly reported results. Called without locks."""
        while self._unwritten:
            with contextlib.suppress(KeyError):
                self.write(self._unwritten.pop())

    def write(self, save_id: str) -> None:
        """Write the trace of a save, replacing its former version; a failure is only logged."""
        with self._writing:
            self._write(save_id)

    def _write(self, save_id: str) -> None:
        directory = self._directory  # read once: a later run may change it
        with self._lock:
            save = self._saves.get(save_id)
            if directory is None or save is None:
                return
            spans = list(save.spans)
        suffix = f"-rank_{self.first_rank:05d}.trace.json"
        name = f"{iteration_dir(save.iteration)}-{save_id}{suffix}"
        encoded = msgspec.json.encode(
            chrome_trace(save.iteration, save_id, self.first_rank, spans, self._root)
        )
        temporary = directory / temporary_name(name)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(encoded)
                # The time stays that of the save: its late result must not make the trace newer
                # than the next save's.
                os.utime(temporary, (save.began, save.began))
                os.replace(temporary, directory / name)
            finally:
                temporary.unlink(missing_ok=True)
            self._prune(directory, suffix)
        except OSError as error:
            logger.warning("no trace of iteration %d: %s", save.iteration, error)

    def _prune(self, directory: Path, suffix: str) -> None:
        """Delete this node's traces of this save directory, except the newest ones."""
        listed = list(directory.iterdir())
        self._known = {path: self._known[path] for path in listed if path in self._known}
        own_traces = [
            path
            for path in listed
            if path.name.endswith(suffix) and _NAME.fullmatch(path.name) and self._is_own(path)
        ]
        own_traces.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in own_traces[: -self._keep]:
            path.unlink(missing_ok=True)

    def _is_own(self, path: Path) -> bool:
        """Return whether a file is a trace of this save directory; several jobs may share one."""
        if path not in self._known:
            self._known[path] = False
            if stat.S_ISREG(path.lstat().st_mode):
                with open(path, "rb") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_NBYTES))
                    root_field = b'"root":' + msgspec.json.encode(self._root)
                    self._known[path] = root_field in file.read()
        return self._known[path]


def chrome_trace(
    iteration: int,
    save_id: str,
    first_rank: int,
    spans: Iterable[tuple[int | None, Span]],
    root: str,
) -> dict[str, Any]:
    """Return the trace of one save on one node, for Perfetto and chrome://tracing.

    Format: "Trace Event Format", Google, 2016 (complete events `X`, instants `i`, names `M`).

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
        event_type = {"ph": "X", "dur": 1e6 * span.seconds}
        if span.name == _REPORTED:
            event_type = {"ph": "i", "s": "p"}
        start = {"pid": pid, "tid": tid, "ts": 1e6 * (span.start + to_wall)}
        events.append({"name": span.name, "cat": "save", **event_type, **start})
    for (pid, thread), tid in tracks.items():
        # The number of a pool's thread is left out.
        track = _TRACKS.get(thread, f"agent: {thread.partition('_')[0]}")
        events.append(_name("thread_name", pid, tid, track))
    for pid in sorted({pid for pid, _ in tracks}):
        name = f"rank {pid}" if pid < _AGENT else f"agent on {host}"
        events.append(_name("process_name", pid, 0, name))
    # At the end of the file, where `_is_own` looks for it.
    facts = {"iteration": iteration, "save": save_id, "host": host, "root": root}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
