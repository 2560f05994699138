"""Pieces of this rank's model and optimizer that a save writes.

Every call enumerates the tensors anew. Only the geometry is cached, and every call compares it with
the model's parameters. Other systems wrote stale checkpoints because they cached tensor pointers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from megatron_flashckpt.config import Replicated, ShareOut, Weights
from megatron_flashckpt.layout.piece import BUFFER, WEIGHT, Shape, spread_over_nodes
from megatron_flashckpt.megatron_lm import optimizer_state, parallel
from megatron_flashckpt.megatron_lm.cutting import cut
from megatron_flashckpt.megatron_lm.enumeration import Enumeration
from megatron_flashckpt.megatron_lm.model_geometry import ModelGeometry, model_geometry, signature
from megatron_flashckpt.megatron_lm.optimizer_state import OptimizerEntry
from megatron_flashckpt.megatron_lm.repeat import Repeat
from megatron_flashckpt.megatron_lm.torch_dtypes import SIXTEEN_BIT
from megatron_flashckpt.megatron_lm.written_pieces import PieceCollector, Share, own_pieces


class ModelState:
    """Enumerates the state of one job's model and optimizer on this rank."""

    def __init__(self, replicated: Replicated, weights: Weights = "store") -> None:
        self._replicated = replicated
        self.derives_all = weights == "derive"
        """True if masters are saved in place of 16-bit weights, except under `frozen_keys`."""
        self._nodes: Sequence[Hashable] | None = None
        self.quantized_keys: frozenset[str] = frozenset()
        """Keys under which any rank has FP8 or FP4 parameters (`note_keys`)."""
        self.frozen_keys: frozenset[str] = frozenset()
        """Keys under which any rank has frozen parameters, with `derives_all` (`note_keys`)."""
        self._geometry: ModelGeometry | None = None

    def geometry(self, chunks: list[Any]) -> ModelGeometry:
        """Return the geometry of the unwrapped `chunks`, recomputed if their tensors changed.

        No communication.
        """
        if self._geometry is None or self._geometry.signature != signature(chunks):
            self._geometry = model_geometry(chunks)
        return self._geometry

    def own_keys(self, geometry: ModelGeometry) -> tuple[frozenset[str], frozenset[str]]:
        """Return this rank's keys of quantized and of frozen parameters, for `note_keys`."""
        return geometry.quantized_keys, geometry.frozen_keys if self.derives_all else frozenset()

    def note_keys(self, quantized: Iterable[str], frozen: Iterable[str] = ()) -> None:
        """Store the keys of all ranks that decide which tensors are saved as masters.

        Layers share a key, and a global tensor is saved either as weights or as masters. If some
        layers are FP8 or FP4 and others plain (`--first-last-layers-bf16`), masters are saved for
        all of them. If some are frozen, which have no masters, weights are saved for all of them.

        Args:
            quantized: the keys under which any rank has FP8 or FP4 parameters.
            frozen: the keys under which any rank has frozen parameters, with `derives_all`.
        """
        self.quantized_keys, self.frozen_keys = frozenset(quantized), frozenset(frozen)

    @property
    def needs_nodes(self) -> bool:
        """True if the choice of writers depends on nodes and `note_nodes` was not called yet."""
        policies = (self._replicated.weight, self._replicated.optimizer)
        return self._nodes is None and any(isinstance(policy, int) for policy in policies)

    def note_nodes(self, nodes: Sequence[Hashable]) -> None:
        """Store the node of every rank; called on all ranks, between two saves.

        Before this call every rank counts as a node, so that all ranks choose the same writers.
        """
        self._nodes = nodes

    def _share(self, policy: ShareOut, expert: bool) -> Share:
        """Return this rank's share of the state that is equal on all replicas.

        Args:
            expert: whether the state belongs to expert parameters.
        """
        count, index = parallel.expert_data_parallel() if expert else parallel.data_parallel()
        if policy == "share":
            return Share(count, index, policy)
        if policy == "first":
            return Share(1 if index == 0 else 0, 0, policy)
        ranks = parallel.replica_ranks(expert=expert)
        nodes = ranks if self._nodes is None else [self._nodes[rank] for rank in ranks]
        writers = spread_over_nodes(nodes, policy, turn=min(ranks))
        if index not in writers:
            return Share(0, 0, policy)
        return Share(len(writers), writers.index(index), (policy, expert))

    def derives_key(self, geometry: ModelGeometry, key: str) -> bool:
        """Return whether masters are saved in place of the 16-bit weights under `key`."""
        if key in self.quantized_keys or key in geometry.quantized_keys:
            return True
        return self.derives_all and not (key in self.frozen_keys or key in geometry.frozen_keys)

    @torch.no_grad()
    def owned(
        self,
        geometry: ModelGeometry,
        chunks: list[Any],
        optimizer: Any,
        tensors_of: Callable[[OptimizerEntry], dict[str, torch.Tensor]] = OptimizerEntry.tensors,
    ) -> Enumeration:
        """Return the pieces that this rank writes. All ranks together write every copy once.

        With the distributed optimizer a rank writes the weights whose masters it owns. These are
        up to date on this rank, even while an overlapped all-gather refreshes the other weights.

        Args:
            geometry: geometry of `chunks`, requested in this save.
            tensors_of: returns the optimizer's tensors other than the weight, by kind.
        """
        # An estimate adds tensors that the optimizer does not have yet; `Repeat` cannot find these.
        repeats = tensors_of is OptimizerEntry.tensors
        derived = self.derived(geometry, optimizer)
        collector = PieceCollector(self._replicated, self._share, geometry, derived, tensors_of)
        owned = Enumeration()
        for sub, assigned in optimizer_state.parts(optimizer):
            known = geometry.repeats.get(sub) if repeats else None
            if known is not None and (tensors := known.tensors(sub, derived)) is not None:
                owned.add_block(known.sections, tensors)
                continue
            written = collector.own_parts(optimizer_state.entries_of(sub, assigned=assigned))
            owned.add([local for part in written for local in own_pieces(part)])
            if repeats and (repeat := Repeat.of(sub, derived, written)) is not None:
                geometry.repeats[sub] = repeat
        collector.add_whole_weights(optimizer)
        pieces = collector.shares()
        for geo, tensor in geometry.buffer_tensors(chunks):
            if geo.is_saved and geo.replica == 0:
                kind = geo.saved_kind(BUFFER)
                pieces += cut(geo, kind, tensor, 0, tensor.numel(), early=True)
        owned.add(pieces)
        return owned

    def derived(self, geometry: ModelGeometry, optimizer: Any) -> set[int]:
        """Return the ids of the parameters that are saved as masters only.

        Every replica returns the same parameters, independent of the location of their masters.
        """
        derivable = self.derivable(geometry)
        if not derivable:
            return derivable
        return derivable & {id(parameter) for parameter in optimizer_state.sharded(optimizer)}

    def derivable(self, geometry: ModelGeometry) -> set[int]:
        """Return the ids of the parameters that are saved as masters only, if they have masters.

        With `weights: derive` these are all 16-bit parameters under keys without frozen layers;
        otherwise the FP8 and FP4 parameters and the parameters that share a key with them.
        """
        if not (self.derives_all or self.quantized_keys or geometry.quantized):
            return set()
        return {
            id(parameter)
            for parameter, geo in geometry.parameters
            if parameter.dtype in SIXTEEN_BIT
            and any(self.derives_key(geometry, run.key) for run in geo.runs)
        }

    def tensors_starting_here(self, chunks: list[Any]) -> list[tuple[str, str, Shape]]:
        """Return kind, key and global shape of the tensors whose first element is on this rank.

        The result follows Megatron's numbering of replicas. `owned` does not use that numbering, so
        other ranks may write these tensors.
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
