"""Names, shapes and geometry of the model at one model-parallel coordinate."""

from __future__ import annotations

import dataclasses
import math

from megatron_flashckpt.layout.piece import Shape
from megatron_flashckpt.megatron_lm.tensor_geometry import Geometry

#: Remedy for a source that does not name its parameters; Megatron's own loader reads it.
LOAD_IT = (
    "load it with megatron_flashckpt in a job of the Megatron that wrote it: the job's next save "
    "is in the format flashckpt"
)


@dataclasses.dataclass(frozen=True)
class LocalTensor:
    """A parameter or buffer of one rank's model."""

    geometry: Geometry
    shape: Shape
    expert: bool = False
    """True if the tensor is replicated over the expert-data-parallel ranks."""
    shared_embedding: bool = False
    """True if the tensor is a copy of tied embeddings, which has a separate bucket."""
    embedding_or_output: bool = False
    """True if `--decoupled-lr` applies to the tensor."""
    scaled: bool = False
    """True if `--use-mup` treats the tensor as a hidden layer's matrix."""

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
    """Keys of the chunk's state dict, in order."""
    objects: tuple[tuple[str, str], ...]
    """Name and unique global key of non-tensor objects (Transformer Engine's extra state)."""


@dataclasses.dataclass(frozen=True)
class RankModel:
    """Model of the ranks at one model-parallel coordinate."""

    tp: int
    pp: int
    ep: int
    first_replica: bool
    """True if the first data-parallel replica of the dense parameters is at this coordinate."""
    dense_group: int
    """Number of the data-parallel group of the dense parameters."""
    expert_group: int
    """Number of the data-parallel group of the expert parameters."""
    chunks: tuple[Chunk, ...]
