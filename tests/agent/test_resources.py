"""Resources of an agent: small, and constant over a long run.

The figures are printed (`pytest -rP`); only generous bounds are asserted.
"""

from __future__ import annotations

from pathlib import Path

from megatron_flashckpt.file_format import file_names
from tests.agent.conftest import Node
from tests.support.cluster import cluster
from tests.support.processes import MIB, at_rest, memory_nbytes, open_files, thread_count
from tests.support.stored import assert_intact
from tests.support.trainer import blocked_shard, eventually, new_save_id, save_all


def test_50_saves_and_20_reconnects_leak_no_descriptor_thread_or_memory(tmp_path: Path) -> None:
    """The agent also holds parity for two other nodes."""
    with cluster(tmp_path, (1, 1, 1), numel=20_000, retain_interval=1000) as made:
        made.start("xor", 3)
        ranks = list(made.trainers.values())
        for iteration in range(1, 11):  # permanent allocations exist after these saves
            assert not any(save_all(ranks, iteration))
        made.await_held(10, 2)
        (agent,) = made.nodes[0].agents()
        files, memory = at_rest(lambda: len(open_files(agent))), memory_nbytes(agent)
        threads = at_rest(lambda: thread_count(agent))
        for iteration in range(11, 61):
            assert not any(save_all(ranks, iteration))
        made.await_held(60, 2)
        assert_intact(made.root, 60, ranks)
        trainer = ranks[0]
        for _ in range(20):
            trainer.hang_up()
            trainer = made.nodes[0].trainer(made.root, 0, 3)
            assert trainer.client.agent_pid == agent
            assert [offer.iteration for offer in trainer.take()] == [60, 59]
        eventually("as many descriptors as before", lambda: len(open_files(agent)) == files)
        eventually("as many threads as before", lambda: thread_count(agent) == threads)
        growth = memory_nbytes(agent) - memory
        print(f"agent: {growth // 1024} KiB more after 50 saves and 20 reconnects")
        assert growth < 8 * MIB
        assert memory < 120 * MIB


def test_a_slab_replaced_during_its_persist_is_freed_afterwards(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    agent = trainer.client.agent_pid

    def slabs() -> int:
        return sum("memfd:flashckpt-0" in path for path in open_files(agent))

    assert trainer.save(1).error is None
    before = slabs()
    save_id = new_save_id()
    with blocked_shard(root, 2, 0, save_id) as unblock:
        trainer.stage(2, save_id)
        trainer.slab.close()
        trainer.slab = None
        assert trainer.save(3).error is None
        assert slabs() == 2 * before, "the replaced slab is still being read"
        unblock()
        assert trainer.outcome().iteration == 2
    eventually("the former slab is freed", lambda: slabs() == before)
    assert (root / file_names.iteration_dir(2) / file_names.end_name(save_id)).exists()
