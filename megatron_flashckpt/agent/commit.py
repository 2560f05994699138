"""Commit of a save: turns durable shards into a checkpoint, or reports why it cannot.

The agent on the node of global rank 0 commits. It waits until commit records *name* all ranks
(names, not a count: a record of an earlier attempt must not replace one of this attempt). Then it
merges the records and writes the manifest. Only then does the tracker move. The other agents wait
for that manifest.

Once an agent has published the records of its ranks, only the committing agent decides. The others
retry storage errors until their deadline, and delete their files only if the committing agent
reports that the save has failed. Until then, it may be reading their records.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

import xxhash

from megatron_flashckpt.agent.commit_records import (
    MissingShardsError,
    check_shards,
    read_records,
    removal_error,
)
from megatron_flashckpt.agent.failed_save import (
    failure_elsewhere,
    lacks_part,
    lasts_elsewhere,
    leave_note,
    may_remove,
    note_failure,
)
from megatron_flashckpt.agent.markers import (
    awaits_marker,
    committed_facts,
    is_committed,
    manifest_head,
    put_marker,
    remove_markers,
)
from megatron_flashckpt.agent.pending_save import PendingSave, gave_up
from megatron_flashckpt.agent.presence import present_files
from megatron_flashckpt.catalog.tracker import tracked_before_commit
from megatron_flashckpt.error_classes import class_of, may_pass, will_last
from megatron_flashckpt.errors import (
    CorruptCheckpointError,
    FlashCkptError,
    OvertakenError,
    SaveFailedError,
)
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format import file_names, manifest
from megatron_flashckpt.tracing import phase

logger = logging.getLogger(__name__)

#: Seconds between two checks for a later run: on the node of rank 0, and on the others.
_FENCED_S = (1.0, 30.0)
#: Seconds for which the committing agent retries transient storage errors.
_TROUBLE_S = 20.0
#: Seconds for which any other agent retries a device that reports I/O errors.
_DEAD_DISK_S = 120.0
#: Seconds that a writing thread has to report an error that the commit has met, too.
_WRITER_S = 2.0
#: Seconds until the node of rank 0 also knows that training has abandoned a save.
_ABANDONED_S = 30.0
_ABANDONED = "a crash interrupted it; training resumed from an older checkpoint"


def outcome_of(save: PendingSave, timeout_s: float) -> tuple[bool, str | None]:
    """Return `(finished, error)` for `save`, committing it if this agent can do so now.

    Called repeatedly by the agent's commit thread. Never raises: an error is the result.
    """
    try:
        if save.is_abandoned:
            return _is_over(save), _ABANDONED
        if save.superseded_by == save.iteration:
            place = f"{save.storage.place}/{save.directory}"
            return True, f"{place}: holds a later save of the same iteration already"
        if save.error is not None:
            # The rank whose note the others look for; see `presence.present_files`.
            rank = 0 if 0 in save.metas else min(save.failed or save.metas)
            note_failure(save, rank, save.error)
            return True, save.error
        if save.past is not None:
            return True, save.past.error
        if save.fence is not None:
            save.fence.check(save.storage, _FENCED_S[0 not in save.metas])
        persisted = sorted(save.persisted)  # before `present_files`, which sees their records
        present = present_files(save)
        failure = failure_elsewhere(save, present)
        if failure is not None:
            save.is_noted, save.is_final = True, lacks_part(failure)
            save.lasts = save.lasts or lasts_elsewhere(failure)
            save.called_off = file_names.failure_name(0, save.save_id) in present
            if 0 in save.metas and not save.called_off:
                note_failure(save, 0, failure)
            return True, failure
        if save.persisted < set(save.metas) or save.unpublished:
            save.troubled_since = None  # storage has answered all requests so far
            return _expired(save, timeout_s)
        is_unmarked = awaits_marker(save, present)
        if not is_unmarked and is_committed(save, present):
            if 0 in save.metas:
                # A former agent has written the manifest and may have died before the steps that
                # follow.
                head = manifest_head(save.storage, save.iteration)
                # Check after reading the head, so that a manifest written in between is detected.
                if not is_committed(save, present):
                    return _expired(save, timeout_s)
                with save.manifests.changing:
                    _make_durable(save)
                    _publish(save, head)
            return True, None
        if 0 in save.metas:
            world_size = save.metas[0].world_size
            durable = file_names.ranks_with_record(present, save.save_id, world_size)
            save.missing = [rank for rank in range(world_size) if rank not in durable]
            if not save.missing:
                hit("commit.ready")
                commit(save, present)
                return True, None
        if save.listed_all and not is_unmarked:  # a commit removes the records
            # The next call ends a save with an error.
            save.error = save.error or removal_error(save, persisted, present)
        save.troubled_since = None
    except (FlashCkptError, OSError) as error:
        if isinstance(error, MissingShardsError) and _may_come_late(save, error):
            return _expired(save, timeout_s)
        if may_pass(error) and _is_worth_a_retry(save, error):
            logger.warning("iteration %d: trying again: %s", save.iteration, error)
            return _expired(save, timeout_s)
        if _may_come_from_a_writer(save):
            return _expired(save, timeout_s)
        save.lasts, save.is_final = will_last(error), isinstance(error, OvertakenError)
        return _failed(save, str(error))
    except Exception as error:  # otherwise the commit thread would end
        logger.exception("iteration %d", save.iteration)
        place = f"{save.storage.place}/{save.directory}"
        return _failed(save, f"{place}: {type(error).__name__}: {error}")
    return _expired(save, timeout_s)


def _is_over(save: PendingSave) -> bool:
    """Return whether this node may conclude a save that training has abandoned.

    The node of rank 0 may be committing the save now, because its own ranks report a moment earlier
    or later. So the other nodes keep their files until they know that it does not commit.
    """
    if save.abandoned_at is None:
        save.abandoned_at = time.monotonic()
        if not save.missed_run and len(save.metas) < save.world_size:
            rank = 0 if save.is_decided_here else min(save.metas)
            leave_note(save.storage, save.iteration, save.save_id, rank, _ABANDONED)
    if save.is_decided_here or time.monotonic() - save.abandoned_at > _ABANDONED_S:
        return True
    return save.persisted >= set(save.metas) and may_remove(save)


def _expired(save: PendingSave, timeout_s: float) -> tuple[bool, str | None]:
    """Return the result of a pending save: a failure if its time is over."""
    if time.monotonic() - save.staged_at <= timeout_s:
        return False, None
    save.is_final = save.awaits_others and save.troubled_since is None
    return _failed(save, gave_up(save, timeout_s))


def _failed(save: PendingSave, error: str) -> tuple[bool, str]:
    """Return a failure; the committing agent first reports it to the waiting nodes."""
    if 0 in save.metas:
        note_failure(save, 0, error)
    return True, error


def _is_worth_a_retry(save: PendingSave, error: BaseException) -> bool:
    """Return whether an error that may pass leaves `save` pending.

    The committing agent fails the save after `_TROUBLE_S`, so that a dead disk does not block slots
    for the whole commit timeout. The other agents cannot decide, and wait for its decision while
    their storage fails. An agent whose own device is dead gives up and leaves its files, because
    the save may still be committed.
    """
    if save.troubled_since is None:
        save.troubled_since = time.monotonic()
    troubled_s = time.monotonic() - save.troubled_since
    if 0 in save.metas:
        return troubled_s < _TROUBLE_S
    return class_of(error).kind != "damage" or troubled_s < _DEAD_DISK_S


def _may_come_late(save: PendingSave, error: MissingShardsError) -> bool:
    """Return whether missing shards, written by other nodes, may still become visible."""
    if not error.ranks.isdisjoint(save.metas):
        return False
    if save.incomplete_since is None:
        save.incomplete_since = time.monotonic()
        logger.warning("iteration %d: trying again: %s", save.iteration, error)
    return time.monotonic() - save.incomplete_since < _TROUBLE_S


def _may_come_from_a_writer(save: PendingSave) -> bool:
    """Return whether a thread that writes a shard may soon report the same error.

    Such a report names the rank whose part has failed.
    """
    if save.troubled_since is None:
        save.troubled_since = time.monotonic()
    is_early = time.monotonic() - save.troubled_since < _WRITER_S
    return is_early and save.error is None and save.persisted < set(save.metas)


def commit(save: PendingSave, present: Collection[str] | None = None) -> None:
    """Merge the records and write the manifest, then move the tracker.

    `tidying.tidy` removes obsolete files afterwards.

    Args:
        present: files in the directory of the save, if they are known.

    Raises:
        CorruptCheckpointError: the records contradict each other, or a shard is missing.
        StorageError: the tracker still names the previous checkpoint.
    """
    _check_wanted(save)
    storage, meta = save.storage, save.metas[0]
    with phase("read records"):
        names = storage.list(save.directory) if present is None else present
        records = read_records(storage, save.iteration, save.save_id, meta.world_size, names)
    with phase("merge"):
        merged = manifest.merge(
            records,
            world_size=meta.world_size,
            description=meta.description,
            common_digest=xxhash.xxh3_64_hexdigest(meta.common),
            committed_at=time.time(),
        )
        # A manifest that loads would reject must not become a checkpoint, nor be named by the
        # tracker.
        manifest.check(merged, f"{storage.place}/{save.directory}/{file_names.MANIFEST}")
    with phase("check shards"):
        check_shards(storage, save.iteration, records)
    encoded = manifest.encode_manifest(merged)
    with save.manifests.changing:
        with phase("manifest"):
            # No directory fsync here: the manifest's `put` does it, and the tracker moves only
            # after that.
            common = f"{save.directory}/{file_names.common_name(save.save_id)}"
            storage.put(common, meta.common, durable="contents")
            hit("commit.common")
            remove_markers(storage, save.directory)
            storage.put(
                f"{save.directory}/{file_names.MANIFEST}",
                encoded,
                guard=lambda: _check_wanted(save),
            )
        save.cost = merged.cost
        hit("commit.manifest")
        _publish(save, encoded)


def _make_durable(save: PendingSave) -> None:
    """Make the name of a manifest durable whose directory may not have been fsynced.

    To put any file of the directory again does that.
    """
    common = f"{save.directory}/{file_names.common_name(save.save_id)}"
    save.storage.put(common, save.storage.read(common))


def _publish(save: PendingSave, encoded: bytes) -> None:
    """Report to other nodes that the manifest is written, and move the tracker.

    Args:
        encoded: the manifest, or its head.
    """
    storage = save.storage
    if len(save.metas) < save.metas[0].world_size:
        facts = manifest.CommitFacts(
            iteration=save.iteration,
            save_id=save.save_id,
            cost=save.cost,
        )
        put_marker(storage, facts, encoded)
    # A save that is committed after a later one is never the newest checkpoint; Megatron would
    # remove it now.
    save.previous = save.iteration
    if save.superseded_by is None and not _is_overtaken(save):
        save.previous = tracked_before_commit(storage)
        with phase("tracker"):
            storage.put(
                file_names.TRACKER, str(save.iteration).encode(), guard=lambda: _check_named(save)
            )
        hit("commit.tracker")


def _check_commits(save: PendingSave) -> None:
    """Raise unless this agent is the committing agent."""
    if save.fence is not None:
        save.fence.check_commits(save.storage)


def _check_wanted(save: PendingSave) -> None:
    """Raise unless `save` may become a checkpoint now; commits of large jobs take seconds."""
    _check_commits(save)
    if save.is_abandoned:
        raise SaveFailedError(_ABANDONED)
    if save.given_up is not None:
        raise SaveFailedError(save.given_up)


def _check_named(save: PendingSave) -> None:
    """Raise unless the tracker may name `save` now; this agent may have hung in between."""
    _check_commits(save)
    if not save.storage.present(save.directory, [file_names.MANIFEST]):
        raise CorruptCheckpointError(
            f"{save.storage.place}/{save.directory}: its manifest was removed after the commit, so "
            f"{file_names.TRACKER} does not name it; find out what else removes files there"
        )


def _is_overtaken(save: PendingSave) -> bool:
    """Return whether the tracker names a save that was staged after this one."""
    tracked = tracked_before_commit(save.storage) if save.later else None
    if tracked is None:
        return False
    facts = committed_facts(save, tracked)
    return facts is not None and facts.save_id in save.later
