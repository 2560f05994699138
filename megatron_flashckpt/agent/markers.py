"""Markers tell the agents of other nodes that a save is committed; see `file_format.marker`.

A marker is put after its manifest, and removed before another save's manifest takes that one's
place. One that is left over, or copied along, counts for nothing: the manifest begins differently.
"""

from __future__ import annotations

import logging

from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.manifest import HEAD_NBYTES, CommitFacts
from megatron_flashckpt.file_format.marker import decode_marker, encode_marker, marker_of
from megatron_flashckpt.storage.base import Storage, read_whole

logger = logging.getLogger(__name__)

#: Longer than any marker, whose longest part are keys of copies that differ.
_MAX_NBYTES = 2**24


def put_marker(storage: Storage, facts: CommitFacts, manifest: bytes) -> None:
    """Tell the agents of other nodes that a save is committed, whose manifest is there.

    Never raises: without the marker they read the manifest.

    Args:
        manifest: as it was put, or the beginning of it.
    """
    directory = file_names.iteration_dir(facts.iteration)
    try:
        storage.put(
            f"{directory}/{file_names.marker_name(facts.save_id)}",
            encode_marker(marker_of(facts, manifest)),
            durable="nothing",
        )
    except (FlashCkptError, OSError) as error:
        logger.warning(
            "committed iteration %d, but nodes read its whole manifest: %s", facts.iteration, error
        )


def manifest_head(storage: Storage, iteration: int) -> bytes:
    """Return the first bytes of a manifest, which no other manifest begins with."""
    name = f"{file_names.iteration_dir(iteration)}/{file_names.MANIFEST}"
    return storage.read(name, 0, HEAD_NBYTES)


def read_marker(storage: Storage, iteration: int, save_id: str) -> CommitFacts | None:
    """Return what the marker of a save says; None if it has none that the manifest agrees with.

    Raises:
        StorageError: storage reports an error.
    """
    directory = file_names.iteration_dir(iteration)
    name = f"{directory}/{file_names.marker_name(save_id)}"
    try:
        marker = decode_marker(read_whole(storage, name, _MAX_NBYTES), f"{storage.place}/{name}")
        head = manifest_head(storage, iteration)
    except FileNotFoundError:
        return None
    except FlashCkptError as error:
        if isinstance(error, OSError):
            raise
        logger.warning("%s", error)
        return None
    if head != marker.manifest_head or (marker.iteration, marker.save_id) != (iteration, save_id):
        return None
    return marker.facts


def remove_markers(storage: Storage, directory: str) -> None:
    """Remove the markers of a directory whose manifest is about to be replaced."""
    if storage.present(directory, [file_names.MANIFEST]):
        for name in storage.list(directory):
            if file_names.save_id_of_marker(name) is not None:
                storage.delete(f"{directory}/{name}")
