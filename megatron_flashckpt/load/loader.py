"""Fills a model from one checkpoint, wherever the checkpoint is.

Ranks agree on every decision before the first tensor is overwritten: an error on one rank is raised
on all.
"""

from __future__ import annotations

import dataclasses

from megatron_flashckpt.collectives import together
from megatron_flashckpt.errors import MissingStateError
from megatron_flashckpt.failpoints import reach
from megatron_flashckpt.load.checkpoint_source import CheckpointSource, Origin, ReadReport
from megatron_flashckpt.load.chunk_reader import ChunkReader
from megatron_flashckpt.load.plan import LoadPlan, plan_load
from megatron_flashckpt.load.request import LoadRequest, refuse_missing_optimizer
from megatron_flashckpt.load.side_state import SideState, read_side_state
from megatron_flashckpt.save.gc_pause import gc_paused


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A checkpoint whose tensors are in place, and the rest of it, which is not applied yet."""

    origin: Origin
    side: SideState
    report: ReadReport


@gc_paused()
def load(request: LoadRequest, source: CheckpointSource) -> Loaded:
    """Fill the model and optimizer of `request`; return what else the checkpoint holds. Collective.

    Raises:
        FlashCkptError: on every rank alike. Nothing was overwritten unless bytes turned out to be
            damaged while they were read; in storage and in slots nothing was changed.
    """
    side, plan = _checked_plan(request, source)
    request.overwritten.update(plan.names)
    reach("load.planned")
    with together(lambda: _opened(plan, source)) as reader:
        report = source.fill(plan, reader)
    together(plan.finish)
    reach("load.filled")
    # The next save has all copies of these at once.
    request.model_state.differing_keys |= source.job.differing
    return Loaded(source.origin, side, report)


def _checked_plan(request: LoadRequest, source: CheckpointSource) -> tuple[SideState, LoadPlan]:
    """Return the side state and this rank's reads; all ranks agree to both. Collective."""
    try:
        side, state_types = read_side_state(request, source)
        refuse_missing_optimizer(request, side.param_groups, source.job.place)
        return side, plan_load(request, source.job, side.param_groups, state_types)
    except MissingStateError:
        # Either this model wants something else, or the checkpoint is not whole itself.
        source.check_whole()
        raise


def _opened(plan: LoadPlan, source: CheckpointSource) -> ChunkReader:
    plan.zero_padding()
    return source.open(plan)
