"""What one place of the model-parallel layout holds, without a model: names, shapes, geometry."""

from __future__ import annotations

import dataclasses
import math

from megatron_flashckpt.layout.piece import Shape
from megatron_flashckpt.megatron_lm.tensor_geometry import Geometry


@dataclasses.dataclass(frozen=True)
class LocalTensor:
    """A parameter or buffer of one rank's model."""

    geometry: Geometry
    shape: Shape
    expert: bool = False
    """Whether it is replicated over the expert-data-parallel ranks."""
    shared_embedding: bool = False
    """Whether it is one of the copies of tied embeddings: it has a bucket of its own."""
    embedding_or_output: bool = False
    """Whether `--decoupled-lr` is meant for it."""
    scaled: bool = False
    """Whether `--use-mup` takes it for a hidden layer's matrix, and not for a vector or embedding.
    """

    @property
    def name(self) -> str:
        """Name in the rank's state dict."""
        return self.geometry.name

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One model chunk (several with interleaved pipelining)."""

    parameters: tuple[LocalTensor, ...]
    """In registration order, which is the order of optimizers and buckets."""
    buffers: tuple[LocalTensor, ...]
    state_names: tuple[str, ...]
    """The keys of the chunk's state dict, in order."""
    objects: tuple[tuple[str, str], ...]
    """Name and unique global key of what is not a tensor (Transformer Engine's extra state)."""


@dataclasses.dataclass(frozen=True)
class RankModel:
    """What the ranks at one place of the model-parallel layout hold."""

    tp: int
    pp: int
    ep: int
    first_replica: bool
    """Whether the first data-parallel replica of the dense parameters is here."""
    dense_group: int
    expert_group: int
    """Number of the data-parallel group of its dense and of its expert parameters."""
    chunks: tuple[Chunk, ...]
