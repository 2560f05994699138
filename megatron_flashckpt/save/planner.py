"""Enumeration of the pieces that a rank saves, and the plan of their places in a slot."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_flashckpt.errors import SaveFailedError
from megatron_flashckpt.layout.template import Layout, PlanCache, order
from megatron_flashckpt.megatron_lm import side_state
from megatron_flashckpt.megatron_lm.enumeration import Enumeration, Section
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.memory import cuda
from megatron_flashckpt.memory.runs import Copy
from megatron_flashckpt.save.gc_pause import gc_paused
from megatron_flashckpt.save.node_link import NodeLink
from megatron_flashckpt.save.request import SaveRequest
from megatron_flashckpt.save.shared_templates import SharedTemplates
from megatron_flashckpt.tracing import phase


class SavePlan(NamedTuple):
    """The place of each piece of a save in the slot. Equal blocks have the same plan."""

    blocks: list[tuple[int, list[Section]]]
    layout: Layout
    early: list[Copy]
    """Copies of tensors that other code than `optimizer.step()` may change."""
    late: list[Copy]


class Planner:
    """Enumerates and plans the saves of one rank. Tensors are enumerated afresh for each save."""

    def __init__(self, rank: int, world_size: int, link: NodeLink, state: ModelState) -> None:
        self._rank = rank
        self._world_size = world_size
        self._state = state
        self._templates = SharedTemplates(link)
        self.plans = PlanCache(self._templates.fetch, self._templates.publish)
        #: Plan of the last save.
        self._last: SavePlan | None = None

    def enumerated(self, request: SaveRequest) -> Enumeration:
        """Return all pieces that this rank saves.

        Raises:
            UnsupportedError: the job holds state that cannot be saved.
            SaveFailedError: CUDA lacks memory for a temporary copy, or fails.
        """
        try:
            with phase("enumerate"):
                return self._enumerated(request.job, request.rerun)
        except RuntimeError as error:
            if not cuda.is_error(error):
                raise
            raise SaveFailedError(f"rank {self._rank}: not staged: {error}") from error

    def plan(self, enumeration: Enumeration) -> SavePlan:
        """Return the places of the pieces; nearly always those of the last save.

        Raises:
            AgentError: the agent, which shares templates, is gone.
        """
        with phase("plan"), gc_paused():
            if self._last is not None and self._last.blocks == enumeration.blocks:
                self.plans.origins["kept"] += 1
            else:
                self._last = self._planned(enumeration)
            return self._last

    def dry_run(self, job: JobState, run_id: str | None) -> tuple[int, int]:
        """Enumerate and plan as a save does; share the template with other nodes.

        Returns:
            The bytes of the data, and of the plan.

        Raises:
            AgentError: as `plan`.
            UnsupportedError: as `enumerated`.
        """
        enumeration = self._enumerated(job, rerun=None)
        with self._templates.over_nodes(run_id):
            layout = self.plan(enumeration).layout
        return layout.nbytes, len(layout.encoded_template)

    def _planned(self, enumeration: Enumeration) -> SavePlan:
        numbered = list(enumeration.numbered())
        in_order = [numbered[n] for n in order(enumeration.pieces)]
        layout = self.plans.layout([section.piece for _, section in in_order])
        early: list[Copy] = []
        late: list[Copy] = []
        for (source, section), item in zip(in_order, layout.template.items, strict=True):
            copy = Copy(source, item.byte_offset, section.start, section.end)
            (early if section.early else late).append(copy)
        return SavePlan(enumeration.blocks, layout, early, late)

    def _enumerated(self, job: JobState, rerun: Any) -> Enumeration:
        """Return all that this rank saves."""
        with gc_paused():
            geometry = self._state.geometry(job.chunks)
            owned = self._state.owned(geometry, job.chunks, job.saved_optimizer)
            state = side_state.rank_state(
                job.chunks, geometry, job.saved_optimizer, rerun, save_rng=job.save_rng
            )
            owned.add([side_state.frame(state, self._rank, self._world_size)])
            return owned
