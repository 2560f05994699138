"""Introduce the agents of a job's nodes to each other, through the job's own collectives.

Keys and addresses travel with `all_gather_object`, which runs over what the job's rendezvous has
set up: whoever is not of the job neither learns nor contributes one.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket

from megatron_flashckpt.agent.peers.requirement import require_pyzmq
from megatron_flashckpt.agent.protocol import JoinPeers, PeerNode, PeersOpened
from megatron_flashckpt.collectives import gather_objects, together
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import AgentError, FlashCkptError
from megatron_flashckpt.save.agent_link import NodeLink

logger = logging.getLogger(__name__)


def introduce(link: NodeLink, rank: int, config: Config) -> None:
    """Introduce the agents of all nodes to each other. Collective; never in a save.

    A node whose agent cannot take part is left out, and its ranks have no copies: logged, not
    raised, because training and saving do not depend on it.

    Raises:
        ConfigError: pyzmq is missing on the node of a rank. Raised on all ranks.
    """
    together(require_pyzmq)
    own: tuple[str, int, str] | None = None
    try:
        address = config.agent.address or own_address()
        opened = link.agent.open_peers(address)
        own = (opened.host, opened.port, opened.identity.public)
        _say_what_stays(rank, opened, address, config)
    except FlashCkptError as error:
        logger.error(
            "rank %d: its checkpoints are not held by other nodes: %s; training and saving go on",
            *(rank, error),
        )
    nodes = nodes_of(gather_objects(own))
    if rank == 0 and len(nodes) < 2:
        logger.warning(
            "'redundancy' is %s, but the job has %d node: if it is lost, the job goes on from "
            "storage",
            *(config.redundancy, len(nodes)),
        )
    try:
        for me, node in enumerate(nodes):
            if rank in node.ranks:
                link.agent.join_peers(
                    JoinPeers(
                        config.redundancy,
                        config.redundancy_group,
                        config.agent.peer_timeout_s,
                        me,
                        nodes,
                    )
                )
    except FlashCkptError as error:
        logger.error("rank %d: %s", rank, error)
    # A barrier: no agent is asked for anything before it knows who may ask.
    gather_objects(None)


def _say_what_stays(rank: int, opened: PeersOpened, address: str, config: Config) -> None:
    """Say which settings of an earlier run stay in force: what it holds depends on them."""
    wanted = {
        "agent.address": (opened.host, address),
        "agent.peer_threads": (opened.threads, config.agent.peer_threads),
    }
    kept = [f"{name} {own!r}, not {new!r}" for name, (own, new) in wanted.items() if own != new]
    if kept:
        logger.warning(
            "rank %d: the agent of this node, which an earlier run started, keeps %s, because it "
            "holds checkpoints for other nodes, which reach it so; to change that, end the agents "
            "of all nodes before the job starts",
            *(rank, " and ".join(kept)),
        )


def nodes_of(ranks: list[tuple[str, int, str] | None]) -> tuple[PeerNode, ...]:
    """Return the nodes, by their first ranks, given each rank's agent: host, port, public key."""
    ranks_of: dict[tuple[str, int, str], list[int]] = {}
    for rank, agent in enumerate(ranks):
        if agent is not None:
            ranks_of.setdefault((agent[0], agent[1], agent[2]), []).append(rank)
    return tuple(PeerNode(*agent, tuple(of_agent)) for agent, of_agent in ranks_of.items())


def own_address() -> str:
    """Return the address of this node on the way to the job's rendezvous.

    Loopback if the rendezvous is named so (one machine). Where it has no other name than this
    very node's, which may resolve to loopback here, the address on the way to anywhere else.

    Raises:
        AgentError: this node has no such address.
    """
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        address = _source_address(master)
        named_loopback = master == "localhost" or _is_loopback(master)
        if _is_loopback(address) and not named_loopback:
            # Nothing is sent: connecting a datagram socket only asks the routing table. The
            # address is one that is reserved for documentation.
            address = _source_address("192.0.2.1")
    except OSError as error:
        raise AgentError(
            f"no address of this node on the way to {master} ({error}); set 'agent.address'"
        ) from error
    return address


def _source_address(host: str) -> str:
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
