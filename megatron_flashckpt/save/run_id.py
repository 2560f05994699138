"""The id of a run: 8 hexadecimal digits, equal on all ranks and new in every start of the job.

It tells this run's commit records from those of an earlier one.
"""

from __future__ import annotations

import itertools
import uuid

import torch.distributed as dist

from megatron_flashckpt.collectives import broadcast_object


class Run:
    """Names the saves of this process to one directory. Outlives checkpointers."""

    def __init__(self) -> None:
        self.id: str | None = None
        """None: the ranks have not agreed yet."""
        self._saves = itertools.count()

    def begin(self, agreed_id: str) -> None:
        """Count the saves from 0 under an id that all ranks have agreed on."""
        self.id, self._saves = agreed_id, itertools.count()

    def new_save_id(self) -> str:
        """Return the id of the next save: equal on all ranks, and never used before."""
        return f"{self.id}{next(self._saves):04x}"


def agreed() -> str:
    """Return the id that rank 0 makes. Collective; never in a save."""
    made: str = broadcast_object(new())
    return made


def from_store(root: str) -> str:
    """Return the id, for jobs that save to `root` before they could agree.

    The first rank to reach the job's rendezvous store decides; no collective, no barrier.
    """
    own = new()
    if not dist.is_initialized():
        return own
    store = dist.distributed_c10d._get_default_store()
    chosen: bytes = store.compare_set(f"megatron_flashckpt/run_id/{root}", "", own)
    return chosen.decode()


def new() -> str:
    """Return an id that no other run has."""
    return uuid.uuid4().hex[:8]
