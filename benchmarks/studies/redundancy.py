"""Cost of redundancy (none, a partner's copy, parity) by the number of nodes.

This repeats the table that SCR published, with the agents of this package. Each "node" is an agent
and a rank on this machine, and the agents communicate over loopback. A save is protected when the
holders have every rank's part; without redundancy, when it is committed. Every save is written to
storage, too. All nodes share the cores of this machine, so times are comparable only for the same
number of nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.compare.driver import machine
from benchmarks.resources import cpu_s
from benchmarks.study import Result, Study, Table, in_turns
from megatron_flashckpt.memory.slot import SlotState
from tests.support.cluster import Cluster, cluster
from tests.support.trainer import content, eventually, new_save_id

SCHEMES = ("none", "copy", "xor")
NODES = (2, 3, 4, 8)
#: Least number of nodes for parity; all nodes of a job are one parity group.
LEAST_OF_XOR = 3
#: Bytes of a master and its weight.
_ELEMENT_NBYTES = 6
_PATIENCE_S = 60.0


class Case:
    def __init__(self, made: Cluster, scheme: str) -> None:
        self._made = made
        self._iteration = 0
        nodes = len(made.nodes)
        if scheme == "none":
            made.restart_trainers()
        else:
            made.start(scheme, 2 if scheme == "copy" else nodes)
        self._holders = {"none": 0, "copy": 1, "xor": nodes - 1}[scheme]
        """Number of other nodes that hold redundancy for each rank."""
        self._content = {
            rank: content(rank, 1, trainer.layout.nbytes) for rank, trainer in made.trainers.items()
        }

    def save(self) -> tuple[float, float]:
        """Stage a checkpoint on all ranks at the same time; wait until it is held and committed.

        Returns the seconds until it is protected, and the agents' CPU seconds.
        """
        self._iteration += 1
        save_id, slots = new_save_id(), {}
        for rank, trainer in self._made.trainers.items():
            slot = trainer.begin(self._iteration, save_id, _PATIENCE_S)
            assert slot is not None, "no slot became free"
            trainer.fill(slot, self._content[rank])
            slots[rank] = slot
        cpu_s, started = self._agents_cpu_s(), time.perf_counter()
        for rank, slot in slots.items():
            slot.set_state(SlotState.STAGED)
            self._made.trainers[rank].client.staged(slot.index)
        if self._holders:
            eventually("that all parts are held", self._is_held, _PATIENCE_S)
        held_s = time.perf_counter() - started
        for trainer in self._made.trainers.values():
            outcome = trainer.outcome(_PATIENCE_S)
            assert outcome.error is None, outcome.error
        committed_s = time.perf_counter() - started
        return held_s if self._holders else committed_s, self._agents_cpu_s() - cpu_s

    def _is_held(self) -> bool:
        counts = self._made.reported_held(self._iteration)
        return all(count >= self._holders for count in counts.values())

    def _agents_cpu_s(self) -> float:
        return sum(cpu_s(pid) for node in self._made.nodes for pid in node.agents())


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=float, default=64, help="state of one node")
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES))


def run(options: argparse.Namespace, root: Path) -> Iterator[Result]:
    """Yield the seconds and CPU seconds of a save, as medians over the rounds."""
    numel = int(options.mib * 2**20 / _ELEMENT_NBYTES)
    nbytes = numel * _ELEMENT_NBYTES
    rows = []
    for nodes in options.nodes:
        schemes = [name for name in SCHEMES if name != "xor" or nodes >= LEAST_OF_XOR]
        for scheme, saves in _measure(nodes, schemes, numel, options.rounds, root).items():
            protected_s, cpu_s = map(statistics.median, zip(*saves, strict=True))
            rows.append((f"{nodes}", scheme, protected_s, cpu_s / (nodes * nbytes / 1e9)))
    host = machine(root)
    yield Table(
        f"{host['cpu']}, {host['cores']} cores shared by all nodes; {nbytes / 1e6:.0f} MB on each "
        f"node, medians of {options.rounds} interleaved saves after a first one; protected: "
        "held by other nodes (without redundancy: committed)",
        {
            "nodes": "",
            "redundancy": "",
            "protected after, s": ".3f",
            "agents' CPU s per GB of state": ".2f",
        },
        rows,
    )


def _measure(
    nodes: int, schemes: list[str], numel: int, rounds: int, root: Path
) -> dict[str, list[tuple[float, float]]]:
    """Return the costs of all saves of one number of nodes."""
    with contextlib.ExitStack() as stack:
        cases = {}
        for scheme in schemes:
            # Short: the path of an agent's socket has at most 107 bytes.
            where = stack.enter_context(tempfile.TemporaryDirectory(dir=root))
            made = stack.enter_context(cluster(Path(where), [1] * nodes, numel=numel))
            cases[scheme] = Case(made, scheme).save
        # The first save also allocates the slots, on this node and on the holders.
        return in_turns(cases, rounds, warm_up=1)


STUDY = Study("redundancy", "cost of copies and parity, by the number of nodes", add_options, run)
