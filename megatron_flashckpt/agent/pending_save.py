"""A save that an agent has a part in and that has no result yet."""

from __future__ import annotations

import dataclasses

from megatron_flashckpt.agent.commit_core import CommitCore
from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.layout.save_cost import RankCost
from megatron_flashckpt.memory.slot import SlotMeta
from megatron_flashckpt.storage.store import Store


@dataclasses.dataclass
class PendingSave:
    """A save of this node's ranks. The node's lock guards all but the fixed facts."""

    store: Store
    iteration: int
    save_id: str
    staged_as: str
    """Save id in the slots; differs if a failed save is tried again."""
    core: CommitCore
    """Decides the end of the save."""
    metas: dict[int, SlotMeta] = dataclasses.field(default_factory=dict)
    """Descriptions of the slots, by rank of this node."""
    costs: dict[int, RankCost] = dataclasses.field(default_factory=dict)
    """Timings until the slot was staged, by rank of this node."""
    is_given_up: bool = False
    """Training went on without the save, so its slots are emptied."""
    has_looked_for_runs: bool = False
    """The agent of rank 0 has looked for a later run, once per save."""
    called_slow: bool = False
    """Its trainers were notified that the save is slow."""

    @property
    def directory(self) -> str:
        return file_names.iteration_dir(self.iteration)

    @property
    def end(self) -> str:
        """Name of the end of the save."""
        return f"{self.directory}/{file_names.end_name(self.save_id)}"

    @property
    def save(self) -> Save:
        """The save as the lineage judges it."""
        return Save(self.iteration, self.save_id)
