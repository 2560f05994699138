"""Check before the first step that nodes have the memory for saves, and storage accepts them."""

from __future__ import annotations

import contextlib
import os

from megatron_flashckpt.agent.place import place_of
from megatron_flashckpt.agent.run_messages import BeginRun
from megatron_flashckpt.errors import FlashCkptError, StorageError
from megatron_flashckpt.megatron_lm.size_estimate import SizeEstimate
from megatron_flashckpt.memory.pinned_slab import unlock_closed
from megatron_flashckpt.save import node_memory, probe
from megatron_flashckpt.save.checkpointer import Checkpointer
from megatron_flashckpt.save.new_slab import slab_nbytes
from megatron_flashckpt.save.node_memory import Need
from megatron_flashckpt.storage.opening import open_store

#: Longest wait until agents have written and freed the memory of an earlier run, in seconds.
_RELEASE_S = 60.0


def check_memory(checkpointer: Checkpointer, expected: SizeEstimate) -> list[Need]:
    """Check that all nodes have the memory; return each rank's need, in rank order. Collective.

    An agent may still hold memory for ranks of an earlier run that this run does not have. The
    agents learn here which ranks this run has, and get time to free the rest.

    Raises:
        StorageError: as `node_memory.check`, on all ranks.
    """
    run_id, slots = checkpointer.runs.agree(), checkpointer.config.slots
    needs = _needs(checkpointer, expected)
    ranks = node_memory.ranks_of_same_agent(needs, checkpointer.rank)
    checkpointer.link.agent.begin_run(BeginRun(run_id, ranks))
    try:
        node_memory.check(needs, slots)
    except StorageError:
        needs = _needs(checkpointer, expected, checkpointer.link.agent.held_memory(_RELEASE_S))
        node_memory.check(needs, slots)
    return needs


def _needs(checkpointer: Checkpointer, expected: SizeEstimate, holder: str = "") -> list[Need]:
    """Return the need of each rank, in rank order. Collective."""
    config = checkpointer.config
    with contextlib.suppress(FlashCkptError):  # the first save reports the same error
        checkpointer.link.reclaim()
    unlock_closed()
    agent = str(place_of(checkpointer.root, config.runtime_dir))
    slab = slab_nbytes(config.slots, expected.nbytes, expected.plan_nbytes)
    held = int(slab * config.held_share)
    is_there = checkpointer.link.has_slab
    return node_memory.gather_needs(slab, held, is_there=is_there, agent=agent, holder=holder)


def check_storage(checkpointer: Checkpointer) -> None:
    """Check on all ranks that the save directory can hold checkpoints. Collective.

    Raises:
        StorageError: as `probe.check`, on all ranks.
    """
    wait_s = checkpointer.config.probe_wait_s
    is_first_of_node = int(os.environ.get("LOCAL_RANK", "0")) == 0
    store = open_store(checkpointer.root)
    probe.check(store, checkpointer.rank, is_first_of_node=is_first_of_node, wait_s=wait_s)
