"""History of a job's last saves: a file in the save directory with one line per save.

Manifests hold the timings of committed saves. The history also records saves that failed, or that
retention has removed since. The committing agent replaces the file atomically, which any storage
supports. `flashckpt report` reads it, and agents that adopt the slots of another agent; loads do
not.
"""

from __future__ import annotations

import logging

import msgspec

from megatron_flashckpt.error_classes import may_pass
from megatron_flashckpt.errors import UNDECODABLE, FlashCkptError
from megatron_flashckpt.file_format.file_names import HISTORY
from megatron_flashckpt.layout.save_cost import SaveCost
from megatron_flashckpt.storage.base import Storage

logger = logging.getLogger(__name__)

#: Bytes to read of the file, at most; only long histories have more.
_MAX_NBYTES = 2**24


class PastSave(msgspec.Struct, frozen=True, kw_only=True):
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


def append(storage: Storage, save: PastSave, keep: int) -> None:
    """Add a save to the history, which keeps the last `keep` saves (0: no history).

    Logs errors and never raises: a failed note must not fail a checkpoint.
    """
    if not keep:
        return
    try:
        lines = [*_lines(storage), msgspec.json.encode(save)][-keep:]
        text = b"".join(line + b"\n" for line in lines)
        storage.put(HISTORY, text, durable="contents")  # a power loss may lose the line
    except (FlashCkptError, OSError) as error:
        logger.warning("%s/%s was not updated: %s", storage.place, HISTORY, error)


_PAST_SAVE = msgspec.json.Decoder(PastSave)


def read(storage: Storage) -> list[PastSave]:
    """Return the saves in the history, oldest first; lines that cannot be decoded are skipped.

    A link, a directory or an unreadable file in its place counts as no history, with a warning.

    Raises:
        OSError: storage reports an error that may pass.
    """
    saves: list[PastSave] = []
    try:
        lines = _lines(storage)
    except (FlashCkptError, OSError) as error:
        if may_pass(error):
            raise
        logger.warning("the history of saves cannot be read: %s", error)
        return saves
    for line in lines:
        try:
            saves.append(_PAST_SAVE.decode(line))
        except UNDECODABLE:
            continue
    return saves


def past_save(storage: Storage, save_id: str) -> PastSave | None:
    """Return the history's entry of one save; None if there is none.

    A rank whose agent was killed may connect late to the next agent. The save that the rank staged
    may have been committed meanwhile with its durable shard, and removed by retention. To write
    the shard again would wait forever for the shards of other ranks.

    Raises:
        OSError: storage reports an error that may pass.
    """
    return next((past for past in read(storage) if past.save_id == save_id), None)


def _lines(storage: Storage) -> list[bytes]:
    """Return the last lines of the file, `_MAX_NBYTES` at most."""
    try:
        start = max(0, storage.size(HISTORY) - _MAX_NBYTES)
        lines = storage.read(HISTORY, start, _MAX_NBYTES).splitlines()
    except FileNotFoundError:
        return []
    return lines[1:] if start else lines  # the first one may be cut
