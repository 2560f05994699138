"""The seam between a load and the two places that a checkpoint can come from.

`memory_source` reads the slots of all ranks, `storage_source` a committed checkpoint in storage.
Each opens a `CheckpointSource`; `loader.load` fills the model from it and knows neither.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

from megatron_flashckpt.load.chunk_reader import ChunkReader
from megatron_flashckpt.load.plan import LoadPlan
from megatron_flashckpt.load.source_job import SavedJob


@dataclasses.dataclass(frozen=True)
class Origin:
    """Names the checkpoint that was loaded."""

    iteration: int
    save_id: str
    source: Literal["memory", "storage"]


@dataclasses.dataclass
class ReadReport:
    """What a load took on this rank."""

    read_nbytes: int = 0
    received_nbytes: int = 0
    """Read by another replica, or held in another rank's slot, and sent here."""
    held_nbytes: int = 0
    """Copied from this rank's own slot in host memory."""
    seconds: float = 0.0
    memory_nbytes: int = 0
    """The most that was held in addition to the tensors that were filled."""
    shared: bool = False
    """True if replicas went on sharing after the first round."""


class CheckpointSource(Protocol):
    """One checkpoint that all ranks have agreed to load. Its properties are equal on all ranks."""

    @property
    def origin(self) -> Origin: ...

    @property
    def job(self) -> SavedJob:
        """The ranks that saved the checkpoint, and what each stored."""

    @property
    def common_state(self) -> bytes:
        """The state that all ranks have in common, encoded."""

    @property
    def reads_alone(self) -> bool:
        """True if each rank can read its side state without the others (`fill_alone`)."""

    def open(self, plan: LoadPlan) -> ChunkReader:
        """Return a reader with the buffers and threads that `plan` needs. No communication.

        Raises:
            MemoryError: this rank has no memory for the buffers; the caller tells all ranks.
        """

    def fill(self, plan: LoadPlan, reader: ChunkReader) -> ReadReport:
        """Fill the targets of `plan`. Collective: all ranks have opened their readers.

        Raises:
            FlashCkptError: on all ranks, if any rank could not read, or read damaged bytes.
        """

    def fill_alone(self, plan: LoadPlan) -> None:
        """Fill the targets of a plan of side states. No communication; only if `reads_alone`.

        Raises:
            CorruptCheckpointError: bytes are damaged; names place, chunk and both digests.
        """

    def check_whole(self) -> None:
        """Look whether the checkpoint itself lacks state, rather than this model wants other state.

        Collective.

        Raises:
            CorruptCheckpointError: on all ranks, if it does.
        """
