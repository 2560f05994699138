"""Several nodes of one job on this machine: a runtime directory and an agent each."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.file_format.run_object import RunObject
from tests.agent.conftest import Node
from tests.support.trainer import FakeTrainer, end_agents, eventually


class Cluster:
    """Nodes with some ranks each; all ranks are FakeTrainers in this process."""

    def __init__(self, where: Path, root: Path, sizes: Iterable[int], **job: object) -> None:
        """Args: `sizes`: ranks per node; `job`: arguments of every trainer."""
        self._where = where
        self.root = root
        self._job = job
        self._made = 0
        self.ranks: list[tuple[int, ...]] = []
        for size in sizes:
            first = sum(map(len, self.ranks))
            self.ranks.append(tuple(range(first, first + size)))
        self.world_size = sum(map(len, self.ranks))
        self.nodes = [self._node() for _ in self.ranks]
        self.trainers: dict[int, FakeTrainer] = {}
        self.peers: list[p.PeersOpened] = []
        self.plans: list[p.JoinPeers] = []
        #: Each node has an address of its own, so that an agent reaches no other by chance.
        self.hosts = [f"127.0.0.{node + 1}" for node in range(len(self.ranks))]
        #: Environment of the agent of a node.
        self.inside: Callable[[int], AbstractContextManager[None]] = lambda node: nullcontext()

    def _node(self) -> Node:
        self._made += 1
        return Node(self._where / f"n{self._made}")

    def restart_trainers(self) -> None:
        for trainer in self.trainers.values():
            trainer.hang_up()
        for number, (node, ranks) in enumerate(zip(self.nodes, self.ranks, strict=True)):
            for rank in ranks:
                with self.inside(number):
                    self.trainers[rank] = node.trainer(
                        self.root, rank, self.world_size, **self._job
                    )

    def succeed(self, node: int) -> None:
        """Start the next agent in place of a killed one, as the ranks of the node do."""
        opened = self.peers[node]
        request = p.OpenPeers(opened.host, 2, opened.identity, opened.port)
        for rank in self.ranks[node]:
            trainer = self.trainers[rank]
            with self.inside(node):
                trainer.find_agent()
            assert trainer.client.open_peers(request) == opened
            trainer.client.join_peers(self.plans[node])
            trainer.attach()

    def start(self, scheme: str = "copy", group: int = 2, timeout_s: float = 20.0) -> None:
        """Start (or restart) all trainers and introduce their agents to each other."""
        self.restart_trainers()
        self.peers = [
            self.trainers[ranks[0]].client.open_peers(p.OpenPeers(host, 2))
            for host, ranks in zip(self.hosts, self.ranks, strict=True)
        ]
        nodes = tuple(
            p.PeerNode(peer.host, peer.port, peer.identity.public, ranks)
            for peer, ranks in zip(self.peers, self.ranks, strict=True)
        )
        self.plans = [p.JoinPeers(scheme, group, timeout_s, me, nodes) for me in range(len(nodes))]
        for plan, ranks in zip(self.plans, self.ranks, strict=True):
            for rank in ranks:
                self.trainers[rank].client.join_peers(plan)

    def join(self, run: RunObject) -> None:
        """Tell all agents that the ranks save under a run from now on."""
        for trainer in self.trainers.values():
            trainer.join(run)

    def stage(self, iteration: int, save_id: str | None = None) -> str:
        """Let every rank stage a checkpoint; return its save id."""
        save_id = save_id or self.trainers[0].new_save_id()
        for trainer in self.trainers.values():
            trainer.stage(iteration, save_id)
        return save_id

    def log(self, node: int) -> str:
        return self.nodes[node].log(self.root).read_text()

    def reported_held(self, iteration: int) -> dict[int, int]:
        """Return how often the agents logged, for each rank, that a holder has its part."""
        logs = "".join(self.log(node) for node in range(len(self.nodes)))
        return {
            rank: len(re.findall(rf"rank {rank}: iteration {iteration} is held by", logs))
            for rank in self.trainers
        }

    def await_held(
        self, iteration: int, holders: int, beyond: dict[int, int] | None = None
    ) -> None:
        """Wait for `holders` reports per rank, in addition to the counts in `beyond`."""

        def held() -> bool:
            before = beyond or {}
            reports = self.reported_held(iteration)
            return all(count >= before.get(rank, 0) + holders for rank, count in reports.items())

        eventually(f"all parts of iteration {iteration} held", held)

    def lose(self, *nodes: int) -> None:
        """End all processes of some nodes with all their memory; put new nodes in their place."""
        for trainer in self.trainers.values():
            trainer.hang_up()
        for node in nodes:
            self.kill_agent(node)
            shutil.rmtree(self.nodes[node].runtime_dir)
            self.nodes[node] = self._node()

    def kill_agent(self, node: int) -> None:
        end_agents(self.nodes[node].runtime_dir)

    def close(self) -> None:
        for node in self.nodes:
            node.close()


@contextmanager
def cluster(tmp_path: Path, sizes: Iterable[int], **job: object) -> Iterator[Cluster]:
    made = Cluster(tmp_path, tmp_path / "save", sizes, **job)
    try:
        yield made
    finally:
        made.close()
