"""Results of saves: one thread commits or fails them, and the results go to trainers."""

from __future__ import annotations

import functools
import logging
import random
import threading
import time

from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.agent.claim import RunKey
from megatron_flashckpt.agent.cleanup import Sweeper
from megatron_flashckpt.agent.commit import outcome_of
from megatron_flashckpt.agent.failed_save import forget, keep_telling, note_failure_again
from megatron_flashckpt.agent.pending_save import PendingSave, gave_up, wait_reason
from megatron_flashckpt.agent.publication import is_due, publish
from megatron_flashckpt.agent.state import Node, Trainer
from megatron_flashckpt.agent.tidying import (
    CommittedSave,
    Tidier,
    remove_obsolete,
    retire_expired,
)
from megatron_flashckpt.catalog.history import PastSave, append
from megatron_flashckpt.catalog.manifest_facts import KnownManifests
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.memory.slot import SlotHeader, SlotMeta, SlotState

logger = logging.getLogger(__name__)

_TICK_S = 0.2
#: Longest wait of a leaving agent for the removal of files that its commits and crashes left.
_TIDY_S = 10.0
#: Seconds after the commit timeout until a save fails whose storage does not answer.
_HUNG_S = 3.0
_COMMIT_POLL_S = (0.02, 1.0)
#: Failed saves whose failed ranks are remembered. Few saves are pending at a time.
_FAILURES_KNOWN = 16


class Committer:
    """Pending saves of this node's ranks, and the thread that commits them."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.pending: dict[str, PendingSave] = {}
        self._manifests = KnownManifests()
        self._sweeper = Sweeper(node.storage, self._manifests)
        self._tidier = Tidier()
        #: The last run that has loaded, and the iteration that it resumed from; -1: no checkpoint.
        self._resumed: tuple[RunKey | None, int] = (None, -1)
        #: Committed saves after which no checkpoint was removed so far; see `_retire`.
        self._unretired: list[CommittedSave] = []
        self._closing = False
        #: Saves that failed while storage did not answer; their files still exist.
        self._given_up: list[PendingSave] = []
        #: Ranks of this node whose part has failed, by save. Ranks may fail one by one: a rank may
        #: stage its part of a save after that save has failed.
        self._failed: dict[str, set[int]] = {}
        self._thread = threading.Thread(target=self._commit_loop, name="commit", daemon=True)

    def start(self) -> None:
        """Start the threads that commit and tidy."""
        self._thread.start()
        self._tidier.start()

    def close(self) -> None:
        """Stop committing; return when running work has ended or storage keeps it from ending."""
        with self._node.changed:
            self._closing = True
            self._node.changed.notify_all()
        if not self.pending and not self._node.is_stuck():
            self._thread.join(_TIDY_S)
            self._tidier.close(_TIDY_S)

    def look_for_orphans(self, resumed: int | None) -> None:
        """Have orphaned files of crashes removed: a job resumes, and none of its ranks is saving.

        Args:
            resumed: iteration of the checkpoint that the job resumes from; None: no checkpoint.
        """
        run = self._node.fence.newest
        with self._node.changed:
            self._resumed = (run, -1 if resumed is None else resumed)
        self._tidier.add(self._retire)
        wait_s = self._sweeper.find_orphans_soon(
            self.is_pending, resumed, lambda: self._node.fence.newest == run
        )
        self._tidier.add(self._sweeper.sweep)
        if wait_s is not None:
            later = threading.Timer(wait_s, self._tidier.add, [self._sweeper.sweep])
            later.daemon = True
            later.start()

    def join(
        self, number: int, header: SlotHeader, meta: SlotMeta, save_id: str, *, inherited: bool
    ) -> PendingSave:
        """Return the pending save that a rank's slot belongs to. The caller holds the lock."""
        save = self.pending.setdefault(
            save_id,
            PendingSave(
                self._node.storage_at(meta.root),
                header.iteration,
                save_id,
                time.monotonic(),
                inherited=inherited,
                staged_as=header.save_id,
                serves_rank_0=self._node.serves_rank_0,
                run=self._node.fence.newest,
                fence=self._node.fence,
                manifests=self._manifests,
            ),
        )
        save.metas[number] = meta
        return save

    def watch(self) -> None:
        """Report slow saves; fail saves whose storage does not even answer `outcome_of`."""
        with self._node.changed:
            for save in list(self.pending.values()):
                waited = time.monotonic() - save.staged_at
                if waited > self._node.options.slow_save_s and not save.called_slow:
                    save.called_slow = True
                    notice = f"not durable {waited:.0f} s after it was staged: {wait_reason(save)}"
                    logger.warning("iteration %d: %s", save.iteration, notice)
                    # Rank 0 gets the notice for the job, and the first slow rank gets it for its
                    # node.
                    slow = sorted(set(save.metas) - save.persisted)[:1]
                    for number in {*slow, 0} & set(save.metas):
                        report = p.Notice(save.iteration, notice)
                        self._node.ranks[number].report(report)
                if waited > self._node.options.commit_timeout_s + _HUNG_S:
                    error = gave_up(save, self._node.options.commit_timeout_s)
                    logger.error("iteration %d was not saved: %s", save.iteration, error)
                    save.given_up = error
                    self._conclude(save, error)
                    self._given_up.append(save)

    def _commit_loop(self) -> None:
        shortest, longest = _COMMIT_POLL_S
        pause = shortest
        while True:
            with self._node.changed:
                if self._closing:
                    return
                saves = list(self.pending.values())
                given_up, self._given_up = self._given_up, []
                if not saves and not given_up:
                    self._node.changed.wait(_TICK_S)
                    pause = shortest
                    continue
            for save in given_up:
                forget(save)
            concluded = [self._try_conclude(save) for save in saves]
            with self._node.changed:
                if any(concluded):
                    pause = shortest
                elif any(is_due(save, self._connected()) for save in self.pending.values()):
                    pause = shortest  # staged while another save was examined
                # A random pause keeps thousands of nodes from asking for one manifest at once.
                elif not self._node.changed.wait(pause * random.uniform(0.75, 1)):
                    pause = min(2 * pause, longest)
                else:
                    pause = shortest

    def _try_conclude(self, save: PendingSave) -> bool:
        with self._node.traces.recording(save.iteration, save.save_id, None):
            publish(save, self._connected(), self._node.changed)
            finished, error = outcome_of(save, self._node.options.commit_timeout_s)
        if not finished:
            return False
        if error is not None:
            if error != save.given_up:
                level = logging.INFO if save.is_abandoned else logging.ERROR
                logger.log(level, "iteration %d was not saved: %s", save.iteration, error)
            hit("save.failed")
        persisted = set(save.persisted)
        if error is not None:
            # Free the space before trainers learn the result: on a full disk the next save needs
            # it.
            forget(save)
            note_failure_again(save)
            keep_telling(save, save.staged_at + self._node.options.commit_timeout_s)
        is_retry = save.save_id != save.staged_as
        if not save.is_abandoned and save.past is None and not (is_retry and error is not None):
            self._enter_into_history(save, error)
        with self._node.changed:
            self._conclude(save, error)
            late_persisted = save.persisted - persisted
        if error is not None and late_persisted:
            # These shards were written while the others were being removed.
            forget(save)
        if error is None and 0 in save.metas and save.past is None:
            self._tidier.add(functools.partial(self._tidy, CommittedSave.of(save)))
        else:
            self._node.traces.write(save.save_id)
        return True

    def _connected(self) -> set[int]:
        """Return the ranks of this node whose trainers are connected."""
        with self._node.changed:
            ranks = self._node.ranks.items()
            return {number for number, rank in ranks if rank.connection is not None}

    def _tidy(self, save: CommittedSave) -> None:
        """Remove obsolete files after a commit; no trainer waits for this."""
        with self._node.traces.recording(save.iteration, save.save_id, None):
            remove_obsolete(save, self._pending_ids)
            self._retire(save)
        self._sweeper.find_orphans(
            self.is_pending, save.iteration, save.previous, lambda: save.is_of_newest_run
        )
        self._sweeper.sweep()
        self._node.traces.write(save.save_id)

    def _retire(self, committed: CommittedSave | None = None) -> None:
        """Remove checkpoints that no rule keeps after a commit.

        If a job has started since the save was staged, it may be loading an older checkpoint. So
        the removal waits until that job has resumed from this save or a later one, or has committed
        a save of its own. In the second case its rules count, which may keep more.
        """
        with self._node.changed:
            newest, (run, iteration) = self._node.fence.newest, self._resumed
            waiting = [*self._unretired, *([] if committed is None else [committed])]
            resumed: int | None = None
            if committed is not None and committed.run == newest:
                due, self._unretired = [save.under_rules_of(committed) for save in waiting], []
            else:
                resumed = iteration
                due = [save for save in waiting if run == newest and save.iteration <= iteration]
                self._unretired = [save for save in waiting if save not in due]

        def is_current() -> bool:
            return self._node.fence.newest == newest

        for save in due:
            retire_expired(save, is_current, resumed)
        if not is_current():  # storage may hang until the job has been started again
            with self._node.changed:
                self._unretired += due

    def _pending_ids(self) -> set[str]:
        with self._node.changed:
            return set(self.pending)

    def _enter_into_history(self, save: PendingSave, error: str | None) -> None:
        """Append the result of a save to the history, for people."""
        if 0 in save.metas:
            past = PastSave(
                iteration=save.iteration,
                save_id=save.save_id,
                ended_at=time.time(),
                seconds=time.monotonic() - save.staged_at,
                error=error,
                world_size=save.metas[0].world_size,
                cost=save.cost,
            )
            with self._manifests.changing:
                append(save.storage, past, self._node.options.history)

    def _conclude(self, save: PendingSave, error: str | None) -> None:
        """Mark the slots and queue the result for trainers, once. The caller holds the lock."""
        if error is None and save.past is None:
            self._supersede(save)
            if save.superseded_by is None:
                self._node.stored = save.save_id
            if save.superseded_by is None and 0 in save.metas:  # this agent moved the tracker
                self._node.committed = save.iteration
        if self.pending.get(save.save_id) is not save:
            return  # failed earlier, while storage did not answer
        seconds = time.monotonic() - save.staged_at
        if error is None:
            logger.info("committed iteration %d after %.3f s", save.iteration, seconds)
        del self.pending[save.save_id]
        outcome = p.Outcome(
            save.iteration,
            save.save_id,
            error,
            seconds,
            cost=save.cost,
            failed_ranks=tuple(sorted(self._failed_ranks(save))),
            lasts=error is not None and save.lasts,
            committed=self._node.committed,
            held=error is not None and not (save.is_final or save.is_abandoned or save.past),
        )
        state = SlotState.DURABLE if error is None else SlotState.FAILED
        if save.is_abandoned:
            state = SlotState.EMPTY
        for number in save.metas:
            rank = self._node.ranks[number]
            self.queue_result(rank, outcome)
            if rank.slots is not None:
                rank.slots.mark(save.staged_as, state, is_final=save.is_final)
        hit("save.marked")
        self._node.changed.notify_all()

    def _failed_ranks(self, save: PendingSave) -> set[int]:
        """Return the ranks of this node whose part has failed so far. The caller holds the lock."""
        if not save.failed:
            return set()
        failed = self._failed.setdefault(save.save_id, set())
        failed |= save.failed
        while len(self._failed) > _FAILURES_KNOWN:
            del self._failed[next(iter(self._failed))]
        return failed

    def is_pending(self, iteration: int) -> bool:
        with self._node.changed:
            return any(save.iteration == iteration for save in self.pending.values())

    def open_saves(self, number: int) -> set[str]:
        """Return the saves of a rank that have no result yet. The caller holds the lock.

        Saves that an earlier connection of the rank staged are included. The rank may look for a
        save in storage as soon as that save is no longer open.
        """
        staged = {save.staged_as for save in self.pending.values() if number in save.metas}
        return self._node.ranks[number].awaited | staged

    def queue_result(self, rank: Trainer, outcome: p.Outcome) -> None:
        """Report `outcome` at the trainer's next poll, if that trainer staged the save."""
        if outcome.save_id in rank.awaited:
            rank.awaited.remove(outcome.save_id)
            rank.report(outcome)
        else:
            # The rank has one open save less: it may look for the save in storage now.
            rank.signal()

    def _supersede(self, save: PendingSave) -> None:
        """Keep older pending saves from moving the tracker back."""
        for other in self.pending.values():
            if other.order < save.order and other.superseded_by != other.iteration:
                other.superseded_by = save.iteration
