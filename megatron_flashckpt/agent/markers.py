"""Markers report to the agents of other nodes that a save is committed.

A marker (see `file_format.marker`) is written after its manifest, and removed before the manifest
of another save replaces that manifest. A left-over or copied marker does not count, because the
manifest begins differently.
"""

from __future__ import annotations

import logging
import random
import time

from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.error_classes import may_pass
from megatron_flashckpt.errors import FlashCkptError, FormatVersionError, is_damage
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.manifest import HEAD_NBYTES, CommitFacts
from megatron_flashckpt.file_format.marker import decode_marker, encode_marker, marker_of
from megatron_flashckpt.storage.base import Storage, read_whole

logger = logging.getLogger(__name__)

#: Upper bound of a marker's size.
_MAX_NBYTES = 2**24
#: Seconds that a waiting node waits for the marker of a manifest; then it reads the manifest.
_UNMARKED_S = 5.0


def put_marker(storage: Storage, facts: CommitFacts, manifest: bytes) -> None:
    """Report to the agents of other nodes that a save is committed; its manifest is written.

    Never raises: without the marker they read the manifest.

    Args:
        manifest: as it was written, or its head.
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
            "committed iteration %d, but without a marker, so other nodes read its whole manifest: "
            "%s",
            facts.iteration,
            error,
        )


def manifest_head(storage: Storage, iteration: int) -> bytes:
    """Return the first bytes of a manifest, which identify it."""
    name = f"{file_names.iteration_dir(iteration)}/{file_names.MANIFEST}"
    return storage.read(name, 0, HEAD_NBYTES)


def read_marker(storage: Storage, iteration: int, save_id: str) -> CommitFacts | None:
    """Return the facts in a save's marker; None without a marker that matches the manifest.

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


def is_committed(save: PendingSave, present: set[str]) -> bool:
    if file_names.MANIFEST not in present:
        return False
    facts = None
    if 0 not in save.metas:
        facts = read_marker(save.storage, save.iteration, save.save_id)
    facts = facts or committed_facts(save, save.iteration)
    if facts is None or facts.save_id != save.save_id:
        return False
    save.cost = facts.cost
    return True


def awaits_marker(save: PendingSave, present: set[str]) -> bool:
    """Return whether the marker of `save` may soon follow its manifest.

    No marker follows if the committing agent was killed in between, or is of an older release.
    """
    if 0 in save.metas or file_names.MANIFEST not in present:
        return False
    if file_names.marker_name(save.save_id) in present:
        return False
    now = time.monotonic()
    if save.unmarked_since is None:
        # A random start, so that nodes do not all read manifests of megabytes at once.
        save.unmarked_since = now + random.uniform(0, _UNMARKED_S)
    return now < save.unmarked_since + _UNMARKED_S


def committed_facts(save: PendingSave, iteration: int) -> CommitFacts | None:
    """Return the facts of the manifest of `iteration`; None if it is damaged or missing.

    A newer release's manifest also counts as missing: a save will replace it.
    """
    try:
        return save.manifests.facts(save.storage, file_names.iteration_dir(iteration))
    except (FormatVersionError, FileNotFoundError):
        return None
    except FlashCkptError as error:
        # A transient error does not mean that there is no checkpoint: its shards would be deleted.
        if is_damage(error) and not may_pass(error):
            return None
        raise
