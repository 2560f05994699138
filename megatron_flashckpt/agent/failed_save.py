"""Handling of a failed save: reports the failure to other nodes, and removes the save's files."""

from __future__ import annotations

import logging
import re
import threading
import time

from megatron_flashckpt.agent.cleanup import retried
from megatron_flashckpt.agent.markers import is_committed
from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.error_classes import may_pass, will_last
from megatron_flashckpt.errors import FlashCkptError, OvertakenError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.base import Storage
from megatron_flashckpt.storage.parallel import for_all

logger = logging.getLogger(__name__)

#: Pauses before a failure note is written again.
_NOTE_RETRIES_S = (0.2, 1.0, 3.0)
#: Seconds between further attempts, once these have failed.
_TELL_AGAIN_S = 10.0
_NOTE_NBYTES = 2**16
#: Prefix of the message of a storage error.
_ERROR_OF_STORAGE = re.compile(r"\[Errno (\d+)\] ")
#: Prefix of the note of a rank that has no part of the save; see `persister.Saves.abandon`.
_LACKING = re.compile(r"rank \d+: ")
#: Seconds that a node waits, after training has abandoned a save, for rank 0's node to learn of it.
#: Used where a job started meanwhile without this node, so that no agent has kept the save.
_MISSED_S = 5.0


def failure_elsewhere(save: PendingSave, present: set[str]) -> str | None:
    suffix = f"-{save.save_id}.failed"
    for name in sorted(present):
        if name.endswith(suffix):
            note = save.storage.read(f"{save.directory}/{name}", 0, _NOTE_NBYTES)
            return note.decode(errors="replace")
    return None


def lacks_part(reason: str) -> bool:
    """Return whether a note states that a rank has no part of the save, so that it stays failed."""
    return _LACKING.match(reason) is not None


def lasts_elsewhere(reason: str) -> bool:
    """Return whether a note states an error of storage that only a person can end.

    The note of a rank that could not stage its part begins with the rank, and names no such error.
    """
    match = _ERROR_OF_STORAGE.match(reason)
    return match is not None and will_last(int(match[1]))


def note_failure(save: PendingSave, rank: int, reason: str) -> None:
    is_stored = leave_note(save.storage, save.iteration, save.save_id, rank, reason)
    save.unsent_note = None if is_stored else (rank, reason)


def note_failure_again(save: PendingSave) -> None:
    """Write the failure note again if there was no space; `forget` has freed some."""
    if save.unsent_note is not None:
        note_failure(save, *save.unsent_note)


def keep_telling(save: PendingSave, until: float) -> None:
    """Write a failure note until storage takes it, in a thread of its own.

    Storage may be away on one node or on all of them. When it is back, the other nodes must not
    wait for a save that has failed until their timeout.

    Args:
        until: time of the last attempt; `time.monotonic`.
    """
    if save.unsent_note is None or len(save.metas) == save.world_size:
        return
    rank, reason = save.unsent_note
    name = f"{save.directory}/{file_names.failure_name(rank, save.save_id)}"

    def tell() -> None:
        while time.monotonic() < until:
            time.sleep(_TELL_AGAIN_S)
            if not save.is_of_newest_run:  # no node waits for the save any more
                return
            try:
                save.storage.put(name, reason.encode())
            except OvertakenError:
                return
            except (FlashCkptError, OSError):
                continue
            logger.info("iteration %d: its failure is now reported to other nodes", save.iteration)
            return

    threading.Thread(target=tell, name="note", daemon=True).start()


def leave_note(storage: Storage, iteration: int, save_id: str, rank: int, reason: str) -> bool:
    """Report a failure to the agents of other nodes; return whether the note is in storage.

    Without the note, these agents learn of the failure by their timeout; see `keep_telling`.
    """
    name = f"{file_names.iteration_dir(iteration)}/{file_names.failure_name(rank, save_id)}"
    pauses_s = iter(_NOTE_RETRIES_S)
    while True:
        try:
            storage.put(name, reason.encode())
            return True
        except (FlashCkptError, OSError) as error:
            pause_s = next(pauses_s, None)
            if pause_s is None or not may_pass(error):
                logger.error(
                    "cannot report the failure to other nodes, which wait for the report or for "
                    "their timeout: %s",
                    error,
                )
                return False
        time.sleep(pause_s)


def forget(save: PendingSave) -> None:
    """Free the space that this node's ranks took for a failed save.

    If the manifest exists (only the tracker could not be moved), the save is a checkpoint and
    nothing is removed. Records and shards that the committing agent may still commit stay, too: its
    sweeper removes them after a later commit.
    """
    try:
        if save.fence is not None:
            save.fence.check(save.storage)  # the later run removes them
        if not may_remove(save):
            logger.warning(
                "iteration %d: rank 0's node has not reported that the save failed and may commit "
                "it; it removes the files after a later commit",
                save.iteration,
            )
            return
        present = set(save.storage.list(save.directory))
        if is_committed(save, present):
            return
    except (FlashCkptError, OSError) as error:
        logger.warning("cannot remove files of a failed save: %s", error)
        return
    own_names = [file_names.common_name(save.save_id)] if 0 in save.metas else []
    world_size = save.world_size
    present |= save.record_names
    records = file_names.records_of(present, save.save_id, world_size)
    own_names += [
        name for name, ranks in records.items() if not save.metas.keys().isdisjoint(ranks)
    ]
    own_names += [file_names.shard_name(rank, save.save_id) for rank in sorted(save.metas)]

    def delete(name: str) -> None:
        try:
            retried(lambda: save.storage.delete(f"{save.directory}/{name}"))
            hit("forget.file")
        except (FlashCkptError, OSError) as error:
            logger.warning("cannot remove a file of a failed save: %s", error)

    for_all(delete, own_names)
    try:
        # Keeps a directory with other files.
        retried(lambda: save.storage.delete_directory(save.directory))
    except (FlashCkptError, OSError) as error:
        logger.warning("cannot remove the directory of a failed save: %s", error)


def may_remove(save: PendingSave) -> bool:
    """Return whether no agent can still commit `save`."""
    if save.is_decided_here or save.called_off:
        return True  # this agent commits, or the committing agent has given the save up
    if save.superseded_by == save.iteration or save.past is not None:
        return True
    if save.missed_run and save.abandoned_at is not None:
        return time.monotonic() - save.abandoned_at > _MISSED_S
    note = file_names.failure_name(0, save.save_id)
    # A rank may fail after its record was published: the `put` took effect and reported an error,
    # or a former agent had published the record. The set is a copy, because threads that write
    # shards add failures meanwhile.
    ranks = set(save.metas if save.is_abandoned else save.failed)
    world_size = save.world_size
    known = set(save.record_names)
    present = save.storage.present(save.directory, {note, *known})
    if note in present:
        return True
    if not ranks <= file_names.ranks_with_record(known, save.save_id, world_size):
        present |= set(save.storage.list(save.directory))
    return not ranks <= file_names.ranks_with_record(present, save.save_id, world_size)


def shown_error(error: Exception) -> str:
    """Return an error's message; add the type if the error is not this package's."""
    if isinstance(error, FlashCkptError):
        return str(error)
    return f"{type(error).__name__}: {error}"
