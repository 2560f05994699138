"""The id of a run: 8 hexadecimal digits, equal on all ranks and new in every start of the job.

The id distinguishes this run's commit records from those of an earlier run.
"""

from __future__ import annotations

import itertools
import uuid

import torch.distributed as dist

from megatron_flashckpt.collectives import broadcast_object


class Run:
    """Names the saves of this process to one directory, over all its checkpointers."""

    def __init__(self) -> None:
        self.id: str | None = None
        """Id of the run; None until the ranks have agreed."""
        self._saves = itertools.count()

    def begin(self, agreed_id: str) -> None:
        """Count the saves from 0 under an id that all ranks have agreed on."""
        self.id, self._saves = agreed_id, itertools.count()

    def new_save_id(self) -> str:
        """Return the id of the next save: equal on all ranks, and never used before."""
        return f"{self.id}{next(self._saves):04x}"


def agreed() -> str:
    """Return a new id, chosen by rank 0. Collective; never in a save."""
    run_id: str = broadcast_object(new())
    return run_id


def from_store(root: str) -> str:
    """Return the run id without a collective, for jobs that save before `agreed` was called.

    The first rank that reaches the job's rendezvous store chooses the id for saves to `root`.
    """
    own = new()
    if not dist.is_initialized():
        return own
    store = dist.distributed_c10d._get_default_store()
    chosen: bytes = store.compare_set(f"megatron_flashckpt/run_id/{root}", "", own)
    return chosen.decode()


def new() -> str:
    """Return a random id, unique to one run."""
    return uuid.uuid4().hex[:8]
