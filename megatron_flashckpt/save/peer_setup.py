"""Introduction of the agents of a job's nodes to each other, by the job's own collectives.

Keys and addresses travel in collectives over the process group that the job's rendezvous has set
up. So processes outside of the job can neither read nor contribute a key.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket

from megatron_flashckpt.agent.peers.requirement import require_pyzmq
from megatron_flashckpt.agent.protocol import JoinPeers, PeerNode, PeersOpened
from megatron_flashckpt.collectives import gather_objects, run_and_agree
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import AgentError, FlashCkptError
from megatron_flashckpt.save.node_link import NodeLink

logger = logging.getLogger(__name__)


def connect_agents(link: NodeLink, rank: int, config: Config) -> None:
    """Introduce the agents of all nodes to each other. Collective; never in a save.

    If the agent of a node cannot take part, its ranks have no copies. This is logged only, because
    training and saving continue without copies.

    Raises:
        ConfigError: pyzmq is missing on the node of a rank; on all ranks.
    """
    run_and_agree(require_pyzmq)
    own: tuple[str, int, str] | None = None
    try:
        address = config.agent.address or own_address()
        opened = link.agent.open_peers(address)
        own = (opened.host, opened.port, opened.identity.public)
        _warn_of_kept_settings(rank, opened, address, config)
    except FlashCkptError as error:
        logger.error(
            "rank %d: other nodes hold no copies of its checkpoints: %s; training and saving "
            "continue",
            *(rank, error),
        )
    nodes = nodes_of(gather_objects(own))
    if rank == 0 and len(nodes) < 2:
        logger.warning(
            "'redundancy' is %s, but the job has %d node: if that node is lost, the job resumes "
            "from storage",
            *(config.redundancy, len(nodes)),
        )
    try:
        for number, node in enumerate(nodes):
            if rank in node.ranks:
                link.agent.join_peers(
                    JoinPeers(
                        config.redundancy,
                        config.redundancy_group,
                        config.agent.peer_timeout_s,
                        number,
                        nodes,
                    )
                )
    except FlashCkptError as error:
        logger.error("rank %d: %s", rank, error)
    # A barrier: every agent must know its peers before one of them sends a request.
    gather_objects(None)


def _warn_of_kept_settings(rank: int, opened: PeersOpened, address: str, config: Config) -> None:
    """Warn of settings that the agent keeps from an earlier run, because its copies need them."""
    settings = {
        "agent.address": (opened.host, address),
        "agent.peer_threads": (opened.threads, config.agent.peer_threads),
    }
    kept = [f"{name} {old!r}, not {new!r}" for name, (old, new) in settings.items() if old != new]
    if kept:
        logger.warning(
            "rank %d: the agent of this node, which an earlier run started, keeps %s, because "
            "other nodes reach their checkpoints on this node that way; to change that, end the "
            "agents of all nodes before the job starts",
            *(rank, " and ".join(kept)),
        )


def nodes_of(ranks: list[tuple[str, int, str] | None]) -> tuple[PeerNode, ...]:
    """Return the nodes in order of their first ranks.

    Args:
        ranks: host, port and public key of each rank's agent; None for a rank without one.
    """
    ranks_of: dict[tuple[str, int, str], list[int]] = {}
    for rank, agent in enumerate(ranks):
        if agent is not None:
            ranks_of.setdefault(agent, []).append(rank)
    return tuple(PeerNode(*agent, tuple(members)) for agent, members in ranks_of.items())


def own_address() -> str:
    """Return the address by which this node reaches the job's rendezvous.

    That is a loopback address only if `MASTER_ADDR` names loopback (one machine). If another name
    resolves to loopback, as a node's own name may, return the address of the default route.

    Raises:
        AgentError: this node has no such address.
    """
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        address = _source_address(master)
        named_loopback = master == "localhost" or _is_loopback(master)
        if _is_loopback(address) and not named_loopback:
            # Connecting a datagram socket sends nothing: it only looks up the route. The address
            # is reserved for documentation.
            address = _source_address("192.0.2.1")
    except OSError as error:
        raise AgentError(
            f"this node has no address on the route to {master} ({error}); set 'agent.address'"
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
