"""Turn durable shards into a checkpoint, or say why that did not happen.

The agent on the node of global rank 0 commits: it waits until the *names* of all expected commit
records are there (names, not a count: a record of an earlier attempt must not stand in for one of
this attempt), merges them, and puts the manifest. Only then does the tracker move. The other agents
wait for that manifest.

Once an agent has published the records of its ranks, only the committing agent decides. The others
retry storage errors until their deadline, and delete their files only if the committing agent says
that the save has failed: it may be reading their records at that moment.
"""

from __future__ import annotations

import logging
import time

import xxhash

from megatron_flashckpt.agent.leftovers import Leftovers, beside
from megatron_flashckpt.agent.pending import PendingSave, gave_up
from megatron_flashckpt.agent.record_files import check_shards, read_records, why_gone
from megatron_flashckpt.agent.retention import retire
from megatron_flashckpt.errors import (
    CorruptCheckpointError,
    FlashCkptError,
    FormatVersionError,
    SaveFailedError,
    StorageError,
    is_damage,
    may_pass,
)
from megatron_flashckpt.faults import reach
from megatron_flashckpt.layout import manifest, names
from megatron_flashckpt.storage.base import Storage, read_whole
from megatron_flashckpt.tracing import phase

logger = logging.getLogger(__name__)

#: How often a node that waits for two files looks at all that there are.
_LIST_EVERY_S = 30.0
#: How often the node of rank 0, while it waits, looks whether another run has taken over.
_FENCED_S = 1.0
#: How long the committing agent retries storage that reports errors which may pass.
_TROUBLE_S = 20.0
#: Pauses before a note of a failure is put again.
_NOTE_RETRIES_S = (0.2, 1.0, 3.0)
_NOTE_NBYTES = 2**16
#: How long a node waits until that of rank 0, too, knows that training has abandoned a save.
_ABANDONED_S = 30.0
_ABANDONED = "a crash cut it short; training went on from an older checkpoint"
_TRACKER_NBYTES = 4096


def outcome_of(save: PendingSave, timeout_s: float) -> tuple[bool, str | None]:
    """Return `(finished, error)` for `save`, committing it if that is now possible and ours to do.

    Called repeatedly by the agent's commit thread. Never raises: what goes wrong is the outcome.
    """
    try:
        if save.outlived:
            return _is_over(save), _ABANDONED
        if save.superseded_by == save.iteration:
            place = f"{save.storage.place}/{save.directory}"
            return True, f"{place}: holds a later save of the same iteration already"
        if save.error is not None:
            _tell_others(save)
            return True, save.error
        if save.past is not None:
            return True, save.past.error
        if save.fence is not None:
            save.fence.check(save.storage, _FENCED_S if 0 in save.metas else _LIST_EVERY_S)
        present = _look(save)
        failure = _failure_elsewhere(save, present)
        if failure is not None:
            save.called_off = names.failure_name(0, save.save_id) in present
            if 0 in save.metas and not save.called_off:
                leave_note(save.storage, save.iteration, save.save_id, 0, failure)
            return True, failure
        if save.persisted < set(save.metas):
            return _expired(save, timeout_s)
        if _is_committed(save, present):
            if 0 in save.metas:
                # By an agent that is gone: it may not have come to what follows the manifest.
                _publish(save)
            return True, None
        if 0 in save.metas:
            world_size = save.metas[0].world_size
            expected = {names.record_name(rank, save.save_id) for rank in range(world_size)}
            if expected <= present:
                reach("commit.ready")
                commit(save)
                return True, None
            save.missing = sorted(expected - present)
        if save.listed_all:
            save.error = save.error or why_gone(save, present)  # concluded in the next call
        save.troubled_since = None
    except (FlashCkptError, OSError) as error:
        if may_pass(error) and _is_worth_a_retry(save):
            logger.warning("iteration %d: tries again: %s", save.iteration, error)
            return _expired(save, timeout_s)
        return _failed(save, str(error))
    except Exception as error:  # or the thread that concludes all saves would end here
        logger.exception("iteration %d", save.iteration)
        place = f"{save.storage.place}/{save.directory}"
        return _failed(save, f"{place}: {type(error).__name__}: {error}")
    return _expired(save, timeout_s)


def _is_over(save: PendingSave) -> bool:
    """Return whether this node may conclude a save that training has abandoned.

    The node of rank 0 may be committing it at this moment: its own ranks tell it a moment earlier
    or later. So the other nodes keep their files until it is certain that it does not.
    """
    if save.abandoned_at is None:
        save.abandoned_at = time.monotonic()
        if len(save.metas) < next(iter(save.metas.values())).world_size:
            leave_note(save.storage, save.iteration, save.save_id, min(save.metas), _ABANDONED)
    if 0 in save.metas or time.monotonic() - save.abandoned_at > _ABANDONED_S:
        return True
    return save.persisted >= set(save.metas) and _may_remove(save)


def _expired(save: PendingSave, timeout_s: float) -> tuple[bool, str | None]:
    """Return the result of a save that is still open: a failure, if its time is over."""
    if time.monotonic() - save.staged_at <= timeout_s:
        return False, None
    return _failed(save, gave_up(save, timeout_s))


def _failed(save: PendingSave, error: str) -> tuple[bool, str]:
    """Return a failure; the committing agent first tells the other nodes, which wait for it."""
    if 0 in save.metas:
        leave_note(save.storage, save.iteration, save.save_id, 0, error)
    return True, error


def _is_worth_a_retry(save: PendingSave) -> bool:
    """Return whether an error that may pass leaves `save` open.

    The committing agent gives up after `_TROUBLE_S`, so that a dead disk does not hold slots for
    the whole commit timeout. The other agents cannot decide, and wait for its decision.
    """
    if save.troubled_since is None:
        save.troubled_since = time.monotonic()
    return 0 not in save.metas or time.monotonic() - save.troubled_since < _TROUBLE_S


def commit(save: PendingSave) -> None:
    """Merge the records and put the manifest, then move the tracker, then tidy up.

    Raises:
        CorruptCheckpointError: the records contradict each other, or a shard is not there.
        StorageError: the tracker still names the previous checkpoint.
    """
    _check_commits(save)
    storage, meta = save.storage, save.metas[0]
    with phase("read records"):
        records = read_records(storage, save.iteration, save.save_id, meta.world_size)
    with phase("merge"):
        merged = manifest.merge(
            records,
            world_size=meta.world_size,
            description=meta.description,
            common_digest=xxhash.xxh3_64_hexdigest(meta.common),
            committed_at=time.time(),
        )
        # What no load would take must not become a checkpoint, and the tracker must not name it.
        manifest.check(merged, f"{storage.place}/{save.directory}/{names.MANIFEST}")
    with phase("check shards"):
        check_shards(storage, save.iteration, records)
    with phase("manifest"):
        # Its name becomes durable with that of the manifest, and the tracker names neither before.
        common = f"{save.directory}/{names.common_name(save.save_id)}"
        storage.put(common, meta.common, durable="contents")
        reach("commit.common")
        storage.put(
            f"{save.directory}/{names.MANIFEST}",
            manifest.encode_manifest(merged),
            guard=lambda: _check_wanted(save),
        )
    save.cost, save.differing, save.compared = merged.cost, merged.differing, merged.compared
    reach("commit.manifest")
    _publish(save)


def _publish(save: PendingSave) -> None:
    """Move the tracker to a save whose manifest is there, then tidy up."""
    storage, meta = save.storage, save.metas[0]
    # One that is committed after a later save is no newest checkpoint for a moment: what Megatron
    # would remove by now is itself.
    previous: int | None = save.iteration
    if save.superseded_by is None and not _is_overtaken(save):
        previous = tracked_iteration(storage)
        with phase("tracker"):
            storage.put(
                names.TRACKER, str(save.iteration).encode(), guard=lambda: _check_named(save)
            )
        reach("commit.tracker")
    try:
        with phase("tidy up"):
            Leftovers(beside(storage, save.directory, save.save_id)).remove(storage)
        reach("commit.tidy")
        with phase("retention"):
            retire(
                storage,
                meta.retention,
                retain_interval=meta.retain_interval,
                tracked=tracked_iteration(storage),
                previous=previous,
            )
        reach("commit.done")
    except (FlashCkptError, OSError) as error:
        # The checkpoint is committed; untidiness must not make it look failed.
        logger.warning("committed iteration %d, but: %s", save.iteration, error)


def _check_commits(save: PendingSave) -> None:
    """Raise unless this agent is the one that commits."""
    if save.fence is not None:
        save.fence.check_commits(save.storage)


def _check_wanted(save: PendingSave) -> None:
    """Raise unless `save` may become a checkpoint now: commits of large jobs take seconds."""
    _check_commits(save)
    if save.outlived:
        raise SaveFailedError(_ABANDONED)


def _check_named(save: PendingSave) -> None:
    """Raise unless the tracker may name `save` now: this agent may have hung since the manifest."""
    _check_commits(save)
    if not save.storage.present(save.directory, [names.MANIFEST]):
        raise CorruptCheckpointError(
            f"{save.storage.place}/{save.directory}: its manifest is gone since it was committed, "
            f"so {names.TRACKER} does not name it; find out what else removes files there"
        )


def _is_overtaken(save: PendingSave) -> bool:
    """Return whether the tracker names a save that was staged after this one."""
    tracked = tracked_iteration(save.storage) if save.later else None
    if tracked is None:
        return False
    found = _committed(save.storage, tracked)
    return found is not None and found.save_id in save.later


def tracked_iteration(storage: Storage) -> int | None:
    """Return the iteration that the tracker names; None if it names none.

    Something else may stand in its place (a link, a directory): whoever puts a tracker learns.
    """
    try:
        text = storage.read(names.TRACKER, 0, _TRACKER_NBYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except StorageError as error:
        if is_damage(error):
            return None
        raise
    # Python refuses to make numbers of thousands of digits.
    return int(text) if text.isdecimal() and len(text) < 20 else None


def forget(save: PendingSave) -> None:
    """Free the space that this node's ranks took for a save that failed.

    If its manifest is there all the same (the tracker could not be moved), it is a checkpoint and
    stays whole. Records and shards that the committing agent may still commit stay, too: its
    sweeper removes them after a later commit.
    """
    try:
        if save.fence is not None:
            save.fence.check(save.storage)  # the later run removes them
        if not _may_remove(save):
            logger.warning(
                "iteration %d: rank 0's node has not said that the save failed and may commit it; "
                "it removes the files after a later commit",
                save.iteration,
            )
            return
        if _is_committed(save, set(save.storage.list(save.directory))):
            return
    except OSError as error:
        logger.warning("left behind after a failed save: %s", error)
        return
    mine = [names.common_name(save.save_id)] if 0 in save.metas else []
    for rank in sorted(save.metas):
        mine += [names.record_name(rank, save.save_id), names.shard_name(rank, save.save_id)]
    for name in mine:
        try:
            save.storage.delete(f"{save.directory}/{name}")
            reach("forget.file")
        except OSError as error:
            logger.warning("left behind after a failed save: %s", error)
    try:
        save.storage.delete_directory(save.directory)  # unless it holds something
    except OSError as error:
        logger.warning("left behind after a failed save: %s", error)


def _may_remove(save: PendingSave) -> bool:
    """Return whether nobody can commit `save` any more."""
    if 0 in save.metas or save.called_off:
        return True  # this agent decides, or the agent that does has decided
    if save.superseded_by == save.iteration or save.past is not None:
        return True
    note = names.failure_name(0, save.save_id)
    # A rank may have failed after its record was published: storage did the put and reported an
    # error, or an agent that is gone had published the record.
    ranks = save.metas if save.outlived else save.failed
    records = {names.record_name(rank, save.save_id) for rank in ranks}
    present = save.storage.present(save.directory, {note, *records})
    return note in present or not records <= present


def is_persisted(save: PendingSave, rank: int) -> bool:
    """Return whether an agent that is gone made this rank's shard of `save` durable.

    Such a file must not be written again: the checkpoint may be, or become, committed meanwhile.
    """
    if names.record_name(rank, save.save_id) in save.storage.list(save.directory):
        return True
    # Records go after the manifest has come: in this order one of the two is always seen.
    return _is_committed(save, set(save.storage.list(save.directory)))


def _is_committed(save: PendingSave, present: set[str]) -> bool:
    found = _committed(save.storage, save.iteration) if names.MANIFEST in present else None
    if found is None or found.save_id != save.save_id:
        return False
    save.cost, save.differing, save.compared = found.cost, found.differing, found.compared
    return True


def _committed(storage: Storage, iteration: int) -> manifest.CommitFacts | None:
    """Return what the manifest of `iteration` says of its checkpoint; None if it is none.

    One that is damaged, or a newer release's, is none: a save will replace it. The table of
    contents is not decoded: every node asks after every save, and a large job's is long.
    """
    name = f"{names.iteration_dir(iteration)}/{names.MANIFEST}"
    try:
        encoded = read_whole(storage, name, manifest.MAX_MANIFEST_NBYTES)
        return manifest.decode_facts(encoded, f"{storage.place}/{name}")
    except (FormatVersionError, FileNotFoundError):
        return None
    except FlashCkptError as error:
        if is_damage(error):
            return None
        raise


def _look(save: PendingSave) -> set[str]:
    """Return the files that there are in the directory of `save`, as far as this node needs them.

    The node of rank 0 waits for the records of all ranks, and lists the directory. The others ask
    for the manifest, and for the note that node leaves in rank 0's name, whoever has failed: if two
    thousand nodes listed thirty thousand files every second, metadata servers would do nothing
    else. Now and then they list them all the same: the node of rank 0 may know nothing of the save.
    """
    now = time.monotonic()
    is_due = now - save.listed_at > _LIST_EVERY_S or save.gone_since is not None
    save.listed_all = 0 in save.metas or is_due
    if save.listed_all:
        save.listed_at = now
        return set(save.storage.list(save.directory))
    awaited = (names.MANIFEST, names.failure_name(0, save.save_id))
    return save.storage.present(save.directory, awaited)


def _failure_elsewhere(save: PendingSave, present: set[str]) -> str | None:
    suffix = f"-{save.save_id}.failed"
    for name in sorted(present):
        if name.endswith(suffix):
            note = save.storage.read(f"{save.directory}/{name}", 0, _NOTE_NBYTES)
            return note.decode(errors="replace")
    return None


def _tell_others(save: PendingSave) -> None:
    leave_note(save.storage, save.iteration, save.save_id, min(save.metas), save.error or "")


def leave_note(storage: Storage, iteration: int, save_id: str, rank: int, reason: str) -> None:
    """Tell the agents of other nodes of a failure; on a full or dead disk they will time out."""
    name = f"{names.iteration_dir(iteration)}/{names.failure_name(rank, save_id)}"
    for pause_s in (*_NOTE_RETRIES_S, None):
        try:
            storage.put(name, reason.encode())
            return
        except (FlashCkptError, OSError) as error:
            if pause_s is None or not may_pass(error):
                logger.error("cannot tell other nodes of the failure: %s", error)
                return
            time.sleep(pause_s)
