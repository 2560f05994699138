"""The pieces of this rank's model and optimizer that a save writes.

Tensors are enumerated afresh on every call; only geometry, which is checked against the model's
parameters each time, is kept. A cached tensor pointer is how other systems wrote stale checkpoints.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from megatron_flashckpt.config import Replicated, ShareOut, Weights
from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.layout.copies import copy_kind
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import (
    BUFFER,
    WEIGHT,
    Shape,
    equal_shares,
    spread_over_nodes,
)
from megatron_flashckpt.megatron_lm import optimizer_state, parallel
from megatron_flashckpt.megatron_lm.cutting import (
    LocalPiece,
    cut,
    flat,
    section,
)
from megatron_flashckpt.megatron_lm.model_geometry import ModelGeometry, model_geometry, signature
from megatron_flashckpt.megatron_lm.optimizer_state import OptimizerEntry
from megatron_flashckpt.megatron_lm.repeats import Repeat, Written
from megatron_flashckpt.megatron_lm.tensor_geometry import Geometry
from megatron_flashckpt.megatron_lm.torch_dtypes import SIXTEEN_BIT, dtype_name


class _Replicated(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A tensor that several replicas hold alike; one entry of the stream that they share out."""

    geometry: Geometry
    kind: str
    tensor: torch.Tensor
    """Or the parameter itself."""


class _Share(NamedTuple):
    """This rank's part of a stream of replicated tensors."""

    writers: int
    """Number of writers; 0: this rank is none of them."""
    position: int
    """Place of this rank among them."""
    stream: Hashable
    """Tells apart streams that have other writers, equally many."""


class ModelState:
    """Enumerates the state of one job's model and optimizer on this rank."""

    def __init__(self, replicated: Replicated, weights: Weights = "store") -> None:
        self._replicated = replicated
        self.derives_all = weights == "derive"
        """True if masters are saved in place of all 16-bit weights."""
        self._nodes: Sequence[Hashable] | None = None
        self.quantized_keys: frozenset[str] = frozenset()
        """What `note_quantized` was told."""
        self.copied_keys: frozenset[str] = frozenset()
        """Keys of the tensors of which other ranks may have copies."""
        self.differing_keys: frozenset[str] = frozenset()
        """Keys of the tensors whose copies are known to differ: each copy is saved."""
        self._geometry: ModelGeometry | None = None

    def geometry(self, chunks: list[Any]) -> ModelGeometry:
        """Return the geometry of the unwrapped `chunks`, recomputed if anything about them changed.

        Called by every rank on its own; no communication.
        """
        if self._geometry is None or self._geometry.signature != signature(chunks):
            self._geometry = model_geometry(chunks)
        return self._geometry

    def note_quantized(self, keys: Iterable[str]) -> None:
        """Note under which keys any rank has FP8 or FP4 parameters.

        Layers share a key, and some of them may be plain (`--first-last-layers-bf16`). A global
        tensor is saved either as weights or as masters, so masters are saved for all of its layers.

        Args:
            keys: of all ranks.
        """
        self.quantized_keys = frozenset(keys)

    @property
    def lacks_nodes(self) -> bool:
        """True if writers are to be chosen by nodes that were not noted yet."""
        policies = (self._replicated.weight, self._replicated.optimizer)
        return self._nodes is None and any(isinstance(policy, int) for policy in policies)

    def note_nodes(self, nodes: Sequence[Hashable]) -> None:
        """Note the node of every rank, between two saves, on all ranks.

        Until then every rank counts as a node, because ranks must not choose different writers.
        """
        self._nodes = nodes

    def _share(self, policy: ShareOut, expert: bool) -> _Share:
        """Return this rank's part of the state that replicas of such parameters hold alike."""
        count, index = parallel.expert_data_parallel() if expert else parallel.data_parallel()
        if policy == "share":
            return _Share(count, index, policy)
        if policy == "first":
            return _Share(1 if index == 0 else 0, 0, policy)
        ranks = parallel.replica_ranks(expert=expert)
        nodes = ranks if self._nodes is None else [self._nodes[rank] for rank in ranks]
        writers = spread_over_nodes(nodes, policy, turn=min(ranks))
        if index not in writers:
            return _Share(0, 0, policy)
        return _Share(len(writers), writers.index(index), (policy, expert))

    def derives_key(self, geometry: ModelGeometry, key: str) -> bool:
        """Return whether masters are saved in place of the 16-bit weights under `key`."""
        keys = (self.quantized_keys, geometry.quantized_keys)
        return self.derives_all or any(key in of for of in keys)

    @torch.no_grad()
    def owned(
        self,
        geometry: ModelGeometry,
        chunks: list[Any],
        optimizer: Any,
        tensors_of: Callable[[OptimizerEntry], dict[str, torch.Tensor]] = OptimizerEntry.tensors,
    ) -> list[LocalPiece]:
        """Return what this rank writes. Over all ranks every element comes exactly once.

        With the distributed optimizer a rank writes the weights whose masters it owns: those are
        up to date on it even while an overlapped all-gather has not refreshed the others.

        Copies that are known to differ come as well, each exactly once, under kinds of their own.

        Args:
            geometry: that of `chunks`, asked for in this save.
            tensors_of: returns what the optimizer has beside the weight, by kind.
        """
        # What is not there yet is no tensor of the optimizer.
        repeats = tensors_of is OptimizerEntry.tensors
        found = self._written(
            geometry, chunks, optimizer, tensors_of, lambda geo: geo.main, repeats=repeats
        )
        return found + self.copies(geometry, chunks, optimizer, self.differing_keys, tensors_of)

    @torch.no_grad()
    def copies(
        self,
        geometry: ModelGeometry,
        chunks: list[Any],
        optimizer: Any,
        keys: frozenset[str],
        tensors_of: Callable[[OptimizerEntry], dict[str, torch.Tensor]] = OptimizerEntry.tensors,
    ) -> list[LocalPiece]:
        """Return this rank's part of the copies of tensors, as `owned` does of the main ones.

        Args:
            keys: those of the tensors.
        """
        if keys.isdisjoint(geometry.copied_keys):
            return []

        def is_one(geo: Geometry) -> bool:
            return bool(geo.copy) and any(run.key in keys for run in geo.runs)

        return self._written(geometry, chunks, optimizer, tensors_of, is_one)

    def differing_here(self, chunks: list[Any]) -> tuple[str, ...]:
        """Return the keys of which this rank has a copy that is known to differ.

        Under another tensor parallel size there may be none, though the job began with such copies.
        """
        if not self.differing_keys:
            return ()
        return tuple(sorted(self.differing_keys & self.geometry(chunks).copied_keys))

    def _written(
        self,
        geometry: ModelGeometry,
        chunks: list[Any],
        optimizer: Any,
        tensors_of: Callable[[OptimizerEntry], dict[str, torch.Tensor]],
        is_written: Callable[[Geometry], bool],
        *,
        repeats: bool = False,
    ) -> list[LocalPiece]:
        """Return what this rank writes of the local tensors that `is_written` picks.

        Args:
            repeats: every call so marked picks the same ones, so one may repeat what another did.
        """
        by_id: dict[int, Geometry] = {}
        found: list[LocalPiece] = []
        shared: dict[_Share, list[_Replicated]] = defaultdict(list)
        derived = self.derived(geometry, optimizer)
        share = functools.cache(self._share)  # Megatron takes its time to say
        for sub, dealt in optimizer_state.parts(optimizer):
            known = geometry.repeats.get(sub) if repeats else None
            repeated = None if known is None else known.pieces(sub, derived)
            if repeated is not None:
                found += repeated
                continue
            if not by_id:
                by_id = {id(parameter): geo for parameter, geo in geometry.parameters}
            written: list[Written] = []
            for entry in optimizer_state.entries_of(sub, dealt=dealt):
                geo = by_id.get(id(entry.parameter))
                if geo is None:
                    raise UnsupportedError(
                        "the optimizer steps a parameter of shape "
                        f"{tuple(entry.parameter.shape)} that is in no model chunk; give "
                        "save_checkpoint and load_checkpoint the whole model, or keep Megatron's "
                        "own checkpointing for this job"
                    )
                tensors = tensors_of(entry)
                if not is_written(geo):
                    tensors = {}
                tensors = {copy_kind(kind, geo.copy): tensor for kind, tensor in tensors.items()}
                if entry.sharded:
                    has_weight = is_written(geo) and id(entry.parameter) not in derived
                    weight_kind = copy_kind(WEIGHT, geo.copy) if has_weight else None
                    if not entry.main:  # another instance writes it; noted for the next save
                        tensors, weight_kind = {}, None
                    written.append(Written(entry, geo, tensors, weight_kind))
                elif tensors:
                    expert = optimizer_state.is_expert(entry.parameter)
                    shared[share(self._replicated.optimizer, expert)] += [
                        _Replicated(geo, kind, tensor) for kind, tensor in tensors.items()
                    ]
            for each in written:
                found += _owned_pieces(each)
            if repeats and (repeat := Repeat.of(sub, derived, written)) is not None:
                geometry.repeats[sub] = repeat
        # No entry tells of parameters that lie wholly in other ranks' ranges. Whether they want
        # gradients says nothing either: they may have been frozen since.
        sharded = {id(parameter) for parameter in optimizer_state.sharded(optimizer)}
        for parameter, geo in geometry.parameters:
            if id(parameter) in sharded:
                continue
            if id(parameter) in geometry.quantized:
                raise UnsupportedError(
                    f"{geo.name}: an FP8 or FP4 weight without a master in a DistributedOptimizer "
                    "cannot be saved; train it and save the optimizer, or start without "
                    "--fp8-param-gather and --fp4-param-gather"
                )
            if is_written(geo):
                expert = optimizer_state.is_expert(parameter)
                whole = _Replicated(geo, copy_kind(WEIGHT, geo.copy), parameter)
                shared[share(self._replicated.weight, expert)].append(whole)
        for part, stream in shared.items():
            found += _share_out(stream, part.writers, part.position)
        for geo, tensor in geometry.buffer_tensors(chunks):
            if is_written(geo) and geo.replica == 0:
                kind = copy_kind(BUFFER, geo.copy)
                found += cut(geo, kind, tensor, 0, tensor.numel(), early=True)
        return found

    def derived(self, geometry: ModelGeometry, optimizer: Any) -> set[int]:
        """Return the ids of the parameters that are saved as masters only.

        The ids are of the same parameters on every replica, wherever their masters are.
        """
        derivable = self.derivable(geometry)
        if not derivable:
            return derivable
        return derivable & {id(parameter) for parameter in optimizer_state.sharded(optimizer)}

    def derivable(self, geometry: ModelGeometry) -> set[int]:
        """Return the ids of the parameters that are saved as masters only, if they have masters.

        With `weights: derive` these are all 16-bit parameters, else the FP8 and FP4 ones and those
        that share a key with them.
        """
        if not (self.derives_all or self.quantized_keys or geometry.quantized):
            return set()
        return {
            id(parameter)
            for parameter, geo in geometry.parameters
            if parameter.dtype in SIXTEEN_BIT
            and any(self.derives_key(geometry, run.key) for run in geo.runs)
        }

    def stands_for(self, chunks: list[Any]) -> list[tuple[str, str, Shape]]:
        """Return kind, key and global shape of the tensors that begin on this rank.

        Megatron's own numbering of replicas says so, which `owned` does not go by: that other
        ranks write the tensor makes no difference.
        """
        geometry = self.geometry(chunks)
        described = [(WEIGHT, geo) for _, geo in geometry.parameters]
        described += [(BUFFER, geo) for _, _, geo in geometry.buffers]
        return [
            (kind, run.key, run.global_shape)
            for kind, geo in described
            if geo.main and geo.replica == 0
            for run in geo.runs
            if run.box_start == 0 and not any(run.offset)
        ]


def _owned_pieces(written: Written) -> list[LocalPiece]:
    """Return what this rank's part of a parameter comes to: its weight, then its states."""
    entry, geo, kinds, weight_kind = written
    found: list[LocalPiece] = []
    if weight_kind is not None:
        weight = section(flat(entry.parameter), entry.start, entry.end)
        if entry.stale_weight:
            weight = entry.owned.to(weight.dtype)
        found += cut(geo, weight_kind, weight, entry.start, entry.end)
    for kind, tensor in kinds.items():
        found += cut(geo, kind, tensor, entry.start, entry.end)
    return found


#: One share for each kind of stream; the geometry that it follows from seldom changes.
_equal_shares = functools.lru_cache(maxsize=8)(equal_shares)


def _share_out(stream: list[_Replicated], count: int, index: int) -> list[LocalPiece]:
    if count == 0:
        return []
    found: list[LocalPiece] = []
    if count == 1:
        for it in stream:
            found += cut(it.geometry, it.kind, it.tensor, 0, it.tensor.numel())
        return found
    sizes = tuple((it.tensor.numel(), itemsize(dtype_name(it.tensor.dtype))) for it in stream)
    for it, (start, end) in zip(stream, _equal_shares(sizes, count, index), strict=True):
        if start < end:
            part = section(flat(it.tensor), start, end)
            found += cut(it.geometry, it.kind, part, start, end)
    return found
