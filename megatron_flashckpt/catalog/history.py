"""What became of the last saves of a job: one line each in a file beside the checkpoints.

Committed checkpoints say of themselves what they took; this file also knows those that failed, and
those that retention has removed since. Only the agent that commits writes it, whole and atomically,
so that any storage can hold it. People and `flashckpt report` read it, and agents that take over
what another one had; no load does.
"""

from __future__ import annotations

import logging

import msgspec

from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.file_format.file_names import HISTORY
from megatron_flashckpt.layout.save_cost import SaveCost
from megatron_flashckpt.storage.base import Storage

logger = logging.getLogger(__name__)

#: What is longer was not written by us.
_MAX_NBYTES = 2**24


class PastSave(msgspec.Struct, frozen=True, kw_only=True):
    """One save to storage whose outcome is known."""

    iteration: int
    save_id: str
    ended_at: float
    """Seconds since 1970."""
    seconds: float
    """From staged on the node that commits to committed, or given up."""
    error: str | None = None
    """None: it was committed."""
    world_size: int
    cost: SaveCost | None = None


def append(storage: Storage, save: PastSave, keep: int) -> None:
    """Add a save to the history, which tells of the last `keep` (0: there is none).

    Never raises: a checkpoint is worth more than what is said of it.
    """
    if not keep:
        return
    try:
        lines = [*_lines(storage), msgspec.json.encode(save)][-keep:]
        text = b"".join(line + b"\n" for line in lines)
        storage.put(HISTORY, text, durable="contents")  # power that is lost may take the last line
    except (FlashCkptError, OSError) as error:
        logger.warning("%s/%s is not up to date: %s", storage.place, HISTORY, error)


_PAST_SAVE = msgspec.json.Decoder(PastSave)


def read(storage: Storage) -> list[PastSave]:
    """Return the saves that the history tells of, oldest first; what is not one is left out."""
    found = []
    for line in _lines(storage):
        try:
            found.append(_PAST_SAVE.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return found


def told_of(storage: Storage, save_id: str) -> PastSave | None:
    """Return what the history says of one save; None if it does not know it.

    A rank whose agent was killed may come late to the next one, or to that of its node: what it had
    staged has then been committed with the part that was durable, and retention may have removed it
    since. To write that part again would be to wait in vain for the others'.
    """
    return next((past for past in read(storage) if past.save_id == save_id), None)


def _lines(storage: Storage) -> list[bytes]:
    try:
        return storage.read(HISTORY, 0, _MAX_NBYTES).splitlines()
    except FileNotFoundError:
        return []
