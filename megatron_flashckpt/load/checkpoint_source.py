"""The interface between a load and the two sources of a checkpoint.

`memory_source` reads the slots of all ranks; `storage_source` reads a committed checkpoint in
storage. Both open a `CheckpointSource`, from which `loader.load` fills the model.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.file_format.file_names import RELEASE
from megatron_flashckpt.file_format.run_object import Ancestors
from megatron_flashckpt.load.chunk_reader import ChunkReader
from megatron_flashckpt.load.plan import LoadPlan
from megatron_flashckpt.load.saved_job import SavedJob


@dataclasses.dataclass(frozen=True)
class Origin:
    """Identity of the checkpoint that was loaded."""

    iteration: int
    save_id: str
    source: Literal["memory", "storage"]
    ancestors: Ancestors = ()
    """Those of the run that made the checkpoint."""
    is_release: bool = False
    """True if the tracker says `release`: Megatron then loads weights alone, as iteration 0."""

    @property
    def save(self) -> Save:
        """The checkpoint, by the name of its directory."""
        return Save(RELEASE if self.is_release else self.iteration, self.save_id)


@dataclasses.dataclass
class ReadReport:
    """Bytes and seconds of a load on this rank."""

    read_nbytes: int = 0
    received_nbytes: int = 0
    """Bytes received from other ranks, which read them, or hold them in slots of other nodes."""
    held_nbytes: int = 0
    """Bytes copied from slots in this node's memory, by this rank."""
    seconds: float = 0.0
    memory_nbytes: int = 0
    """Upper bound of the memory used in addition to the filled tensors."""
    shared: bool = False
    """True if replicas continued to share reads after the first round."""


class CheckpointSource(Protocol):
    """Checkpoint that all ranks have agreed to load. Its properties are equal on all ranks."""

    @property
    def origin(self) -> Origin: ...

    @property
    def job(self) -> SavedJob:
        """The ranks that saved the checkpoint, and the pieces that each rank stored."""

    @property
    def common_state(self) -> bytes:
        """The encoded state that is equal on all ranks."""

    @property
    def reads_alone(self) -> bool:
        """True if each rank can read its side state without `fill`, which communicates."""

    def open(self, plan: LoadPlan) -> ChunkReader:
        """Return a reader with the buffers and threads that `plan` needs. No communication.

        Raises:
            MemoryError: this rank lacks memory for the buffers; the caller raises on all ranks.
        """

    def fill(self, plan: LoadPlan, reader: ChunkReader) -> ReadReport:
        """Fill the targets of `plan`. Collective, after all ranks have opened their readers.

        Raises:
            FlashCkptError: a rank could not read, or read damaged bytes; on all ranks.
        """

    def check_whole(self) -> None:
        """Check that the checkpoint itself is complete, after this model missed some state.

        Collective.

        Raises:
            CorruptCheckpointError: the checkpoint is incomplete; on all ranks.
            MissingStateError: it is in memory, and ranks of the saving job are gone; on all ranks.
        """
