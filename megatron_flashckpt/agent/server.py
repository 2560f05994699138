"""The agent: serves the node's trainers, persists what they stage, commits, and outlives them.

Threads: one accepts, one per trainer answers, a pool persists, one commits. All shared state is
behind one lock, whose condition is notified on every change; nothing slow happens while it is held.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.agent.commit import (
    PendingSave,
    awaited_by,
    forget,
    gave_up,
    is_persisted,
    leave_note,
    outcome_of,
)
from megatron_flashckpt.agent.leftovers import Sweeper
from megatron_flashckpt.agent.persist import digest_slot, persist_slot, stored_digests
from megatron_flashckpt.agent.slots import RankSlots, SlotInfo, only_in_memory
from megatron_flashckpt.agent.templates import TemplateStore
from megatron_flashckpt.errors import AgentError, FlashCkptError
from megatron_flashckpt.faults import reach
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import Slot, SlotHeader, SlotState
from megatron_flashckpt.storage.posix import PosixStorage

if TYPE_CHECKING:
    from megatron_flashckpt.agent.peers.redundancy import Redundancy

logger = logging.getLogger(__name__)

_TICK_S = 0.2
#: Longest wait of an agent that leaves for the removal of what earlier crashes left.
_TIDY_S = 10.0
_BACKLOG = 128
#: Saves of a rank that may wait for their commit at a time: more would pile up without end where
#: storage commits more slowly than the saves come.
_UNCOMMITTED = 8
#: Seconds beyond the commit timeout after which a save is given up without a word from storage.
_HUNG_S = 3.0
_COMMIT_POLL_S = (0.02, 1.0)
#: Seconds for which an agent that nobody has talked to yet stays.
_UNCLAIMED_S = 60.0


@dataclasses.dataclass
class AgentOptions:
    """What the agent is started with."""

    root: str
    grace_s: float
    persist_threads: int
    commit_timeout_s: float
    slow_save_s: float
    sigterm_timeout_s: float
    persist_on_leave: bool


class _Rank:
    """What the agent keeps for one trainer, across its restarts."""

    def __init__(self) -> None:
        self.slots: RankSlots | None = None
        self.retired: list[RankSlots] = []
        self.awaited: set[str] = set()
        """Saves that the connected trainer has staged and was not told the outcome of."""
        self.untold: list[p.Outcome] = []
        self.notices: list[p.Notice] = []
        self.left = False
        self.connection: socket.socket | None = None

    def forget_saves(self) -> None:
        """Tell a later trainer nothing of what this one has staged.

        No failure of a save that a crash cut short may stop a job that has restarted well.
        """
        self.awaited.clear()
        self.untold.clear()
        self.notices.clear()


class Agent:
    """One per node and save directory. `serve` runs until the agent is not needed any more."""

    def __init__(self, listener: socket.socket, options: AgentOptions) -> None:
        self._listener = listener
        self._options = options
        self._storage = PosixStorage(options.root)
        self._changed = threading.Condition()
        self._ranks: dict[int, _Rank] = {}
        self._pending: dict[str, PendingSave] = {}
        self._templates = TemplateStore(self._changed)
        self._peers: Redundancy | None = None
        self._sweeper = Sweeper(self._storage)
        self._connections = 0
        self._last_seen = time.monotonic()
        #: Iteration of the newest checkpoint that is known to be in storage.
        self._committed = -1
        self._parting = False
        self._pool = concurrent.futures.ThreadPoolExecutor(options.persist_threads, "persist")
        # Of its own: what takes a second must not wait for what takes minutes.
        self._digest_pool = concurrent.futures.ThreadPoolExecutor(1, "digest")
        self._closing = False
        #: Saves that were concluded while storage did not answer; their files are still there.
        self._given_up: list[PendingSave] = []
        #: When to end, at the latest; set by a signal.
        self._deadline: float | None = None

    # ------------------------------------------------------------------ life

    def serve(self) -> None:
        """Accept trainers until all have left, or none has come back for the grace time."""
        committer = threading.Thread(target=self._commit_loop, name="commit", daemon=True)
        committer.start()
        # Again, and from this process: whoever connects can see who serves (`protocol.peer`).
        self._listener.listen(_BACKLOG)
        self._listener.settimeout(_TICK_S)
        while not self._may_leave():
            self._watch()
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                with self._changed:
                    self._connections += 1
                threading.Thread(target=self._converse, args=(connection,), daemon=True).start()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._digest_pool.shutdown()
        if not self._pending and not self._is_stuck():
            committer.join(_TIDY_S)
            self._pool.shutdown()
        if self._peers is not None:
            self._peers.close()
        for rank in self._ranks.values():
            if rank.slots is not None:
                rank.slots.slab.close()

    def end_soon(self) -> None:
        """Have `serve` return when all that is staged is durable and no trainer is left.

        At the latest after `sigterm_timeout_s`; called again: at once. Takes no lock, because a
        signal handler calls it.
        """
        wait_s = 0.0 if self._deadline is not None else self._options.sigterm_timeout_s
        self._deadline = time.monotonic() + wait_s

    def _may_leave(self) -> bool:
        with self._changed:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                for save in self._pending.values():
                    logger.error("told to end: iteration %d is not durable", save.iteration)
                return True
            if self._connections or (self._pending and not self._parting):
                self._last_seen = time.monotonic()
            if self._connections or self._pending:
                return False
            patience = self._options.grace_s if self._ranks else _UNCLAIMED_S
            if (
                self._parting
                or self._deadline is not None
                or (self._ranks and all(rank.left for rank in self._ranks.values()))
                or time.monotonic() - self._last_seen > patience
            ):
                self._parting = self._persist_kept()
                return not self._parting
            return False

    def _persist_kept(self) -> bool:
        """Write what is in memory only and would be lost; return whether there is any."""
        slots = {number: rank.slots for number, rank in self._ranks.items() if rank.slots}
        if not self._options.persist_on_leave or len(slots) < len(self._ranks):
            return False
        saves = only_in_memory(list(slots.values()), self._committed)
        for save_id in saves:
            logger.info("save %s is in memory only: writing it before leaving", save_id)
            for number, theirs in slots.items():
                slot = theirs.kept()[save_id]
                slot.set_state(SlotState.STAGED)
                theirs.infos[slot.index].claimed = False
                self._take_over(number, slot.index)
        return bool(saves)

    def _is_stuck(self) -> bool:
        """Return whether a shard of a save that was given up is still being written."""
        return any(
            slots.busy
            for rank in self._ranks.values()
            for slots in (rank.slots, *rank.retired)
            if slots is not None
        )

    def _watch(self) -> None:
        """Say which saves take long; end those whose storage does not even answer `outcome_of`."""
        with self._changed:
            for save in list(self._pending.values()):
                waited = time.monotonic() - save.staged_at
                if waited > self._options.slow_save_s and not save.called_slow:
                    save.called_slow = True
                    notice = f"not durable {waited:.0f} s after it was staged: {awaited_by(save)}"
                    logger.warning("iteration %d: %s", save.iteration, notice)
                    for number in save.metas:
                        told = p.Notice(save.iteration, notice)
                        self._ranks[number].notices.append(told)
                if waited > self._options.commit_timeout_s + _HUNG_S:
                    error = gave_up(save, self._options.commit_timeout_s)
                    logger.error("iteration %d was not saved: %s", save.iteration, error)
                    self._conclude(save, error)
                    self._given_up.append(save)

    # ------------------------------------------------------------------ conversation

    def _converse(self, connection: socket.socket) -> None:
        number: int | None = None
        try:
            if p.peer(connection).uid != os.getuid():
                logger.warning("refused a connection of user %d", p.peer(connection).uid)
                return
            number = self._greet(connection)
            while number is not None:
                body, fd = p.receive(connection)
                try:
                    request = p.decode_request(body)
                except msgspec.MsgspecError:
                    if fd is not None:
                        os.close(fd)
                    raise
                try:
                    answer = self._answer(number, request, fd)
                except FlashCkptError as error:
                    answer = (p.Refused(str(error)),)
                p.send(connection, *answer)
        except (EOFError, OSError, msgspec.MsgspecError, FlashCkptError) as error:
            if not isinstance(error, EOFError):
                logger.warning("rank %s: connection ended (%s)", number, error)
        finally:
            connection.close()
            self._farewell(number, connection)

    def _greet(self, connection: socket.socket) -> int | None:
        body, fd = p.receive(connection)
        if fd is not None:
            os.close(fd)
        hello = p.decode_request(body)
        if not isinstance(hello, p.Hello) or hello.protocol != p.PROTOCOL_VERSION:
            reason = f"this agent speaks protocol {p.PROTOCOL_VERSION}; end it (pid {os.getpid()})"
            p.send(connection, p.Refused(reason))
            return None
        with self._changed:
            rank = self._ranks.setdefault(hello.rank, _Rank())
            rank.left = False
            rank.connection = connection
            self._parting = False
            self._inherit(hello.rank)
            rank.forget_saves()
        p.send(connection, p.Welcome(os.getpid(), self._options.root))
        return hello.rank

    def _farewell(self, number: int | None, connection: socket.socket) -> None:
        with self._changed:
            self._connections -= 1
            self._last_seen = time.monotonic()
            rank = self._ranks.get(-1 if number is None else number)
            # A successor of the same rank may have connected already: its slots are not ours.
            if number is not None and rank is not None and rank.connection is connection:
                rank.connection = None
                self._inherit(number)
                rank.forget_saves()
            self._changed.notify_all()

    def _answer(
        self, number: int, request: p.Request, fd: int | None
    ) -> tuple[p.Reply] | tuple[p.Reply, int]:
        """Return the reply, with the descriptor to send along if any."""
        if isinstance(request, p.AttachSlab) and fd is not None:
            taken = self._attach(number, Slab.attach(fd))
            reach("agent.attached")
            return (p.Attached(taken),)
        if fd is not None:
            os.close(fd)
        if isinstance(request, p.Recover):
            ended = self._peers is None or self._peers.recover(
                number, request.saves, request.wait_s
            )
            return (p.Recovered(ended),)
        if isinstance(request, p.Adopt) and number == 0:
            # Before any rank goes on: none of them has a save under way.
            self._sweeper.look_soon(self._is_pending)
        with self._changed:
            rank = self._ranks[number]
            match request:
                case p.TakeSlab():
                    if rank.slots is None:
                        return (p.SlabOffer(False, ()),)
                    offers = tuple(rank.slots.offers(self._committed))
                    return p.SlabOffer(True, offers), rank.slots.slab.fd
                case p.Adopt():
                    self._adopt(number, request)
                    return (p.Done(),)
                case p.Acquire():
                    return (self._acquire(rank, request.wait_s),)
                case p.Staged():
                    self._take_over(number, request.slot)
                    return (p.Done(),)
                case p.Abandon():
                    self._abandon(number, request)
                    return (p.Done(),)
                case p.GetTemplate():
                    return (p.TemplateReply(self._templates.get(request.fingerprint)),)
                case p.PutTemplate():
                    self._templates.put(request.fingerprint, request.encoded)
                    return (p.Done(),)
                case p.Poll():
                    return (self._poll(rank, request.wait_s),)
                case p.OpenPeers():
                    return (self._open_peers(request),)
                case p.JoinPeers() if self._peers is not None:
                    self._peers.join(request)
                    return (p.Done(),)
                case p.Leave():
                    rank.left = True
                    self._changed.notify_all()
                    return (p.Done(),)
                case _:
                    return (p.Refused(f"unexpected {type(request).__name__}"),)

    def _attach(self, number: int, slab: Slab) -> tuple[str, ...]:
        with self._changed:
            rank = self._ranks[number]
            if rank.slots is not None and rank.slots.slab.is_same(slab):
                # Its trainer has reconnected; what we know of its slots stays true.
                slab.close()
            else:
                self._replace_slots(rank, RankSlots(slab))
                self._protect(number)
            return self._inherit(number)

    def _protect(self, number: int) -> None:
        """Let other nodes have what a rank brought along, as far as they do not have it already."""
        slots = self._ranks[number].slots
        if slots is None or self._peers is None:
            return
        for offer in reversed(slots.offers()):
            self._peers.staged(number, slots, offer.slot)

    def _inherit(self, number: int) -> tuple[str, ...]:
        """Persist what a rank has staged, doorbell or not; drop what it had half copied.

        Nobody is writing to its slots: the trainer is gone, or hands over a slab that was another
        agent's. What was staged there may be durable in part, or committed, already.
        """
        slots = self._ranks[number].slots
        if slots is None:
            return ()
        slots.discard_torn()
        taken: list[str] = []
        for index in slots.open():
            try:
                taken.append(self._take_over(number, index))
            except FlashCkptError as error:
                logger.error("rank %d: what is staged in slot %d is lost: %s", number, index, error)
                continue
            save = self._pending.get(taken[-1])
            if save is not None:
                save.later |= slots.saves_after(index)
        return tuple(taken)

    def _open_peers(self, request: p.OpenPeers) -> p.PeersOpened:
        if self._peers is None:
            # pyzmq is loaded only where it is needed, so that other agents start fast.
            from megatron_flashckpt.agent.peers.redundancy import Redundancy

            self._peers = Redundancy(request, self._own_slots, self._install)
        return self._peers.opened

    def _own_slots(self) -> dict[int, RankSlots]:
        with self._changed:
            slots = {number: rank.slots for number, rank in self._ranks.items()}
        return {number: theirs for number, theirs in slots.items() if theirs is not None}

    def _install(self, number: int, slots: RankSlots) -> None:
        """Make slots that came from other nodes those of a rank."""
        with self._changed:
            self._replace_slots(self._ranks[number], slots)

    def _replace_slots(self, rank: _Rank, slots: RankSlots) -> None:
        if rank.slots is not None:
            rank.retired.append(rank.slots)
        rank.slots = slots
        self._committed = max(self._committed, slots.committed)
        self._drop_retired(rank)

    def _drop_retired(self, rank: _Rank) -> None:
        """Free replaced slabs once nothing reads them."""
        for slots in [slots for slots in rank.retired if not slots.busy]:
            rank.retired.remove(slots)
            slots.slab.close()

    def _acquire(self, rank: _Rank, wait_s: float) -> p.Granted:
        if rank.slots is None:
            raise AgentError("a slot was asked for before a slab was attached")
        deadline = time.monotonic() + wait_s
        while len(rank.awaited) >= _UNCOMMITTED or (index := rank.slots.acquire()) < 0:
            hung_s = rank.slots.busy_for()
            if hung_s > self._options.commit_timeout_s:
                # Nothing that could be waited for: these saves have been given up.
                index = rank.slots.acquire(newest_too=True)
                if index >= 0:
                    break
                return p.Granted(-1, hung_s)
            if not self._changed.wait(deadline - time.monotonic()):
                return p.Granted(-1)
        reach("agent.granted")
        return p.Granted(index)

    def _adopt(self, number: int, request: p.Adopt) -> None:
        rank = self._ranks[number]
        if rank.slots is not None:
            rank.slots.adopt(request.save_id, request.iteration)
        self._committed = min(self._committed, request.iteration)
        awaited = set().union(*(each.awaited for each in self._ranks.values()))
        for save in self._pending.values():
            # Of an older save everything is staged, or will never be: all ranks have started anew.
            staged = save.iteration < request.iteration and save.metas.keys() >= self._ranks.keys()
            if save.save_id != request.save_id and not staged:
                save.outlived = save.save_id not in awaited
        if self._peers is not None:
            self._peers.adopt(number, request.save_id, request.iteration)
        for index in rank.slots.recovered(request.save_id) if rank.slots is not None else ():
            # Its own node may have been lost before this was durable, and others wait for it.
            self._take_over(number, index)
            rank.awaited.discard(request.save_id or "")
        self._changed.notify_all()

    def _poll(self, rank: _Rank, wait_s: float) -> p.Outcomes:
        deadline = time.monotonic() + wait_s
        while not rank.untold and not rank.notices and rank.awaited:
            if not self._changed.wait(deadline - time.monotonic()):
                break
        told, rank.untold = tuple(rank.untold), []
        notices, rank.notices = tuple(rank.notices), []
        return p.Outcomes(told, len(rank.awaited), notices)

    # ------------------------------------------------------------------ persist and commit

    def _take_over(self, number: int, index: int) -> str:
        """Do with a complete slot what it is meant for; return the save that is in it."""
        slots = self._ranks[number].slots
        if slots is None or not 0 <= index < len(slots.infos):
            raise AgentError(f"rank {number} has no slot {index}")
        slot, info = slots.slab.slots[index], slots.infos[index]
        header = slot.header
        if header.state not in (SlotState.STAGED, SlotState.KEPT):
            raise AgentError(f"slot {index} of rank {number} is {header.state.name}, not STAGED")
        save = None if header.state == SlotState.KEPT else self._join(number, slot, info)
        self._ranks[number].awaited.add(header.save_id)
        if not info.claimed:
            info.claimed, info.persisting = True, save is not None
            info.persisting_since = time.monotonic()
            reach("agent.enqueued")
            if save is None:
                self._digest_pool.submit(self._vouch, number, slots, slot, header, time.monotonic())
            else:
                self._pool.submit(self._persist, number, slots, slot, save)
            if self._peers is not None:
                self._peers.staged(number, slots, index)
        self._changed.notify_all()
        return header.save_id

    def _join(self, number: int, slot: Slot, info: SlotInfo) -> PendingSave:
        """Return the pending save that a rank has its part in a slot of."""
        header, meta = slot.header, slot.meta
        save = self._pending.setdefault(
            header.save_id,
            PendingSave(
                PosixStorage(meta.root),
                header.iteration,
                header.save_id,
                time.monotonic(),
                inherited=info.inherited,
            ),
        )
        save.metas[number] = meta
        return save

    def _vouch(
        self, number: int, slots: RankSlots, slot: Slot, header: SlotHeader, started: float
    ) -> None:
        """Take the digests of a slot that is meant for memory only; then it counts as kept."""
        info = slots.infos[slot.index]
        with self._changed:
            still_there = self._ranks[number].slots is slots and slot.header == header
            info.persisting = info.persisting or still_there
        digests = digest_slot(slot, header) if still_there else None
        with self._changed:
            if still_there:
                info.persisting, info.digests = False, digests
            seconds = time.monotonic() - started
            outcome = p.Outcome(header.iteration, header.save_id, None, seconds, kept=True)
            self._tell(self._ranks[number], outcome)
            self._drop_retired(self._ranks[number])
            self._changed.notify_all()

    def _abandon(self, number: int, request: p.Abandon) -> None:
        reason = f"rank {number}: {request.reason}"
        save = self._pending.get(request.save_id)
        if save is not None:
            save.error = save.error or reason
            self._changed.notify_all()
        else:
            # Nobody here has staged it yet: ranks that will, here or elsewhere, find the note.
            note = (self._storage, request.iteration, request.save_id, number, reason)
            self._pool.submit(leave_note, *note)

    def _persist(self, number: int, slots: RankSlots, slot: Slot, save: PendingSave) -> None:
        error: str | None = None
        digests: tuple[str, ...] | None = None
        started = time.monotonic()
        header = slot.header
        info = slots.infos[slot.index]
        try:
            if info.inherited and is_persisted(save, number):
                digests = info.digests or stored_digests(save.storage, header, number)
            else:
                digests = persist_slot(save.storage, slot, header, save.metas[number])
        except Exception as failure:  # whatever it is, the trainers must learn of it
            error = str(failure)
            logger.exception("rank %d: iteration %d was not persisted", number, save.iteration)
        seconds = time.monotonic() - started
        with self._changed:
            info.persisting, info.digests = False, digests
            save.persisted.add(number)
            if error is not None:
                save.error = save.error or error
            else:
                logger.info(
                    "rank %d: persisted iteration %d, %d bytes in %.3f s (%.2f GB/s)",
                    number,
                    save.iteration,
                    header.data_nbytes,
                    seconds,
                    header.data_nbytes / 1e9 / max(seconds, 1e-9),
                )
            self._drop_retired(self._ranks[number])
            given_up = self._pending.get(save.save_id) is not save
            self._changed.notify_all()
        if given_up:
            # The save failed elsewhere while this shard was being written.
            forget(save)

    def _commit_loop(self) -> None:
        shortest, longest = _COMMIT_POLL_S
        pause = shortest
        while True:
            with self._changed:
                if self._closing:
                    return
                saves = list(self._pending.values())
                given_up, self._given_up = self._given_up, []
                if not saves and not given_up and self._sweeper.idle:
                    self._changed.wait(_TICK_S)
                    pause = shortest
                    continue
            for save in given_up:
                forget(save)
            concluded = [self._try_conclude(save) for save in saves]
            self._sweeper.sweep()
            with self._changed:
                if any(concluded):
                    pause = shortest
                elif not self._changed.wait(pause):
                    pause = min(2 * pause, longest)
                else:
                    pause = shortest

    def _try_conclude(self, save: PendingSave) -> bool:
        finished, error = outcome_of(save, self._options.commit_timeout_s)
        if not finished:
            return False
        if error is not None:
            level = logging.INFO if save.outlived else logging.ERROR
            logger.log(level, "iteration %d was not saved: %s", save.iteration, error)
            reach("save.failed")
        persisted = set(save.persisted)
        if error is not None:
            # Before anybody is told: on a full disk the next save needs the space.
            forget(save)
        with self._changed:
            self._conclude(save, error)
            overlooked = save.persisted - persisted
        if error is not None and overlooked:
            # Written while the others' files were being removed.
            forget(save)
        if error is None and 0 in save.metas:
            self._sweeper.look(self._is_pending, save.iteration)
        return True

    def _conclude(self, save: PendingSave, error: str | None) -> None:
        """Mark the slots and tell the outcome, once. The lock is held."""
        if error is None:
            self._supersede(save)
            if save.superseded_by is None and 0 in save.metas:  # this agent moved the tracker
                self._committed = save.iteration
        if self._pending.get(save.save_id) is not save:
            return  # given up while storage did not answer
        seconds = time.monotonic() - save.staged_at
        if error is None:
            logger.info("committed iteration %d after %.3f s", save.iteration, seconds)
        del self._pending[save.save_id]
        outcome = p.Outcome(save.iteration, save.save_id, error, seconds)
        state = SlotState.DURABLE if error is None else SlotState.FAILED
        if save.outlived:
            state = SlotState.EMPTY
        for number in save.metas:
            rank = self._ranks[number]
            self._tell(rank, outcome)
            if rank.slots is not None:
                rank.slots.mark(save.save_id, state)
        reach("save.marked")
        self._changed.notify_all()

    def _is_pending(self, iteration: int) -> bool:
        with self._changed:
            return any(save.iteration == iteration for save in self._pending.values())

    def _tell(self, rank: _Rank, outcome: p.Outcome) -> None:
        """Have the rank's trainer told at its next poll, if it is the one that staged the save."""
        if outcome.save_id in rank.awaited:
            rank.awaited.remove(outcome.save_id)
            rank.untold.append(outcome)

    def _supersede(self, save: PendingSave) -> None:
        """Keep saves staged before `save`, and still pending, from moving the tracker back."""
        for other in self._pending.values():
            if other.order < save.order and other.superseded_by != other.iteration:
                other.superseded_by = save.iteration


def listen(directory: Path, name: str) -> socket.socket:
    """Return a listening socket in `directory`; replaces the one of a dead agent."""
    path = directory / name
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(_BACKLOG)
    return listener
