"""History of a job: its last saves and its starts, one line each in `flashckpt/history.jsonl`.

Manifests hold the timings of committed saves. The history also records saves that failed, or that
retention has removed since, and from where each run has resumed. The agent of rank 0 appends saves,
rank 0 itself appends starts, and `flashckpt report` reads them. Each line is one append, so no
process overwrites the line of another one. An append begins with its line break, so what a full
disk or a crash has left of a line costs no other line. No load and no commit depends on the file,
so its errors are only logged.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import msgspec

from megatron_flashckpt.errors import UNDECODABLE, FlashCkptError
from megatron_flashckpt.file_format.file_names import HISTORY
from megatron_flashckpt.file_format.run_object import RunObject
from megatron_flashckpt.layout.save_cost import SaveCost
from megatron_flashckpt.storage.store import Store

logger = logging.getLogger(__name__)

#: Bytes to read of the file, at most; only long histories have more.
_MAX_NBYTES = 2**24


class PastSave(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="save"):
    """Save to storage that was committed or has failed."""

    iteration: int
    save_id: str
    ended_at: float
    """Seconds since 1970."""
    seconds: float
    """Time from staged, on the committing node, to committed or failed."""
    error: str | None = None
    """Reason of the failure; None if the save was committed."""
    world_size: int
    cost: SaveCost | None = None


class PastStart(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="start"):
    """Start of the job: an agreed load, or the first save of a job that loads nothing."""

    run: str
    started_at: float
    """Seconds since 1970."""
    save_id: str | None = None
    """The save that the run resumed from; None: from scratch, or a foreign checkpoint."""
    iteration: int = 0
    """Iteration that the run resumed from; 0: from scratch."""
    source: str = "scratch"
    """`memory`, `storage` or `scratch`."""
    host: str = ""
    world_size: int = 0

    @classmethod
    def of(cls, run: RunObject) -> PastStart:
        """Return the start of a run."""
        return cls(
            run=run.name,
            started_at=run.opened_at,
            save_id=run.save_id,
            iteration=run.iteration,
            source=run.source,
            host=run.host,
            world_size=run.world_size,
        )


_EVENT = msgspec.json.Decoder(PastSave | PastStart)


def append(store: Store, event: PastSave | PastStart) -> None:
    """Add a line to the history. Logs errors: a failed note must not fail a checkpoint."""
    with _errors_logged(store):
        store.append(HISTORY, b"\n" + msgspec.json.encode(event))


def shorten(store: Store, keep: int) -> None:
    """Keep the last `keep` saves and the last `keep` starts. Logs errors.

    Called at a start of the job, when few processes append. A line that another one appends while
    the file is replaced is lost.
    """
    with _errors_logged(store):
        past = _read(store)
        # Many starts in a row, of a job that crashes at once, must not push out the saves.
        starts = [n for n, each in enumerate(past) if isinstance(each, PastStart)]
        saves = [n for n, each in enumerate(past) if isinstance(each, PastSave)]
        kept = sorted([*starts[-keep:], *saves[-keep:]])
        if len(kept) < len(past):
            store.put(HISTORY, b"\n".join(msgspec.json.encode(past[n]) for n in kept))


@contextlib.contextmanager
def _errors_logged(store: Store) -> Iterator[None]:
    try:
        yield
    except (FlashCkptError, OSError) as error:
        logger.warning("%s/%s was not updated: %s", store.place, HISTORY, error)


def read(store: Store) -> list[PastSave]:
    """Return the saves in the history, oldest first; see `events`."""
    return [past for past in events(store) if isinstance(past, PastSave)]


def events(store: Store) -> list[PastSave | PastStart]:
    """Return saves and starts, oldest first; lines that cannot be decoded are skipped.

    A link, a directory or an unreadable file in its place counts as no history, with a warning.
    """
    try:
        return _read(store)
    except (FlashCkptError, OSError) as error:
        logger.warning("the history of saves cannot be read: %s", error)
        return []


def _read(store: Store) -> list[PastSave | PastStart]:
    """Return the events in the last `_MAX_NBYTES` of the file; none if it is missing."""
    entry = store.stat(HISTORY)
    if entry is None:
        return []
    start = max(0, entry.nbytes - _MAX_NBYTES)
    try:
        lines = store.get(HISTORY, start, _MAX_NBYTES).splitlines()
    except FileNotFoundError:
        return []
    decoded: list[PastSave | PastStart] = []
    for line in lines[1:] if start else lines:  # the first one may be cut
        try:
            decoded.append(_EVENT.decode(line))
        except UNDECODABLE:
            continue
    return decoded
