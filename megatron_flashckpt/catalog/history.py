"""History of a job: its last saves and its starts, one object each in `flashckpt/history`.

Manifests hold the timings of committed saves. The history also records saves that failed, or that
retention has removed since, and from where each run has resumed. The agent of rank 0 enters saves,
rank 0 itself enters starts, and `flashckpt report` reads them. Each event is created once under a
name of its own, so no process can lose or tear what another one has entered. No load and no commit
depends on the history, so its errors are only logged.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import msgspec

from megatron_flashckpt.errors import UNDECODABLE, AlreadyExistsError, FlashCkptError
from megatron_flashckpt.file_format.file_names import (
    HISTORY,
    event_name,
    parse_event_name,
    parse_save,
)
from megatron_flashckpt.file_format.run_object import RunObject
from megatron_flashckpt.layout.save_cost import SaveCost
from megatron_flashckpt.storage.parallel import for_all
from megatron_flashckpt.storage.store import Store

logger = logging.getLogger(__name__)

#: Events to read at most.
_MOST = 10_000
#: Bytes to read of one event, at most.
_MAX_NBYTES = 2**20


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
    """Add an event to the history. Logs errors: a failed note must not fail a checkpoint."""
    match event:
        case PastSave():
            name = event_name(event.ended_at, event.save_id)
        case PastStart():
            name = event_name(event.started_at, event.run)
    # The name is of this event alone: if it exists, an earlier attempt was not answered.
    with _errors_logged(store), contextlib.suppress(AlreadyExistsError):
        store.create(name, msgspec.json.encode(event))


def shorten(store: Store, keep: int) -> None:
    """Keep the last `keep` saves and the last `keep` starts; called at a start. Logs errors."""
    with _errors_logged(store):
        names = _names(store)
        # Many starts in a row, of a job that crashes at once, must not push out the saves.
        saves = [name for name, of in names.items() if parse_save(of)]
        starts = [name for name, of in names.items() if not parse_save(of)]
        store.delete(f"{HISTORY}/{name}" for name in (*saves[:-keep], *starts[:-keep]))


@contextlib.contextmanager
def _errors_logged(store: Store) -> Iterator[None]:
    try:
        yield
    except (FlashCkptError, OSError) as error:
        logger.warning("%s/%s was not updated: %s", store.place, HISTORY, error)


def find(store: Store, save_id: str) -> PastSave | None:
    """Return a save in the history; None if it is not there; see `events`."""
    found = _read(store, lambda of: of == save_id)
    return next((past for past in reversed(found) if isinstance(past, PastSave)), None)


def events(store: Store) -> list[PastSave | PastStart]:
    """Return the last `_MOST` saves and starts, oldest first, without those of unknown form.

    If storage reports an error, there is no history, with a warning.
    """
    return _read(store, lambda of: True)


def _read(store: Store, is_wanted: Callable[[str], bool]) -> list[PastSave | PastStart]:
    try:
        names = [name for name, of in _names(store).items() if is_wanted(of)]
        read = for_all(lambda name: _event(store, name), names[-_MOST:])
    except (FlashCkptError, OSError) as error:
        logger.warning("the history of saves cannot be read: %s", error)
        return []
    return [event for event in read if event is not None]


def _names(store: Store) -> dict[str, str]:
    """Return the names of events, oldest first, each with its save or run."""
    files = [entry.name for entry in store.list(HISTORY, sizes=False) if entry.kind == "file"]
    named = {name: parse_event_name(name) for name in files}
    return {name: of for name, of in named.items() if of is not None}


def _event(store: Store, name: str) -> PastSave | PastStart | None:
    try:
        event: PastSave | PastStart = _EVENT.decode(store.get(f"{HISTORY}/{name}", 0, _MAX_NBYTES))
        return event
    except (FileNotFoundError, *UNDECODABLE):  # a start has deleted it, or it is damaged
        return None
