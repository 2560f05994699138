"""Enumerates the pieces that a rank writes: its own parts and shares of replicated tensors."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import msgspec
import torch

from megatron_flashckpt.config import Replicated, ShareOut
from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import WEIGHT, equal_shares
from megatron_flashckpt.megatron_lm import optimizer_state
from megatron_flashckpt.megatron_lm.cutting import LocalPiece, cut, flat, section
from megatron_flashckpt.megatron_lm.model_geometry import ModelGeometry
from megatron_flashckpt.megatron_lm.optimizer_state import OptimizerEntry
from megatron_flashckpt.megatron_lm.repeat import WrittenEntry
from megatron_flashckpt.megatron_lm.tensor_geometry import Geometry
from megatron_flashckpt.megatron_lm.torch_dtypes import dtype_name


class ReplicatedTensor(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A tensor that is equal on several replicas: one entry of a stream that they divide."""

    geometry: Geometry
    kind: str
    tensor: torch.Tensor
    """The optimizer's tensor, or the parameter itself."""


class Share(NamedTuple):
    """This rank's share of a stream of replicated tensors."""

    writers: int
    """Number of writers; 0 if this rank is not a writer."""
    position: int
    """Position of this rank among the writers."""
    stream: Hashable
    """Identity of the stream; distinguishes streams with equally many but different writers."""


class PieceCollector:
    """Enumerates the pieces that this rank writes: its own parts and shares of replicated tensors.

    Args:
        policy: the replicas that write tensors which are equal on all of them.
        share: returns this rank's share under such a policy, for expert or dense parameters.
        derived: ids of the parameters that are saved as masters only.
        tensors_of: returns the optimizer's tensors other than the weight, by kind.
    """

    def __init__(
        self,
        policy: Replicated,
        share: Callable[[ShareOut, bool], Share],
        geometry: ModelGeometry,
        derived: set[int],
        tensors_of: Callable[[OptimizerEntry], dict[str, torch.Tensor]],
    ) -> None:
        self._policy = policy
        self._geometry = geometry
        self._derived = derived
        self._tensors_of = tensors_of
        self._share = functools.cache(share)  # Megatron's answers are slow
        self._streams: dict[Share, list[ReplicatedTensor]] = defaultdict(list)

    def own_parts(self, entries: Iterable[OptimizerEntry]) -> list[WrittenEntry]:
        """Return the parts of sharded parameters that this rank writes.

        Replicated tensors are added to streams, for `shares`.
        """
        geometry_of, tensors_of = self._geometry.by_id, self._tensors_of
        written: list[WrittenEntry] = []
        for entry in entries:
            geo = geometry_of.get(id(entry.parameter))
            if geo is None:
                raise _outside_model(entry)
            tensors = tensors_of(entry)
            if not geo.is_saved:
                tensors = {}
            elif geo.copy is not None:
                tensors = {geo.saved_kind(kind): tensor for kind, tensor in tensors.items()}
            if entry.sharded:
                has_weight = geo.is_saved and id(entry.parameter) not in self._derived
                weight_kind = geo.saved_kind(WEIGHT) if has_weight else None
                if not entry.main:  # another instance writes the tensors; listed for `Repeat`
                    tensors, weight_kind = {}, None
                written.append(WrittenEntry(entry, geo, tensors, weight_kind))
            elif tensors:
                expert = optimizer_state.is_expert(entry.parameter)
                self._streams[self._share(self._policy.optimizer, expert)] += [
                    ReplicatedTensor(geo, kind, tensor) for kind, tensor in tensors.items()
                ]
        return written

    def add_whole_weights(self, optimizer: Any) -> None:
        """Add the weights that every replica holds completely to the streams.

        The optimizer's entries do not include parameters that lie entirely in other ranks' ranges.
        `requires_grad` does not identify such parameters: they may have been frozen later.
        """
        sharded = set(map(id, optimizer_state.sharded(optimizer)))
        if sharded.issuperset(self._geometry.by_id):
            return
        for parameter, geo in self._geometry.parameters:
            if id(parameter) in sharded:
                continue
            if id(parameter) in self._geometry.quantized:
                raise UnsupportedError(
                    f"{geo.name}: an FP8 or FP4 weight without a master in a DistributedOptimizer "
                    "cannot be saved; train it and save the optimizer, or start without "
                    "--fp8-param-gather and --fp4-param-gather"
                )
            if geo.is_saved:
                expert = optimizer_state.is_expert(parameter)
                weight = ReplicatedTensor(geo, geo.saved_kind(WEIGHT), parameter)
                self._streams[self._share(self._policy.weight, expert)].append(weight)

    def shares(self) -> list[LocalPiece]:
        """Return this rank's shares of all streams."""
        pieces: list[LocalPiece] = []
        for share, stream in self._streams.items():
            pieces += _share_out(stream, share.writers, share.position)
        return pieces


def _outside_model(entry: OptimizerEntry) -> UnsupportedError:
    return UnsupportedError(
        "the optimizer steps a parameter of shape "
        f"{tuple(entry.parameter.shape)} that is in no model chunk; give "
        "save_checkpoint and load_checkpoint the whole model, or keep Megatron's "
        "own checkpointing for this job"
    )


def own_pieces(written: WrittenEntry) -> list[LocalPiece]:
    """Return the pieces of this rank's part of a parameter: the weight, then the states."""
    entry, geo, kinds, weight_kind = written
    pieces: list[LocalPiece] = []
    if weight_kind is not None:
        weight = section(flat(entry.parameter), entry.start, entry.end)
        if entry.stale_weight:
            weight = entry.owned.to(weight.dtype)
        pieces += cut(geo, weight_kind, weight, entry.start, entry.end)
    for kind, tensor in kinds.items():
        pieces += cut(geo, kind, tensor, entry.start, entry.end)
    return pieces


#: Cached shares of the streams; the sizes of their tensors seldom change between saves.
_equal_shares = functools.lru_cache(maxsize=8)(equal_shares)


def _share_out(stream: list[ReplicatedTensor], count: int, index: int) -> list[LocalPiece]:
    if count == 0:
        return []
    pieces: list[LocalPiece] = []
    if count == 1:
        for entry in stream:
            pieces += cut(entry.geometry, entry.kind, entry.tensor, 0, entry.tensor.numel())
        return pieces
    sizes = tuple(
        (entry.tensor.numel(), itemsize(dtype_name(entry.tensor.dtype))) for entry in stream
    )
    for entry, (start, end) in zip(stream, _equal_shares(sizes, count, index), strict=True):
        if start < end:
            part = section(flat(entry.tensor), start, end)
            pieces += cut(entry.geometry, entry.kind, part, start, end)
    return pieces
