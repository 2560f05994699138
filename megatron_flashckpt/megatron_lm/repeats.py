"""Enumerates the same tensors again, in a fraction of the time of the first enumeration.

From one save to the next nearly always the same tensors have other values. Which piece each of
them is, is kept; the tensors are taken from the optimizer's tables in every save. A few calls that
go through whole lists compare the tables and the tensors with what the pieces were made for. If
anything differs, the caller enumerates one tensor after another, as for the first save.

Nothing here keeps a tensor alive: tensors are known by weak references.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterable, Set
from typing import Any, NamedTuple

import torch

from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.megatron_lm import optimizer_state
from megatron_flashckpt.megatron_lm.cpu_offload import is_offloading
from megatron_flashckpt.megatron_lm.cutting import LocalPiece
from megatron_flashckpt.megatron_lm.optimizer_state import OptimizerEntry
from megatron_flashckpt.megatron_lm.tensor_geometry import Geometry

_dtype_of = operator.attrgetter("dtype")
_requires_grad = operator.attrgetter("requires_grad")


class Written(NamedTuple):
    """What one entry of an optimizer has come to in the enumeration that is to be repeated."""

    entry: OptimizerEntry
    geometry: Geometry
    kinds: dict[str, torch.Tensor]
    """Kinds of the pieces, and the tensors that they are cut from, without the weight."""
    weight_kind: str | None
    """Kind of the pieces of the weight; None: it is not written."""

    @property
    def is_written(self) -> bool:
        return bool(self.kinds) or self.weight_kind is not None


class Repeat:
    """The pieces of one DistributedOptimizer. See `of`."""

    def __init__(self, derived: Set[int], written: list[Written]) -> None:
        self._derived = frozenset(derived)
        self._parameters = [id(it.entry.parameter) for it in written]
        self._owned = [weakref.ref(it.entry.owned) for it in written]
        self._owned_numels = [it.entry.end - it.entry.start for it in written]
        states = [_state_of(it) for it in written]
        self._names = list(itertools.chain.from_iterable(states))
        self._counts = list(map(len, states))
        used = {id(tensor) for it in written for tensor in it.kinds.values()}
        owned = [it.entry.owned for it in written]
        values = [value for state in states for value in state.values()]
        self._is_owned_used = [id(tensor) in used for tensor in owned]
        self._is_used = [id(value) in used for value in values]
        self._is_number = [
            it.is_written and id(value) not in used
            for it, state in zip(written, states, strict=True)
            for value in state.values()
        ]
        self._numbers = _kinds_of_numbers(itertools.compress(values, self._is_number))
        tensors = self._tensors(owned, values)
        self._known = [weakref.ref(tensor) for tensor in tensors]
        self._forms = _forms(tensors)
        self._weights = [
            (number, it.entry.start, it.entry.end)
            for number, it in enumerate(written)
            if it.weight_kind is not None
        ]
        self._arrange(written, tensors)

    @classmethod
    def of(cls, sub: Any, derived: Set[int], written: list[Written]) -> Repeat | None:
        """Return how to enumerate `sub` again; None if it must be done one by one.

        Args:
            derived: ids of the parameters whose weights are not written.
            written: all entries of `sub`, in order.
        """
        if not _can_repeat(sub) or any(it.entry.stale_weight for it in written):
            return None
        used = [tensor for it in written for tensor in it.kinds.values()]
        is_plain = (
            all(tensor.dim() == 1 and not tensor.requires_grad for tensor in used)
            and len({id(tensor) for tensor in used}) == len(used)
            and all(
                type(it.entry.parameter) is torch.nn.Parameter
                for it in written
                if it.weight_kind is not None
            )
        )
        return cls(derived, written) if is_plain else None

    def pieces(self, sub: Any, derived: Set[int]) -> list[LocalPiece] | None:
        """Return what `sub` is to write now; None if anything but values has changed."""
        if not _can_repeat(sub) or optimizer_state.weights_lag(sub) or derived != self._derived:
            return None
        table = list(optimizer_state.shards(sub))
        parameters = [parameter for parameter, _, _ in table]
        owned = [shard for _, shard, _ in table]
        if (
            list(map(id, parameters)) != self._parameters
            or not _are(owned, self._owned)
            or list(map(torch.Tensor.numel, owned)) != self._owned_numels
        ):
            return None
        state_of = sub.optimizer.state.get
        states = [state_of(shard, _NO_STATE) for shard in owned]
        if (
            list(map(len, states)) != self._counts
            or list(itertools.chain.from_iterable(states)) != self._names
        ):
            return None
        values = list(itertools.chain.from_iterable(map(dict.values, states)))
        tensors = self._tensors(owned, values)
        numbers = itertools.compress(values, self._is_number)
        if (
            not _are(tensors, self._known)
            or _forms(tensors) != self._forms
            or _kinds_of_numbers(numbers) != self._numbers
        ):
            return None
        weights = _weights(parameters, self._weights)
        return None if weights is None else self._arranged([*weights, *tensors])

    def _tensors(self, owned: list[torch.Tensor], values: list[Any]) -> list[torch.Tensor]:
        """Return the tensors that pieces are cut from, without the weights."""
        states = itertools.compress(values, self._is_used)
        return [*itertools.compress(owned, self._is_owned_used), *states]

    def _arrange(self, written: list[Written], tensors: list[torch.Tensor]) -> None:
        """Note the pieces, in the order of an enumeration one by one, and where each lies."""
        positions = {id(tensor): n for n, tensor in enumerate(tensors, len(self._weights))}
        weight = itertools.count()
        self._sections: list[tuple[int, int, int]] = []
        self._pieces: list[Piece] = []
        self._sources: list[int] = []
        self._resizable: list[bool] = []
        self._copies: list[str] = []
        first_section = len(self._weights) + len(tensors)
        for entry, geometry, kinds, weight_kind in written:
            sources: list[tuple[str, int, torch.Tensor]] = []
            if weight_kind is not None:
                sources.append((weight_kind, next(weight), entry.parameter))
            sources += [(kind, positions[id(it)], it) for kind, it in kinds.items()]
            for kind, source, tensor in sources:
                for part in geometry.parts(kind, tensor.dtype, entry.start, entry.end):
                    low, high = part.start - entry.start, part.end - entry.start
                    if high - low == entry.end - entry.start:
                        self._sources.append(source)
                    else:
                        self._sources.append(first_section + len(self._sections))
                        self._sections.append((source, low, high))
                    self._pieces.append(part.piece)
                    self._resizable.append(geometry.resizable)
                    self._copies.append(geometry.copy)

    def _arranged(self, tensors: list[torch.Tensor]) -> list[LocalPiece]:
        """Return the pieces of `tensors`: all weights, then what `_tensors` returns."""
        tensors += [tensors[source][low:high] for source, low, high in self._sections]
        of_pieces = map(tensors.__getitem__, self._sources)
        early = itertools.repeat(False)
        return list(map(LocalPiece, self._pieces, of_pieces, early, self._resizable, self._copies))


#: State of a tensor that the optimizer has not stepped yet.
_NO_STATE: dict[str, Any] = {}


def _state_of(written: Written) -> dict[str, Any]:
    found: dict[str, Any] = written.entry.inner.state.get(written.entry.owned, _NO_STATE)
    return found


def _can_repeat(sub: Any) -> bool:
    """Return whether the tables of `sub` say which tensors it has."""
    return isinstance(sub, optimizer_state.DistributedOptimizer) and not is_offloading(
        sub.optimizer
    )


def _kinds_of_numbers(values: Iterable[Any]) -> list[Any]:
    """Return what must be unchanged of what an optimizer keeps beside states: steps, or nothing."""
    return [value.numel() if isinstance(value, torch.Tensor) else value for value in values]


def _are(tensors: list[torch.Tensor], known: list[weakref.ref[torch.Tensor]]) -> bool:
    alive = [ref() for ref in known]
    # An optimizer may keep None in the place of a tensor, and a dead reference returns None, too.
    is_same = len(tensors) == len(alive) and all(map(operator.is_, tensors, alive))
    return is_same and all(map(torch.is_tensor, alive))


def _forms(tensors: list[torch.Tensor]) -> tuple[list[Any], ...]:
    """Return what must be unchanged for tensors to be flat and to be the same pieces."""
    return (
        list(map(_dtype_of, tensors)),
        list(map(torch.Tensor.numel, tensors)),
        list(map(torch.Tensor.dim, tensors)),
        list(map(_requires_grad, tensors)),
    )


def _weights(
    parameters: list[torch.nn.Parameter], wanted: Iterable[tuple[int, int, int]]
) -> list[torch.Tensor] | None:
    """Return the owned elements of the parameters; None if these are no stretch of memory."""
    found = []
    for number, start, end in wanted:
        content = parameters[number].data  # without gradients, at a quarter of what `detach` takes
        if not content.is_contiguous():
            return None
        # One call, where a flattening and a section of it are two.
        found.append(content.as_strided((end - start,), (1,), content.storage_offset() + start))
    return found
