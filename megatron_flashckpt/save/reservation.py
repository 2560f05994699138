"""Checks before the first step that the nodes have the memory, and the storage can be saved to."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from megatron_flashckpt.agent.run_messages import BeginRun
from megatron_flashckpt.agent.socket_dir import agent_directory
from megatron_flashckpt.errors import FlashCkptError, StorageError
from megatron_flashckpt.megatron_lm.size_estimate import Expected
from megatron_flashckpt.save import node_memory, probe
from megatron_flashckpt.save.checkpointer import Checkpointer
from megatron_flashckpt.save.new_slab import slab_nbytes
from megatron_flashckpt.save.node_memory import Need
from megatron_flashckpt.storage.opening import open_storage

#: Seconds that agents have to write and free memory of an earlier run, if the node lacks it.
_RELEASE_S = 60.0


def check_memory(checkpointer: Checkpointer, expected: Expected) -> list[Need]:
    """Return the need of each rank, in rank order, if all nodes have the memory. Collective.

    Ranks of an earlier run that this one does not have may still hold some: the agents, which learn
    of the run here, get time to free it.

    Raises:
        StorageError: on all ranks alike, as `node_memory.check`.
    """
    run_id, slots = checkpointer.agree(), checkpointer.config.slots
    needs = _needs(checkpointer, expected)
    ranks = node_memory.neighbours(needs, checkpointer.rank)
    checkpointer.link.agent.begin_run(BeginRun(run_id, ranks))
    try:
        node_memory.check(needs, slots)
    except StorageError:
        needs = _needs(checkpointer, expected, checkpointer.link.agent.held_memory(_RELEASE_S))
        node_memory.check(needs, slots)
    return needs


def _needs(checkpointer: Checkpointer, expected: Expected, holder: str = "") -> list[Need]:
    """Return the need of each rank, in rank order. Collective."""
    config = checkpointer.config
    with contextlib.suppress(FlashCkptError):  # the first save will meet the same trouble
        checkpointer.link.reclaim()
    agent = str(agent_directory(checkpointer.root, config.runtime_dir))
    slab = slab_nbytes(config.slots, expected.nbytes, expected.plan_nbytes)
    held = int(slab * config.held_share)
    is_there = checkpointer.link.has_slab
    return node_memory.gather_needs(
        slab,
        held,
        is_there=is_there,
        agent=agent,
        holder=holder,
        compared_nbytes=expected.compared_nbytes,
    )


def check_storage(margs: Any, checkpointer: Checkpointer) -> None:
    """Raise on all ranks if the save directory cannot hold checkpoints. Collective.

    Raises:
        StorageError: on all ranks alike, as `probe.check`.
    """
    wait_s = checkpointer.config.probe_wait_s
    if getattr(margs, "skip_train", False):  # such a job may only read there
        return
    is_first_of_node = int(os.environ.get("LOCAL_RANK", "0")) == 0
    storage = open_storage(checkpointer.root)
    probe.check(storage, checkpointer.rank, is_first_of_node=is_first_of_node, wait_s=wait_s)
