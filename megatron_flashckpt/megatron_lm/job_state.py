"""The data of a job that saves and loads use; they know nothing else of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import Float16Module

from megatron_flashckpt.megatron_lm.job_description import Fact


def unwrapped(model: Iterable[Any]) -> list[Any]:
    """Return the model chunks without megatron-core's data parallel and precision wrappers."""
    chunks = []
    for chunk in model:
        while isinstance(chunk, DistributedDataParallel | Float16Module):
            chunk = chunk.module
        chunks.append(chunk)
    return chunks


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobState:
    """Model, optimizer and all else of a job. The stand-ins make it from Megatron's args."""

    chunks: list[Any]
    """Unwrapped model chunks of this rank."""
    wrapped: list[Any] = dataclasses.field(default_factory=list)
    """The same chunks with their DistributedDataParallel and precision wrappers."""
    optimizer: Any = None
    """Megatron's optimizer; None for a model that is not trained."""
    saves_optimizer: bool = True
    """False: only weights are saved; the optimizer's steps still wait for the copies."""
    scheduler: Any = None
    """Megatron's `OptimizerParamScheduler`; saved if there is an optimizer."""
    common: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """State of the training loop that is equal on all ranks."""
    description: Mapping[str, Fact] = dataclasses.field(default_factory=dict)
    """Facts for people and tools, beside the versions; each is a number or a text."""
    save_rng: bool = True
    trains: bool = True
    """False for a job that only evaluates; it may lack permission to write."""
    save_interval: int | None = None
    """Iterations between saves, for messages."""
    memory_interval: int | None = None
    """Iterations between saves to host memory only, for messages."""
    retain_interval: int | None = None
    """Retention keeps checkpoints of iterations that are multiples of this."""
    outside_steps: str | None = None
    """The feature that changes tensors outside `optimizer.step()`, for messages; None if none."""
    entry_point: str = ""
    """Way in which the job calls this package, for messages."""
    differences: Callable[[], list[str]] = list
    """Returns one line per difference between the caller and what this package expects of it."""

    @property
    def saved_optimizer(self) -> Any:
        """The optimizer if it is saved, else None."""
        return self.optimizer if self.saves_optimizer else None

    @property
    def parts(self) -> tuple[Any, ...]:
        """The objects that a save reads."""
        return (*self.chunks, self.saved_optimizer)
