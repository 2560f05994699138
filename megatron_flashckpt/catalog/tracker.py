"""Megatron's tracker: the file that names the iteration a job resumes from."""

from __future__ import annotations

from megatron_flashckpt.error_classes import may_pass
from megatron_flashckpt.errors import StorageError, is_damage
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.store import Store

#: Bytes to read of a tracker, at most.
_TRACKER_NBYTES = 4096


def tracker_text(store: Store) -> str | None:
    """Return the tracker's text (an iteration or `release`); None if there is no tracker."""
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
    """Return the iteration that the tracker names; None if it names none.

    Raises:
        StorageError: the tracker cannot be read, or is not a file.
    """
    return iteration_in(tracker_text(store) or "")


def tracked_before_commit(store: Store) -> int | None:
    """Return the iteration that the tracker names; None also if the tracker is not a file.

    A commit replaces the tracker, and fails there if a link or a directory stands in its place.
    """
    try:
        return tracked_iteration(store)
    except StorageError as error:
        if is_damage(error) and not may_pass(error):
            return None
        raise
