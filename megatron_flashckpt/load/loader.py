"""The steps that fill a model from one checkpoint, in memory or in storage.

Ranks agree on every decision before the first tensor is overwritten, and an error on one rank is
raised on all ranks.
"""

from __future__ import annotations

import dataclasses

from megatron_flashckpt.collectives import run_and_agree
from megatron_flashckpt.errors import MissingStateError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.load.checkpoint_source import CheckpointSource, Origin, ReadReport
from megatron_flashckpt.load.chunk_reader import ChunkReader
from megatron_flashckpt.load.load_request import LoadRequest, refuse_missing_optimizer
from megatron_flashckpt.load.plan import LoadPlan, plan_load
from megatron_flashckpt.load.side_state import SideState, read_side_state
from megatron_flashckpt.megatron_lm.vocabulary import least_words
from megatron_flashckpt.save.gc_pause import gc_paused


@dataclasses.dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint whose tensors are in place, with its side state, which is not applied yet."""

    origin: Origin
    side: SideState
    report: ReadReport


@gc_paused()
def load(request: LoadRequest, source: CheckpointSource) -> LoadedCheckpoint:
    """Fill the model and optimizer of `request`; return the side state, too. Collective.

    Raises:
        FlashCkptError: on every rank. Tensors were overwritten only if reading failed or
            found damaged bytes; storage and slots are unchanged.
    """
    side, plan = _checked_plan(request, source)
    request.overwritten.update(plan.names)
    hit("load.planned")
    with run_and_agree(lambda: _opened(plan, source)) as reader:
        report = source.fill(plan, reader)
    run_and_agree(plan.finish)
    hit("load.filled")
    return LoadedCheckpoint(source.origin, side, report)


def _checked_plan(request: LoadRequest, source: CheckpointSource) -> tuple[SideState, LoadPlan]:
    """Return the side state and this rank's reads, on which all ranks agree. Collective."""
    try:
        side, state_types = read_side_state(request, source)
        refuse_missing_optimizer(request, side.param_groups, source.job.place)
        words = least_words(side.common.get("args"))
        return side, plan_load(request, source.job, side.param_groups, state_types, words)
    except MissingStateError:
        # Either the model differs, or the checkpoint itself is incomplete.
        source.check_whole()
        raise


def _opened(plan: LoadPlan, source: CheckpointSource) -> ChunkReader:
    plan.zero_padding()
    return source.open(plan)
