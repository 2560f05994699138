"""Nodes that are gone, hung, slow, replaced or send garbage: training and saves continue.

The save of each trainer must be committed as if its node were alone. Redundant copies come second.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import numpy as np
import pytest

from megatron_flashckpt.agent.peers.topology import Topology
from megatron_flashckpt.agent.protocol import PeersOpened
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.save.node_link import NodeLink
from tests.agent.peers.test_recovery import assert_recovered, recover_lost
from tests.support.cluster import Cluster, cluster
from tests.support.trainer import FakeTrainer, eventually, suspend


def save_all(made: Cluster, iteration: int) -> str:
    save_id = made.stage(iteration)
    for trainer in made.trainers.values():
        assert trainer.outcome().error is None
    assert (made.root / file_names.TRACKER).read_text() == str(iteration)
    return save_id


def warnings(made: Cluster, node: int) -> list[str]:
    return re.findall(r"WARNING .*is not held by .*", made.log(node))


@pytest.mark.parametrize(
    ("timeout_s", "fact", "remedy"),
    [
        (0.5, "no answer within", "if this node is lost meanwhile, the job resumes from storage"),
        (30.0, "iteration 2 is not held by", "save less often, or raise 'slots'"),
    ],
    ids=["hangs", "is slow"],
)
def test_a_partner_that_does_not_read_costs_one_warning_and_no_save(
    tmp_path: Path, timeout_s: float, fact: str, remedy: str
) -> None:
    """A save does not wait for the slot that is being sent: the agent gives up the older copy."""
    with cluster(tmp_path, (1, 1)) as made:
        made.start("copy", timeout_s=timeout_s)
        save_all(made, 1)
        made.await_held(1, 1)
        (hung,) = made.nodes[1].agents()
        made.trainers[1].hang_up()
        suspend(hung)
        alone = made.trainers[0]
        for iteration in range(2, 7):
            alone.stage(iteration, f"{iteration:012x}")
            if iteration == 2:
                eventually("the partner is sent something", lambda: unread(made.peers[1].port))
            eventually(
                "the log line of the persisted slot",
                lambda i=iteration: f"persisted iteration {i}" in made.log(0),
            )
        if timeout_s < 1:
            eventually("the warning", lambda: warnings(made, 0))
        os.kill(hung, signal.SIGCONT)
        # No further save is needed: the agent sends the newest slot again.
        eventually(
            "the newest save is held", lambda: "rank 0: iteration 6 is held by" in made.log(0)
        )
        (warning,) = warnings(made, 0)
        assert fact in warning
        assert remedy in made.log(0)


def unread(port: int) -> bool:
    """Return whether bytes wait to be read on a connection to a port of this machine."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, _, queues, *_ = line.split()
        if int(local.split(":")[1], 16) == port and int(queues.split(":")[1], 16):
            return True
    return False


@pytest.mark.parametrize("scheme", ["copy", "xor"])
def test_a_recovery_rejects_a_copy_whose_bytes_changed_and_warns(
    tmp_path: Path, scheme: str
) -> None:
    sizes = (1, 1) if scheme == "copy" else (1, 1, 1)
    with cluster(tmp_path, sizes, numel=500_000) as made:
        made.start(scheme, 3)
        older, newer = save_all(made, 10), save_all(made, 20)
        made.await_held(20, len(sizes) - 1)
        damage_what_is_held(made, 1, 20)
        recover_lost(made, scheme, 3, 0, [older, newer])
        assert_recovered(made, 0, [10])
        log = made.log(0)
        assert re.search(r"rank 0: iteration 20 not recovered from nodes .*: chunk \d: digest", log)


def damage_what_is_held(made: Cluster, holder: int, iteration: int) -> None:
    """Flip a byte in the middle of the data that an agent holds for other nodes.

    Every place in memory is changed, because the first one may be a receive buffer.
    """
    scheme, group = made.plans[0].scheme, made.plans[0].group
    topology = Topology(scheme, group, made.ranks)
    held = np.zeros(0, np.uint8)
    for node in topology.contributors(holder):
        for rank, shares in topology.shares(node).items():
            whole = np.frombuffer(stream(made.trainers[rank], iteration), np.uint8)
            (part,) = [share.part for share in shares if share.holder == holder]
            start, end = part.bounds(len(whole))
            one, held = sorted((whole[start:end], held), key=len)
            held = held ^ np.pad(one, (0, len(held) - len(one)))
    middle = held[len(held) // 2 :][:4096].tobytes()
    (pid,) = made.nodes[holder].agents()
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    flipped = 0
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            start, end = (int(edge, 16) for edge in line.split()[0].split("-"))
            if "memfd" in line or line.split()[1][:2] != "rw":
                continue
            memory.seek(start)
            for match in re.finditer(re.escape(middle), memory.read(end - start)):
                memory.seek(start + match.start())
                memory.write(bytes([middle[0] ^ 1]))
                flipped += 1
    assert flipped, "the agent does not hold this data"


def stream(trainer: FakeTrainer, iteration: int) -> bytes:
    """Return the description and the data of a checkpoint in a trainer's slot."""
    (index,) = [offer.slot for offer in trainer.take() if offer.iteration == iteration]
    meta_at = trainer.slab.geometry.meta_offset(index)
    nbytes = trainer.slab.slots[index].header.meta_nbytes
    return bytes(trainer.slab.memory[meta_at : meta_at + nbytes]) + trainer.bytes_in(index)


def test_an_agent_whose_redundancy_was_turned_off_sends_and_holds_no_copies(tmp_path: Path) -> None:
    with cluster(tmp_path, (1, 1)) as made:
        made.start("copy")
        save_all(made, 10)
        made.await_held(10, 1)
        agents = [made.nodes[node].agents() for node in range(2)]
        mapped = Path(f"/proc/{agents[0][0]}/maps").read_text()
        assert "zmq" in mapped
        assert "numpy" not in mapped, "copies are sent without the package that makes parity"
        made.restart_trainers()
        for rank in range(2):
            link = NodeLink(str(made.root), rank, made.nodes[rank].config())
            link.client()
            link.close(leave=False)
        assert [made.nodes[node].agents() for node in range(2)] == agents
        for node in range(2):
            # The port, the threads and the copies of the agent are gone.
            eventually("the port is closed", lambda n=node: not listens(made.peers[n]))
        save_all(made, 20)
        assert made.reported_held(20) == {0: 0, 1: 0}
        made.start("copy")
        save_all(made, 30)
        made.await_held(30, 1)


def listens(peer: PeersOpened) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((peer.host, peer.port)) == 0
