"""Megatron's tracker: the file that names the iteration a job resumes from."""

from __future__ import annotations

import logging

from megatron_flashckpt.error_classes import may_pass
from megatron_flashckpt.errors import StorageError, is_damage
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.store import Store

logger = logging.getLogger(__name__)

#: Bytes to read of a tracker, at most.
_TRACKER_NBYTES = 4096


def tracker_text(store: Store) -> str | None:
    """Return the tracker's text (an iteration or `release`); None if there is no tracker.

    Raises:
        StorageError: the tracker cannot be read, or is not a file.
    """
    try:
        encoded = store.get(file_names.TRACKER, 0, _TRACKER_NBYTES)
    except FileNotFoundError:
        return None
    return encoded.decode(errors="replace").strip()


def iteration_in(text: str) -> int | None:
    """Return the iteration that a tracker's `text` names; None if it names none."""
    # int() raises ValueError for thousands of digits.
    return int(text) if text.isdecimal() and len(text) < 20 else None


def tracked_iteration(store: Store) -> int | None:
    """Return the iteration that the tracker names; None if it names none, or is not a file.

    A load takes the newest checkpoint then. A commit replaces a link, and fails at a directory.

    Raises:
        StorageError: the tracker cannot be read now.
    """
    try:
        return iteration_in(tracker_text(store) or "")
    except StorageError as error:
        if not is_damage(error) or may_pass(error):
            raise
        logger.warning("the tracker names no iteration: %s", error.strerror)
        return None
