"""Answers the requests of the node's trainers: one reply per request."""

from __future__ import annotations

import logging
import resource
import threading
import time

from megatron_flashckpt.agent import frames
from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.agent.committer import Committer
from megatron_flashckpt.agent.departed_ranks import DepartedRanks
from megatron_flashckpt.agent.incarnations import RankProcess, ReplacedError
from megatron_flashckpt.agent.janitor import Janitor
from megatron_flashckpt.agent.node import Node, Trainer
from megatron_flashckpt.agent.peers.requirement import require_pyzmq
from megatron_flashckpt.agent.rank_slots import RankSlots
from megatron_flashckpt.agent.recovery import Recoveries
from megatron_flashckpt.agent.run_messages import AskHeld, BeginRun, Configure, Configured, Held
from megatron_flashckpt.agent.saves import Saves
from megatron_flashckpt.agent.template_store import TemplateStore
from megatron_flashckpt.catalog.lineage import History
from megatron_flashckpt.errors import AgentError, FlashCkptError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format.run_object import RunObject
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import decoded_meta

logger = logging.getLogger(__name__)

#: Saves of a rank that may wait for their commit at a time. The bound keeps them from piling up if
#: storage commits more slowly than saves arrive.
_UNCOMMITTED = 8


class RequestHandler:
    """Serves each request of a rank. Called by the threads of `agent.trainer_connections`."""

    def __init__(self, node: Node, saves: Saves, committer: Committer, janitor: Janitor) -> None:
        self._node = node
        self._saves = saves
        self._committer = committer
        self._janitor = janitor
        self._templates = TemplateStore(node.changed)
        self.departed = DepartedRanks(node, committer)
        self.recoveries = Recoveries(node)

    def answer(
        self,
        number: int,
        request: p.Request,
        received: frames.ReceivedDescriptor,
        process: RankProcess | None,
    ) -> tuple[p.Reply] | tuple[p.Reply, int]:
        """Return the reply, with a descriptor to send if there is one."""
        if isinstance(request, p.AttachSlab) and (fd := received.take()) is not None:
            taken = self._attach(number, Slab.attach(fd), process, request)
            hit("agent.attached")
            return (p.Attached(taken),)
        if isinstance(request, p.AttachSlab):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise AgentError(
                f"the slab's descriptor did not arrive: the agent may open {limit} files; raise "
                "its limit ('ulimit -n')"
            )
        if isinstance(request, p.DetachSlab):
            self._detach(number)
            return (p.Done(),)
        if isinstance(request, p.Recover):
            return (p.Recovered(self.recoveries.recover(number, request)),)
        if isinstance(request, p.Staged):
            self._staged(number, request, process)
            return (p.Done(),)
        on_disk = self._on_disk(number) if isinstance(request, p.TakeSlab) else set()
        with self._node.changed:
            rank = self._served(number, process)
            match request:
                case p.TakeSlab():
                    saves = tuple(sorted(on_disk.union(self._node.saves())))
                    if rank.slots is None:
                        return (p.SlabOffer(False, (), saves=saves),)
                    formers = rank.slots.formers()
                    self._saves.digester.digest(rank)
                    offers = tuple(rank.slots.offers())
                    is_digesting = rank.slots.awaits_digests
                    reply = p.SlabOffer(True, offers, formers, is_digesting, saves)
                    return reply, rank.slots.slab.fd
                case p.LendSlab():
                    return self._lend(request)
                case p.OpenRun():
                    self._open_run(number, request.run)
                    return (p.Done(),)
                case p.Acquire():
                    return (self._acquire(number, request.wait_s, process),)
                case p.GetTemplate():
                    wanted = (number, request.fingerprint, request.wait_s)
                    return (p.TemplateReply(*self._templates.get(*wanted)),)
                case p.PutTemplate():
                    self._templates.put(request.fingerprint, request.encoded)
                    return (p.Done(),)
                case p.Poll():
                    return (self._poll(number, request.wait_s, process),)
                case p.OpenPeers():
                    return (self._open_peers(request),)
                case p.JoinPeers() if self._node.peers is not None:
                    self._node.peers.join(request)
                    return (p.Done(),)
                case p.EndPeers():
                    self._end_peers()
                    return (p.Done(),)
                case Configure():
                    changed = self._saves.configure(number, request.settings)
                    if request.of_stores is not None:
                        self._node.reach_stores(request.of_stores)
                    self._janitor.wait_at_least(request.settings.commit_timeout_s)
                    return (Configured(changed),)
                case BeginRun():
                    self.departed.begin_run(number, request)
                    return (p.Done(),)
                case AskHeld():
                    return (Held(self.departed.held(request.wait_s)),)
                case p.Leave():
                    rank.left = True
                    self._node.changed.notify_all()
                    return (p.Done(),)
                case _:
                    return (p.Refused(f"unexpected {type(request).__name__}"),)

    def release(self, number: int) -> None:
        """Let another rank compute this rank's assigned template. The caller holds the lock."""
        self._templates.release(number)

    def _served(self, number: int, process: RankProcess | None) -> Trainer:
        """Return the agent's state of a rank. The caller holds the lock.

        Raises:
            AgentError: the agent serves another process of this rank now.
        """
        rank = self._node.ranks[number]
        if rank.incarnations.served != process:
            raise AgentError(str(ReplacedError(rank.incarnations.served)))
        return rank

    def _on_disk(self, number: int) -> set[tuple[int, str]]:
        """Return the saves on the local disk if the rank has none in memory and may ask for them.

        The disk may hang, and a rank repeats the request while its slots are digested.
        """
        with self._node.changed:
            rank = self._node.ranks.get(number)
            if rank is not None and rank.slots is not None and rank.slots.offers():
                return set()
        return self._node.local_copies.saves()

    def _lend(self, request: p.LendSlab) -> tuple[p.Reply] | tuple[p.Reply, int]:
        """Return the slab of a rank to another rank. The caller holds the lock.

        All ranks of a job load together, so no rank saves into its slots meanwhile.
        """
        lender = self._node.ranks.get(request.rank)
        if lender is not None and (slots := lender.slots) is not None:
            for offer in slots.offers():
                if offer.save_id == request.save_id and offer.digests is not None:
                    return p.SlabOffer(True, (offer,)), slots.slab.fd
        return (p.SlabOffer(False, ()),)

    def _attach(
        self, number: int, slab: Slab, process: RankProcess | None, request: p.AttachSlab
    ) -> tuple[str, ...]:
        with self._node.changed:
            try:
                rank = self._served(number, process)
            except AgentError:
                slab.close()
                raise
            if rank.slots is not None and rank.slots.slab.is_same(slab):
                # The trainer has reconnected; the state of its slots stays valid.
                slab.close()
            else:
                slots = RankSlots(slab)
                for former in request.formers:
                    slots.note_former(RankProcess(*former))
                self._node.replace_slots(rank, slots)
                if self._node.peers is not None:
                    # Other nodes get the slots that they do not hold already.
                    for offer in reversed(slots.offers()):
                        self._node.peers.staged(number, slots, offer.slot)
                self._saves.look_up_digests(number)
            taken = self.inherit(number)
            self._tidy_after_start(number)
            return taken

    def _detach(self, number: int) -> None:
        with self._node.changed:
            rank = self._node.ranks[number]
            slots = rank.slots
            if slots is None:
                return
            if slots.offers():
                raise AgentError(
                    f"the slab of rank {number} holds iteration {slots.offers()[0].iteration}, so "
                    "the agent keeps it for a restart"
                )
            self._node.retire_slots(rank)
            if slots.is_persisting:
                return
            rank.retired.remove(slots)
        # In the foreground: the rank needs the memory back before it allocates a larger slab.
        slots.slab.close()

    def inherit(self, number: int) -> tuple[str, ...]:
        """Persist all staged slots of a rank, announced or not; drop half-copied slots.

        Called when no process writes to the slots: the trainer is gone, or hands over a slab of
        another agent. That agent may have made them durable in part, or committed them.
        """
        slots = self._node.ranks[number].slots
        if slots is None:
            return ()
        slots.discard_torn()
        taken: list[str] = []
        for index in slots.open():
            try:
                taken.append(self._saves.accept_slot(number, index))
            except FlashCkptError as error:
                logger.error("rank %d: the staged slot %d is lost: %s", number, index, error)
        return tuple(taken)

    def _open_peers(self, request: p.OpenPeers) -> p.PeersOpened:
        if self._node.peers is None:
            require_pyzmq()
            # Imported here: other agents start 20 ms faster, and without pyzmq.
            from megatron_flashckpt.agent.peers.redundancy import Redundancy

            self._node.peers = Redundancy(request, self._node.own_slots)
        return self._node.peers.opened

    def _end_peers(self) -> None:
        peers, self._node.peers = self._node.peers, None
        if peers is not None:
            logger.info("this run has no redundancy: copies held for other nodes are dropped")
            # In a thread, because `close` waits for transfers and this answer must not.
            threading.Thread(target=peers.close, daemon=True).start()

    def _acquire(self, number: int, wait_s: float, process: RankProcess | None) -> p.Granted:
        rank = self._served(number, process)
        if rank.slots is None:
            raise AgentError("a slot was requested before a slab was attached")
        if formers := rank.slots.formers():
            raise AgentError(
                f"process {formers[-1].pid}, an earlier one of rank {number}, may still "
                "write to this slab; attach another one"
            )
        deadline = time.monotonic() + wait_s
        while len(rank.awaited) >= _UNCOMMITTED or (index := rank.slots.acquire()) < 0:
            hung_s = rank.slots.persisting_for()
            if hung_s > self._node.options.commit_timeout_s:
                # Waiting is useless: these saves have failed by their timeout.
                index = rank.slots.acquire(newest_too=True)
                if index >= 0:
                    break
                return p.Granted(-1, hung_s)
            if not self._node.changed.wait(deadline - time.monotonic()) or rank.slots is None:
                return p.Granted(-1)
            self._served(number, process)
        hit("agent.granted")
        return p.Granted(index)

    def _staged(self, number: int, request: p.Staged, process: RankProcess | None) -> None:
        with self._node.changed:
            self._served(number, process)
            staged_slot = self._saves.described(number, request.slot)
        # Decode without the lock: a rank with thousands of pieces would delay all others.
        described = None
        if staged_slot is not None:
            slot, header, encoded = staged_slot
            described = slot, header, decoded_meta(encoded, slot.index)
        with self._node.changed:
            self._served(number, process)
            self._saves.accept_slot(number, request.slot, request, described)

    def _open_run(self, number: int, run: RunObject) -> None:
        rank = self._node.ranks[number]
        if self._node.open_run(number, run):
            self._committer.run_opened(run.save_id)
        # A rank repeats the message after it has lost its connection. A process of a former run
        # may send it late.
        if self._node.run == run and rank.followed != run.name:
            rank.followed = run.name
            self._follow(number, run)
            self._tidy_after_start(number)
        self._node.changed.notify_all()

    def _tidy_after_start(self, number: int) -> None:
        """Have the janitor begin once rank 0 has told its run and handed over its slots. Lock held.

        A save that is pending in its slots is not dead, which a new agent does not know before.
        """
        rank, run = self._node.ranks[number], self._node.run
        if number == 0 and rank.slots is not None and run is not None and rank.followed == run.name:
            self._janitor.after_start(self._node.store, run)

    def _follow(self, number: int, run: RunObject) -> None:
        """Keep what is of the new run's history, here and for other nodes. Lock held."""
        slots, history = self._node.ranks[number].slots, History(run.name, run.ancestors)
        if slots is not None:
            for save in slots.keep_only(history):
                logger.warning(
                    "rank %d: iteration %d (save %s), which storage lacks, is dropped from host "
                    "memory: run %s does not continue it",
                    *(number, save.iteration, save.save_id, run.name),
                )
        if self._node.peers is not None:
            self._node.peers.resume_from(number, run.save_id, history)
        for index in slots.recovered(run.save_id) if slots is not None else ():
            # The rank's own node may have been lost before this save was durable, and others wait
            # for it.
            self._saves.accept_slot(number, index)

    def _poll(self, number: int, wait_s: float, process: RankProcess | None) -> p.Outcomes:
        rank = self._served(number, process)
        deadline = time.monotonic() + wait_s
        while not rank.unreported and not rank.notices and self._committer.open_saves(number):
            if not self._node.changed.wait(deadline - time.monotonic()):
                break
            self._served(number, process)
        outcomes, rank.unreported = tuple(rank.unreported), []
        notices, rank.notices = tuple(rank.notices), []
        return p.Outcomes(outcomes, len(self._committer.open_saves(number)), notices)
