"""Enumeration of the pieces that a rank saves, and the plan of their places in a slot."""

from __future__ import annotations

from collections import Counter
from typing import Any

from megatron_flashckpt.errors import SaveFailedError
from megatron_flashckpt.layout.save_cost import PlanOrigin
from megatron_flashckpt.layout.template import Layout, PlanCache
from megatron_flashckpt.megatron_lm import side_state
from megatron_flashckpt.megatron_lm.cutting import LocalPiece
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.memory import cuda
from megatron_flashckpt.save.gc_pause import gc_paused
from megatron_flashckpt.save.node_link import NodeLink
from megatron_flashckpt.save.request import SaveRequest
from megatron_flashckpt.save.shared_templates import SharedTemplates
from megatron_flashckpt.tracing import phase


class Planner:
    """Enumerates and plans the saves of one rank. Tensors are enumerated afresh for each save."""

    def __init__(self, rank: int, world_size: int, link: NodeLink, state: ModelState) -> None:
        self._rank = rank
        self._world_size = world_size
        self._state = state
        self._templates = SharedTemplates(link)
        self._plans = PlanCache(self._templates.fetch, self._templates.publish)

    @property
    def origins(self) -> Counter[PlanOrigin]:
        """Number of this rank's layouts of each origin."""
        return self._plans.origins

    def enumerated(self, request: SaveRequest) -> list[LocalPiece]:
        """Return all pieces that this rank saves, in layout order.

        Raises:
            UnsupportedError: the job holds state that cannot be saved.
            SaveFailedError: CUDA lacks memory for a temporary copy, or fails.
        """
        try:
            with phase("enumerate"):
                return self._pieces(request.job, request.rerun)
        except RuntimeError as error:
            if not cuda.is_error(error):
                raise
            raise SaveFailedError(f"rank {self._rank}: not staged: {error}") from error

    def layout(self, pieces: list[LocalPiece]) -> Layout:
        """Return the place of each piece in the slot.

        Raises:
            AgentError: the agent, which shares templates, is gone.
        """
        with phase("plan"), gc_paused():
            return self._plans.layout([local.piece for local in pieces])

    def dry_run(self, job: JobState, run_id: str | None) -> tuple[int, int]:
        """Enumerate and plan as a save does; share the template with other nodes.

        Returns:
            The bytes of the data, and of the plan.

        Raises:
            AgentError: as `layout`.
            UnsupportedError: as `enumerated`.
        """
        pieces = self._pieces(job, rerun=None)
        with gc_paused(), self._templates.over_nodes(run_id):
            layout = self._plans.layout([local.piece for local in pieces])
        return layout.nbytes, len(layout.encoded_template)

    def take_origin(self) -> PlanOrigin:
        """Return the most expensive origin of the layouts since the last call."""
        return self._plans.take_origin()

    def _pieces(self, job: JobState, rerun: Any) -> list[LocalPiece]:
        """Return all that this rank saves, in layout order."""
        with gc_paused():
            geometry = self._state.geometry(job.chunks)
            pieces = self._state.owned(geometry, job.chunks, job.saved_optimizer)
            state = side_state.rank_state(
                job.chunks, geometry, job.saved_optimizer, rerun, save_rng=job.save_rng
            )
            pieces.append(side_state.frame(state, self._rank, self._world_size))
            order = self._plans.order([local.piece for local in pieces])
            return list(map(pieces.__getitem__, order))
