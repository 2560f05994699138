"""Publishes the commit records of a node's ranks: one file for all, if they end in time.

With a file per rank, a save of 16,384 ranks would create, rename, read and remove as many files in
one directory. A file per node of eight ranks makes it an eighth of that. Only the commit thread
publishes, so no two threads write records of one save.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence

from megatron_flashckpt.agent.failed_save import shown_error
from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.error_classes import may_pass, will_last
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format.commit_record import CommitRecord, encode_records
from megatron_flashckpt.file_format.file_names import iteration_dir, record_name, runs_of
from megatron_flashckpt.storage.base import Storage
from megatron_flashckpt.tracing import phase

logger = logging.getLogger(__name__)

#: Pauses before records are written again after transient errors.
_RETRIES_S = (0.5, 2.0, 8.0)


def put_records(storage: Storage, records: Sequence[CommitRecord]) -> None:
    """Report to all agents that the shards of contiguous ranks are durable. May be repeated.

    After this call, these shards must not be written again: a `put` that raised may have taken
    effect, and the save may be committed.

    Args:
        records: of one save, in the order of ranks.
    """
    first = records[0]
    name = record_name(first.rank, first.save_id, len(records))
    # The file's presence means that every byte of the shards is durable. The file itself need not
    # be durable: the manifest repeats it, and a save without a manifest at a power loss has failed.
    with phase("commit record"):
        storage.put(
            f"{iteration_dir(first.iteration)}/{name}", encode_records(records), durable="nothing"
        )
    hit("persist.record")


def is_due(save: PendingSave, connected: Collection[int]) -> bool:
    """Return whether the waiting records are to be published now. The caller holds the lock.

    Records wait for the node's other ranks, to share a file, but only until `publish_by`: a rank
    may be slow or dead.

    Args:
        connected: ranks of this node with connected trainers, which will stage the same save soon.
    """
    if not save.unpublished or save.needs_no_records:
        return False
    now = time.monotonic()
    if now < save.publish_again_at:
        return False
    world_size = save.world_size
    awaited = {*save.metas, *(rank for rank in connected if rank < world_size)}
    return awaited <= save.persisted or now >= save.publish_by


def publish(save: PendingSave, connected: Collection[int], lock: threading.Condition) -> None:
    """Write the records that are due. Called repeatedly by the commit thread; never raises.

    A transient error is retried; any other error fails the save.
    """
    with lock:
        due = dict(save.unpublished) if is_due(save, connected) else {}
    for ranks in runs_of(due):
        records = [due[rank] for rank in ranks]
        # Before the `put`, which may take effect although it raises.
        save.record_names.add(record_name(ranks.start, save.save_id, len(ranks)))
        try:
            put_records(save.storage, records)
        except Exception as error:  # any failure must be reported to the trainers
            _failed(save, ranks, error, lock)
            return
        with lock:
            for rank in ranks:
                del save.unpublished[rank]
            save.publish_failures = 0


def _failed(save: PendingSave, ranks: range, error: Exception, lock: threading.Condition) -> None:
    """Schedule another attempt after a pause, or fail the save."""
    if (
        isinstance(error, OSError)
        and may_pass(error)
        and save.publish_failures < len(_RETRIES_S)
        and not save.needs_no_records
    ):
        pause_s = _RETRIES_S[save.publish_failures]
        logger.warning(
            "iteration %d: writing its commit records again in %.1f s: %s",
            save.iteration,
            pause_s,
            error,
        )
        save.publish_failures += 1
        save.publish_again_at = time.monotonic() + pause_s
        return
    shown = shown_error(error)
    logger.error("iteration %d: its commit records were not written: %s", save.iteration, shown)
    with lock:
        save.lasts = save.lasts or will_last(error)
        save.error = save.error or shown
        save.failed.update(ranks)
