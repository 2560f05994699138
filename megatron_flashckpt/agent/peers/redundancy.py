"""Redundancy in the agent: joins the peers, sends staged slots to holders, and finds copies."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator

from megatron_flashckpt.agent import slot_bytes
from megatron_flashckpt.agent.peers import messages as m
from megatron_flashckpt.agent.peers import recovery
from megatron_flashckpt.agent.peers.holdings import HoldError, Holdings
from megatron_flashckpt.agent.peers.link import Link, SendRequest
from megatron_flashckpt.agent.peers.topology import Topology
from megatron_flashckpt.agent.peers.transport import (
    Connection,
    PeerError,
    PeerServer,
    new_context,
    new_identity,
)
from megatron_flashckpt.agent.protocol import JoinPeers, OpenPeers, PeersOpened
from megatron_flashckpt.agent.rank_slots import RankSlots
from megatron_flashckpt.agent.slot_bytes import Copy, SlotDescriptor
from megatron_flashckpt.catalog.lineage import History
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.memory.slot import SlotHeader

logger = logging.getLogger(__name__)

#: Nodes that get requests in parallel during a recovery.
_ASKED_AT_ONCE = 16


class Redundancy:
    """One agent's part in redundancy. Server, links and descriptor thread run until `close`."""

    def __init__(
        self,
        request: OpenPeers,
        own: Callable[[], dict[int, RankSlots]],
    ) -> None:
        """Listen for the agents of other nodes; none is admitted before `join`.

        Args:
            own: returns the slots of this node's ranks.

        Raises:
            AgentError: the address is not one of this node, or the port is taken.
        """
        self._own = own
        self._identity = request.identity or new_identity()
        #: True if this agent replaces another one, whose holdings are lost.
        self._is_successor = request.identity is not None
        self._context = new_context(request.threads)
        self._holdings = Holdings(self._gave_up)
        try:
            self._server = PeerServer(
                self._context, request.host, request.port, self._identity, self._answer
            )
        except BaseException:
            self._context.term()
            raise
        self.opened = PeersOpened(self._identity, request.host, self._server.port, request.threads)
        """Address of this agent for agents of other nodes, and its keys."""
        self._lock = threading.Lock()
        self._plan: JoinPeers | None = None
        self._topology = Topology("copy", 2, ())
        self._links: dict[tuple[int, int], Link] = {}
        # One thread, so that digests take at most one core from training.
        self._descriptor_thread = concurrent.futures.ThreadPoolExecutor(1, "label")
        self._askers = concurrent.futures.ThreadPoolExecutor(request.threads, "ask again")

    def join(self, plan: JoinPeers) -> None:
        """Admit the agents of these nodes, and send to them from now on."""
        with self._lock:
            if plan == self._plan:
                return
            links, self._links = self._links, {}
            self._plan = plan
            self._topology = Topology(plan.scheme, plan.group, [node.ranks for node in plan.nodes])
            self._server.allowed = frozenset(node.public for node in plan.nodes)
        for link in links.values():
            link.close()
        holders = self._topology.holders(plan.me)
        logger.info("node %d of %d: held by nodes %s", plan.me, len(plan.nodes), holders)
        if self._is_successor:
            self._is_successor = False
            for node in self._topology.contributors(plan.me):
                self._askers.submit(self._ask_again, plan, node, True)

    def close(self) -> None:
        """Stop at once, abandoning transfers."""
        self._descriptor_thread.shutdown(cancel_futures=True)
        self._askers.shutdown(cancel_futures=True)
        with self._lock:
            links, self._links = self._links, {}
        for link in links.values():
            link.close()
        for link in links.values():
            link.join()
        self._server.close()
        self._context.term()

    # ------------------------------------------------------------------ sending

    def staged(self, rank: int, slots: RankSlots, index: int) -> None:
        """Send a complete slot to its holders, in the background."""
        # Read now: later, the slab may be closed or the slot hold another save.
        header = slots.slab.slots[index].header
        with contextlib.suppress(RuntimeError):  # closing
            self._descriptor_thread.submit(self._send, rank, slots, index, header)

    def _send(self, rank: int, slots: RankSlots, index: int, header: SlotHeader) -> None:
        # Overtaken requests end here, so that they do not pile up if saves follow each other fast.
        if not slot_bytes.holds(slots.slab, index, header.save_id):
            return
        try:
            descriptor = self._descriptor(rank, slots, index)
            hit("send.labelled")
            with self._lock:
                plan = self._plan
                if descriptor is None or plan is None or rank not in plan.nodes[plan.me].ranks:
                    return
                position = plan.nodes[plan.me].ranks.index(rank)
                for share in self._topology.shares(plan.me)[rank]:
                    link = self._link(plan, share.holder, position % self.opened.threads)
                    link.put(SendRequest(slots.slab, index, descriptor, share.part))
        except Exception:  # nobody asks for this thread's result
            logger.exception(
                "rank %d: iteration %d is not sent to other nodes", rank, header.iteration
            )

    def _link(self, plan: JoinPeers, holder: int, stream: int) -> Link:
        if (holder, stream) not in self._links:
            place = f"node {holder} ({plan.nodes[holder].host}:{plan.nodes[holder].port})"
            self._links[holder, stream] = Link(place, lambda: self._connection(plan, holder))
        return self._links[holder, stream]

    def _connection(self, plan: JoinPeers, node: int) -> Connection:
        return Connection(self._context, self._identity, plan.nodes[node], plan.timeout_s)

    def _descriptor(self, rank: int, slots: RankSlots, index: int) -> SlotDescriptor | None:
        """Return the cached descriptor of a slot; None if the slot was overwritten meanwhile."""
        info = slots.infos[index]
        if info.descriptor is not None:
            return info.descriptor
        descriptor = slot_bytes.descriptor_of(rank, slots.slab, index, info.digests)
        if descriptor is None or slots.infos[index] is not info:
            return None
        # One reading serves both: this copy, and the offer of the slot after a restart.
        info.digests = info.digests or descriptor.digests
        info.descriptor = descriptor
        return descriptor

    def resume_from(self, rank: int, save_id: str | None, history: History) -> None:
        """Drop copies of saves that are not of `history`, and send the one resumed from again.

        A replaced node holds nothing for the others yet. Holders that have their part report that.
        """
        with self._lock:
            groups = [] if self._plan is None else self._topology.parity_groups(self._plan.me)
        self._holdings.resume_from(history, groups)
        slots = self._own().get(rank)
        if slots is not None and save_id is not None:
            for index in range(len(slots.infos)):
                if slot_bytes.holds(slots.slab, index, save_id):
                    self.staged(rank, slots, index)

    def _send_again(self, request: m.SendAgain) -> None:
        """Send all complete slots, because a holder has lost its part; others have theirs."""
        with self._lock:
            waiting = [key for key in self._links if key[0] == request.node and request.successor]
            dead = [self._links.pop(key) for key in waiting]
        for link in dead:
            link.close()  # the link may wait for an answer of the dead agent
        for rank, slots in self._own().items():

            def age(index: int, slots: RankSlots = slots) -> int:
                return slot_bytes.header_of(slots.slab, index).iteration

            # A link keeps one waiting request per rank, the last one; so the newest slot is queued
            # last.
            for index in sorted(range(len(slots.infos)), key=age):
                self.staged(rank, slots, index)

    # ------------------------------------------------------------------ answering

    def _answer(self, request: m.Request, payload: memoryview) -> tuple[m.Reply, bytes]:
        try:
            match request:
                case m.Begin():
                    begun = self._begin(request)
                    hit("hold.begun")
                    return m.Taken(already=not begun), b""
                case m.Chunk():
                    part = (request.lane, request.rank, request.save_id)
                    self._holdings.add(*part, request.start, payload)
                    hit("hold.chunk")
                case m.End():
                    self._holdings.end(request.lane, request.rank, request.save_id)
                    hit("hold.ended")
                case m.SendAgain():
                    self._send_again(request)
                case m.Find():
                    return self._find(request.rank), b""
                case m.ReadSlot():
                    return m.Taken(), self._read_slot(request)
                case m.ReadHeld():
                    span = (request.start, request.nbytes)
                    data = self._holdings.read(request.lane, request.save_id, *span)
                    hit("hold.read")
                    return m.Taken(), data
        except HoldError as error:
            return m.Declined(str(error)), b""
        return m.Taken(), b""

    def _begin(self, request: m.Begin) -> bool:
        with self._lock:
            kept = [] if self._plan is None else self._topology.parity_groups(self._plan.me)
        if request.part.parity_group not in kept:
            raise HoldError("it does not hold checkpoints of these ranks (any more)")
        return self._holdings.begin(request.part, request.label)

    def _in_slots(self, rank: int) -> Iterator[tuple[RankSlots, int, SlotDescriptor]]:
        """Yield the complete slots of a rank of this node that have a descriptor."""
        slots = self._own().get(rank)
        if slots is None:
            return
        for index, info in enumerate(slots.infos):
            descriptor = info.descriptor
            if descriptor and slot_bytes.holds(slots.slab, index, descriptor.save_id):
                yield slots, index, descriptor

    def _find(self, rank: int) -> m.Found:
        descriptors = [
            descriptor for own_rank in self._own() for _, _, descriptor in self._in_slots(own_rank)
        ]
        return m.Found(
            tuple(descriptor for descriptor in descriptors if descriptor.rank == rank),
            tuple((descriptor.rank, descriptor.save_id) for descriptor in descriptors),
            tuple(self._holdings.held_of(rank)),
        )

    def _read_slot(self, request: m.ReadSlot) -> bytes:
        for slots, index, descriptor in self._in_slots(request.rank):
            if descriptor.save_id == request.save_id:
                data = slot_bytes.read(slots.slab, index, descriptor, request.start, request.nbytes)
                if data is not None:
                    return data
        raise HoldError(f"rank {request.rank} no longer has that save")

    # ------------------------------------------------------------------ recovering

    def find(self, rank: int) -> dict[str, Copy]:
        """Return by save the copies of a rank that the nodes of the job hold. Asks all nodes."""
        with self._lock:
            plan = self._plan
        if plan is None:
            return {}
        with concurrent.futures.ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
            nodes = range(len(plan.nodes))
            answers = pool.map(lambda node: self._ask_for(plan, node, rank), nodes)
            replies = {node: reply for node, reply in enumerate(answers) if reply is not None}
        hit("recover.asked")
        return recovery.copies(rank, replies, functools.partial(self._way, plan))

    def _gave_up(self, iteration: int, ranks: set[int]) -> None:
        """Make ranks contribute again to a parity that another rank's broken part has spoiled."""
        with self._lock:
            plan = self._plan
        logger.info(
            "iteration %d: ranks %s are to send their parts again, because another rank's "
            "part was incomplete",
            iteration,
            ranks,
        )
        for node, peer in enumerate(plan.nodes if plan is not None else ()):
            if plan is not None and not ranks.isdisjoint(peer.ranks):
                with contextlib.suppress(RuntimeError):  # closing
                    self._askers.submit(self._ask_again, plan, node, False)

    def _ask_again(self, plan: JoinPeers, node: int, successor: bool) -> None:
        """Ask another node to send the parts again that this node held for it."""
        try:
            with self._way(plan, node) as ask:
                for _ in ask([m.SendAgain(plan.me, successor)]):
                    logger.info("node %d sends the parts again that were held here", node)
        except PeerError as error:
            logger.warning(
                "this node holds nothing for node %d until its next save: %s", node, error
            )

    def _ask_for(self, plan: JoinPeers, node: int, rank: int) -> m.Found | None:
        try:
            with self._way(plan, node) as ask:
                ((reply, _),) = ask([m.Find(rank)])
        except PeerError as error:
            logger.warning(
                "node %d did not answer, so its memory is not used to recover rank %d: %s",
                node,
                rank,
                error,
            )
            return None
        return reply if isinstance(reply, m.Found) else None

    @contextlib.contextmanager
    def _way(self, plan: JoinPeers, node: int) -> Iterator[recovery.Pipeline]:
        """Open a pipeline to a node through a connection of its own, or to this node directly."""
        if node == plan.me:
            yield lambda requests: (self._answer(request, memoryview(b"")) for request in requests)
            return
        with self._connection(plan, node) as connection:
            yield lambda requests: connection.pipeline((request, b"") for request in requests)
