"""The driver of the pending saves: carries out what `commit_core` decides, and tells the trainers.

One thread creates and reads names in storage. The node's lock guards all state; no storage is
asked while it is held.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
import threading
import time

from megatron_flashckpt.agent import commit_core as core
from megatron_flashckpt.agent import proposals
from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.agent.commit_core import CommitCore
from megatron_flashckpt.agent.durable_commands import DurableCommands, announce
from megatron_flashckpt.agent.janitor import CommittedSave, Janitor, remove_own
from megatron_flashckpt.agent.node import Node, Trainer
from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.agent.runs import why_overtaken
from megatron_flashckpt.agent.track import moved_tracker
from megatron_flashckpt.agent.worker import Worker
from megatron_flashckpt.catalog.directory import later_run
from megatron_flashckpt.catalog.history import PastSave, append
from megatron_flashckpt.catalog.lineage import History
from megatron_flashckpt.error_classes import class_of, will_last
from megatron_flashckpt.errors import CorruptCheckpointError, FlashCkptError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.end import End, Failure
from megatron_flashckpt.file_format.file_names import run_number
from megatron_flashckpt.file_format.run_object import RunObject
from megatron_flashckpt.memory.slot import SlotHeader, SlotMeta, SlotState
from megatron_flashckpt.storage.retrying_store import RetryingStore
from megatron_flashckpt.storage.store import Store
from megatron_flashckpt.tracing import phase

logger = logging.getLogger(__name__)

#: Longest pause of the driver, in seconds: a connected rank may have gone meanwhile.
_TICK_S = 0.2
#: Longest wait of a leaving agent for the removal of files that its commits and crashes left.
_TIDY_S = 10.0
#: Seconds after the commit timeout until a save is concluded whose storage does not even answer.
_HUNG_S = 3.0
#: Seconds that an agent waits for its trainers to report a later run, which may be their own.
_REPORT_S = 10.0
#: Failed saves whose failed ranks are remembered. Few saves are pending at a time.
_FAILURES_KNOWN = 16
_GIVEN_UP = Failure(
    failed="a crash interrupted it; training resumed from another checkpoint",
    is_final=True,
    was_interrupted=True,
)


class Committer:
    """Pending saves of this node's ranks, and the thread that brings them to their end."""

    def __init__(self, node: Node, janitor: Janitor, commands: DurableCommands) -> None:
        self._node = node
        self._janitor = janitor
        self._commands = commands
        self.pending: dict[str, PendingSave] = {}
        self._closing = False
        #: Ranks of this node whose part has failed, by save. Ranks may fail one by one: a rank may
        #: stage its part of a save after that save has failed.
        self._failed: dict[str, set[int]] = {}
        #: The last attempt whose end is known to be a failure, by the id in the slots.
        self._ended: dict[str, str] = {}
        #: Appends to the history, for which no trainer and no save waits.
        self._history = Worker("history", "an ended save is not in the history")
        self._thread = threading.Thread(target=self._drive, name="commit", daemon=True)

    def start(self) -> None:
        """Start the driver."""
        self._thread.start()

    def close(self) -> None:
        """Stop; return when running work has ended or storage keeps it from ending."""
        with self._node.changed:
            self._closing = True
            self._node.changed.notify_all()
        if not self.pending and not self._node.is_stuck():
            self._thread.join(_TIDY_S)
            deadline = time.monotonic() + _TIDY_S
            self._history.close(deadline - time.monotonic())
            self._node.traces.close(deadline - time.monotonic())
            self._janitor.close(deadline - time.monotonic())

    # ------------------------------------------------------------------ what others report

    def join(
        self, number: int, header: SlotHeader, meta: SlotMeta, save_id: str, *, is_adopted: bool
    ) -> PendingSave:
        """Return the pending save that a rank's slot belongs to. The caller holds the lock.

        Args:
            is_adopted: True if another agent had the slot before.
        """
        now = time.monotonic()
        save = self.pending.get(save_id)
        if save is None:
            store = self._node.store_at(meta.root)
            place = f"{store.place}/{file_names.iteration_dir(header.iteration)}"
            timeout_s = self._node.options.commit_timeout_s
            machine = CommitCore(place, meta.world_size, now, timeout_s, store.pace)
            save = PendingSave(store, header.iteration, save_id, header.save_id, machine)
            self.pending[save_id] = save
        save.metas[number] = meta
        save.core.note(now, core.Joined(number, is_adopted))
        self._node.changed.notify_all()
        return save

    def note(self, save: PendingSave, seen: core.Observation) -> None:
        """Report what happened to a save. The caller holds the lock."""
        save.core.note(time.monotonic(), seen)
        self._node.changed.notify_all()

    def part_failed(self, save: PendingSave, number: int, failure: Failure) -> None:
        """Report that the part of a rank cannot be written. The caller holds the lock."""
        self._failed.setdefault(save.save_id, set()).add(number)
        while len(self._failed) > _FAILURES_KNOWN:
            del self._failed[next(iter(self._failed))]
        self.note(save, core.GivenUp(failure))

    def run_opened(self, resumed: str | None) -> None:
        """Give up the pending saves that no rank of the newest run completes.

        These are the saves that are not of its history, and saves of it that not all ranks of this
        node have staged: all ranks have started anew, so no further part will be staged. The caller
        holds the lock.

        Args:
            resumed: the save that training resumes from; its parts may come from other nodes.
        """
        history = self._node.history
        for save in self.pending.values():
            counts = history is not None and history.holds(save.save)
            is_staged = save.metas.keys() >= self._node.ranks.keys()
            if save.staged_as != resumed and not (counts and is_staged):
                save.is_given_up = True
                self.note(save, core.GivenUp(_GIVEN_UP))

    # ------------------------------------------------------------------ what others ask

    def pending_ids(self) -> set[str]:
        with self._node.changed:
            return set(self.pending)

    def next_attempt(self, staged_as: str) -> str:
        """Return the name under which a save is written again. The caller holds the lock.

        It is that of the first attempt without a known end, so all nodes come to the same name.
        """
        failed = self._ended.get(staged_as)
        return staged_as if failed is None else file_names.next_attempt(failed)

    def is_over(self, save: PendingSave) -> bool:
        """Return whether further shards of `save` are useless."""
        with self._node.changed:
            return self.pending.get(save.save_id) is not save or save.core.is_over

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

    def watch(self) -> None:
        """Report slow saves; conclude saves whose storage does not even answer the driver."""
        with self._node.changed:
            for save in list(self.pending.values()):
                waited = time.monotonic() - save.core.staged_at
                if waited > self._node.options.slow_save_s and not save.called_slow:
                    save.called_slow = True
                    reason = save.core.waits_for()
                    notice = f"not durable {waited:.0f} s after it was staged: {reason}"
                    logger.warning("iteration %d: %s", save.iteration, notice)
                    # Rank 0 gets the notice for the job, and the first slow rank gets it for its
                    # node.
                    slow = sorted(save.metas.keys() - save.core.durable)[:1]
                    for number in {*slow, 0} & save.metas.keys():
                        self._node.ranks[number].report(p.Notice(save.iteration, notice))
                if waited > save.core.timeout_s + _HUNG_S:
                    # A known end is final: only what follows it hangs, such as the tracker.
                    end = save.core.end
                    unknown = Failure(failed=save.core.gave_up())
                    self._conclude(save, unknown if end is None else end.failure)

    # ------------------------------------------------------------------ the driver

    def _drive(self) -> None:
        while True:
            with self._node.changed:
                if self._closing:
                    return
                saves = list(self.pending.values())
                if not saves:
                    self._node.changed.wait(_TICK_S)
                    continue
            until = min(self._advance_one(save) for save in saves)
            with self._node.changed:
                is_unchanged = saves == list(self.pending.values())
                pause_s = until - time.monotonic()
                if is_unchanged and pause_s > 0:
                    # A random pause keeps thousands of nodes from asking for one end at once.
                    self._node.changed.wait(min(pause_s * random.uniform(1, 1.25), _TICK_S))

    def _advance_one(self, save: PendingSave) -> float:
        """Advance a save; an error in it ends neither the driver nor other saves."""
        try:
            return self._advance(save)
        except Exception as error:
            logger.exception("iteration %d", save.iteration)
            with self._node.changed:
                end = save.core.end  # a known one is final: only what follows it has failed
                unknown = Failure(failed=f"{type(error).__name__}: {error}")
                self._conclude(save, unknown if end is None else end.failure)
            return 0.0

    def _advance(self, save: PendingSave) -> float:
        """Carry out actions of one save until it has to wait; return until when."""
        while True:
            with self._node.changed:
                if self.pending.get(save.save_id) is not save:  # concluded without this thread
                    return 0.0
                now = time.monotonic()
                action = save.core.next(now, self._trainers(save))
            if isinstance(action, core.Wait):
                return action.until
            if isinstance(action, core.Conclude):
                self._finish(save, action)
                return 0.0
            with self._node.traces.recording(save.iteration, save.save_id, None):
                seen = self._carried_out(save, action)
            with self._node.changed:
                save.core.note(time.monotonic(), seen)

    def _trainers(self, save: PendingSave) -> core.Trainers:
        """Return which ranks of this node have connected trainers. The lock is held.

        Only processes of the run that makes the save had a part of it: ranks move between nodes.
        """
        run = file_names.run_of(save.save_id)
        ranks = self._node.ranks.items()
        return core.Trainers(
            frozenset(number for number, rank in ranks if rank.connection is not None),
            frozenset(n for n, rank in ranks if rank.connection is None and rank.run == run),
        )

    def _carried_out(self, save: PendingSave, action: core.Action) -> core.Observation:
        """Carry out one action; return what was seen. Never raises."""
        try:
            return self._attempt(save, action)
        except (FlashCkptError, OSError) as error:
            passes = self._node.may_pass(error) and not isinstance(error, CorruptCheckpointError)
            if passes:
                logger.warning("iteration %d: trying again: %s", save.iteration, error)
            return core.Trouble(str(error), passes, will_last(error))
        except Exception as error:  # otherwise the driver would end
            logger.exception("iteration %d", save.iteration)
            return core.Trouble(f"{save.core.place}: {type(error).__name__}: {error}", False)

    def _attempt(self, save: PendingSave, action: core.Action) -> core.Observation:
        store, iteration, save_id = save.store, save.iteration, save.save_id
        match action:
            case core.WriteRecords(records):
                proposals.create_records(store, records)
                return core.Recorded(frozenset(record.rank for record in records))
            case core.Look(with_records):
                if (overtaken := self._overtaken(save)) is not None:
                    return core.GivenUp(overtaken)
                if (ended := proposals.look(store, iteration, save_id)) is not None:
                    return ended
                if not with_records:
                    return core.Looked()
                names = [entry.name for entry in store.list(save.directory)]
                return core.Looked(file_names.records_of(names, save_id, save.core.world_size))
            case core.Commit(names):
                hit("commit.ready")
                if self._node.options.on_durable is not None:
                    announce(store, save.save)
                with self._node.changed:
                    trained_s = self._node.trained_s(file_names.run_of(save_id))
                try:
                    return proposals.propose_manifest(
                        store, iteration, save_id, save.metas[0], names, trained_s
                    )
                except (proposals.MissingRecordError, proposals.MissingShardsError) as error:
                    # Names that were seen are removed for a failed end, so nothing is waited for
                    # before the end was asked for.
                    if (end := proposals.look(store, iteration, save_id)) is not None:
                        return end
                    if isinstance(error, proposals.MissingRecordError):
                        return core.Missing(error.name)
                    logger.warning("iteration %d: trying again: %s", save.iteration, error)
                    return core.Unseen(str(error))
            case core.Fail(failure, discarded):
                # Another agent may have found a shard of this one, recorded it, and committed the
                # save. So nothing is removed before the end is known, but on a full disk.
                try:
                    return proposals.propose_failure(store, iteration, save_id, failure)
                except OSError as error:
                    if class_of(error).kind != "full":
                        raise
                if (ended := proposals.look(store, iteration, save_id)) is not None:
                    return ended
                remove_own(store, iteration, save_id, discarded)
                return proposals.propose_failure(store, iteration, save_id, failure)
            case core.MakeDurable(ended):
                store.make_durable(save.end)
                return dataclasses.replace(ended, is_durable=True)
            case _:
                raise AssertionError(action)

    def _overtaken(self, save: PendingSave) -> Failure | None:
        """Return why the save is useless if a later run has started elsewhere. Asked once."""
        if save.has_looked_for_runs or not save.core.holds_rank_0:
            return None
        later = self._later_run(save.store)
        save.has_looked_for_runs = True
        return None if later is None else _why_useless(save, later)

    def _later_run(self, store: Store) -> RunObject | None:
        """Return a later run, of which this node has no trainers; None if there is none.

        A run has its object a moment before its trainers report it to their agents.
        """
        with self._node.changed:
            number = self._node.run_number
        later = later_run(store, number) if number else None
        if later is None:
            return None
        with self._node.changed:
            is_own = self._node.changed.wait_for(
                lambda: self._node.run_number >= run_number(later.name), _REPORT_S
            )
        return None if is_own else later

    # ------------------------------------------------------------------ the result

    def _finish(self, save: PendingSave, result: core.Conclude) -> None:
        """Do what follows from the end of a save, then tell the trainers."""
        end, failure = result.end, result.failure
        previous: int | None = None
        if end is End.COMMITTED and save.core.holds_rank_0:
            with self._node.traces.recording(save.iteration, save.save_id, None):
                previous, failure = self._track(save)
        if failure is not None:
            # What a crash of training interrupts is no error of the agent, which keeps its log. The
            # end says so, because another node may hear of the crash first.
            is_of_crash = save.is_given_up or failure.was_interrupted
            level = logging.INFO if is_of_crash else logging.ERROR
            logger.log(level, "iteration %d was not saved: %s", save.iteration, failure.failed)
            hit("save.failed")
        if end is End.FAILED:
            # Free the space before trainers learn the result: on a full disk the next save needs
            # it.
            remove_own(save.store, save.iteration, save.save_id, frozenset(save.metas))
        traced = self._node.traces.recording(save.iteration, save.save_id, None)
        with traced, phase("report result"), self._node.changed:
            if end is End.FAILED:
                self._ended[save.staged_as] = save.save_id
                while len(self._ended) > _FAILURES_KNOWN:
                    del self._ended[next(iter(self._ended))]
            self._conclude(save, failure)
        self._enter_into_history(save, failure)
        self._node.traces.write(save.save_id)
        if end is End.COMMITTED and failure is None:
            self._tidy_after(save, previous)

    def _track(self, save: PendingSave) -> tuple[int | None, Failure | None]:
        """Move the tracker to a committed save, if loads will count it.

        Errors that may pass are waited out for as long as before the commit.

        Returns:
            The iteration that the tracker has passed, and why the save does not count.
        """
        store = RetryingStore(save.store, call_s=core.PATIENCE_S)
        try:
            later = self._later_run(store)
            if later is not None:  # the agent of its rank 0 moves the tracker
                return None, _why_useless(save, later)
            with self._node.changed:
                history = self._node.history
            if history is not None and not history.holds(save.save):
                return None, None
            return moved_tracker(store, save.save, history), None
        except (FlashCkptError, OSError) as error:
            # The end counts, not the tracker: loads of this package find the checkpoint.
            text = f"the checkpoint is committed, but its tracker was not written: {error}"
            logger.error("iteration %d: %s", save.iteration, text)
            with self._node.changed:
                if (rank := self._node.ranks.get(0)) is not None:  # it may have departed since
                    rank.report(p.Notice(save.iteration, text))
            return None, None

    def _counting_history(self, save: PendingSave) -> History | None:
        """Return the newest run's history if that run is led here and the save counts in it.

        The caller holds the lock.
        """
        history = self._node.history
        counts = history is not None and self._node.leads and history.holds(save.save)
        return history if counts and save.core.holds_rank_0 else None

    def _tidy_after(self, save: PendingSave, previous: int | None) -> None:
        with self._node.changed:
            history = self._counting_history(save)
        if history is None:
            return
        meta = save.metas[0]
        self._janitor.after_commit(
            CommittedSave(
                store=save.store,
                iteration=save.iteration,
                save_id=save.save_id,
                history=history,
                rules=meta.retention,
                retain_interval=meta.retain_interval,
                previous=previous,
            )
        )

    def remove_late(self, save: PendingSave, number: int) -> None:
        """Delete the shard of a rank that was written after its save had failed.

        Called after the shard was reported. If the end is not known by then, `_finish` finds the
        shard.
        """
        with self._node.changed:
            must_go = save.core.has_failed
        if must_go:
            remove_own(save.store, save.iteration, save.save_id, frozenset({number}))

    def _enter_into_history(self, save: PendingSave, failure: Failure | None) -> None:
        """Have the result of a save appended to the history, for people."""
        is_again = save.save_id != save.staged_as
        if not (save.core.holds_rank_0 and self._node.options.history):
            return
        if save.is_given_up or (is_again and failure is not None):
            return
        past = PastSave(
            iteration=save.iteration,
            save_id=save.save_id,
            ended_at=time.time(),
            seconds=time.monotonic() - save.core.staged_at,
            error=None if failure is None else failure.failed,
            world_size=save.core.world_size,
            cost=save.core.cost,
        )
        self._history.add(functools.partial(append, RetryingStore(save.store), past))

    def _conclude(self, save: PendingSave, failure: Failure | None) -> None:
        """Mark the slots and queue the result for trainers, once. The caller holds the lock."""
        if self.pending.get(save.save_id) is not save:
            return  # concluded earlier, while storage did not answer
        seconds = time.monotonic() - save.core.staged_at
        if failure is None:
            logger.info("committed iteration %d after %.3f s", save.iteration, seconds)
            is_counted = self._counting_history(save) is not None
            if is_counted and self._node.options.on_durable is not None:
                # Before the save is no longer pending: an agent without either may leave.
                self._commands.add(save.store, save.save)
        del self.pending[save.save_id]
        is_final = failure is not None and failure.is_final
        outcome = p.Outcome(
            save.iteration,
            save.save_id,
            None if failure is None else failure.failed,
            seconds,
            cost=save.core.cost,
            failed_ranks=tuple(sorted(self._failed.get(save.save_id, ()))),
            lasts=failure is not None and failure.lasts,
            held=failure is not None and not (is_final or save.is_given_up),
        )
        state = SlotState.DURABLE if failure is None else SlotState.FAILED
        if save.is_given_up:
            state = SlotState.EMPTY
        for number in save.metas:
            rank = self._node.ranks[number]
            self.queue_result(rank, outcome)
            if rank.slots is not None:
                rank.slots.mark(save.staged_as, state, is_final=is_final)
        hit("save.marked")
        self._node.changed.notify_all()


def _why_useless(save: PendingSave, later: RunObject) -> Failure | None:
    """Return why a save does not count any more; None if a later run continues it."""
    if History(later.name, later.ancestors).holds(save.save):
        return None
    return Failure(failed=why_overtaken(save.store, later), is_final=True)
