"""Pieces of this rank's model and optimizer that a load fills, enumerated anew for each load.

`ModelState` enumerates the pieces that a save writes. A rank fills more pieces than it writes,
because replicas divide the writing among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_flashckpt.layout.piece import BUFFER, MASTER, WEIGHT, Piece
from megatron_flashckpt.megatron_lm import optimizer_state
from megatron_flashckpt.megatron_lm.cutting import LocalPiece, refuse_shared_elements, to_fill
from megatron_flashckpt.megatron_lm.model_geometry import ModelGeometry


def load_pieces(
    geometry: ModelGeometry,
    chunks: list[Any],
    optimizer: Any,
    state_types: Mapping[str, Mapping[str, torch.dtype]],
    dtype_of: Callable[[str, list[Piece]], torch.dtype | None] = lambda kind, pieces: None,
) -> list[LocalPiece]:
    """Return all pieces that a load must fill on this rank, duplicates included.

    FP8 and FP4 weights are excluded: `quantized` makes them from their masters. Allocates
    missing optimizer state, which a save must not do.

    Args:
        geometry: geometry of `chunks`.
        optimizer: if None, only weights and buffers are filled.
        state_types: element types by optimizer family and kind (see the function `state_types`).
        dtype_of: returns the stored type of a kind of state for given pieces, or None; parameters
            of one family may have states of several types.
    """
    pieces: list[LocalPiece] = []
    for entry in optimizer_state.entries(optimizer):
        geo = geometry.by_id[id(entry.parameter)]
        masters = [
            local.piece for local in geo.parts(MASTER, torch.float32, entry.start, entry.end)
        ]
        kinds = {
            kind: dtype_of(kind, masters) or dtype
            for kind, dtype in state_types.get(entry.family, {}).items()
        }
        for kind, tensor in optimizer_state.allocate(entry, kinds).items():
            pieces += to_fill(geo, kind, tensor, entry.start, entry.end)
    for parameter, geo in geometry.parameters:
        if id(parameter) not in geometry.quantized:
            pieces += to_fill(geo, WEIGHT, parameter.data, 0, parameter.numel())
    for geo, tensor in geometry.buffer_tensors(chunks):
        pieces += to_fill(geo, BUFFER, tensor, 0, tensor.numel())
    return pieces


def state_types(
    geometry: ModelGeometry, optimizer: Any, stored: Mapping[str, Mapping[str, torch.dtype]]
) -> dict[str, dict[str, torch.dtype]]:
    """Return the types of the stored states, by optimizer family and kind.

    Families keep different states: Muon has a momentum, Adam two moments.

    Args:
        stored: types of the states in the checkpoint, by key and kind.
    """
    types: dict[str, dict[str, torch.dtype]] = defaultdict(dict)
    for entry in optimizer_state.entries(optimizer):
        for run in geometry.by_id[id(entry.parameter)].runs:
            types[entry.family].update(stored.get(run.key, {}))
    return dict(types)


def refuse_unfillable(geometry: ModelGeometry, chunks: list[Any], optimizer: Any) -> None:
    """Raise if a load cannot fill a tensor because elements of the tensor share memory.

    Raises:
        UnsupportedError: names the tensor.
    """
    for entry in optimizer_state.entries(optimizer):
        refuse_shared_elements(geometry.by_id[id(entry.parameter)].name, entry.owned)
    for parameter, geo in geometry.parameters:
        refuse_shared_elements(geo.name, parameter)
    for geo, tensor in geometry.buffer_tensors(chunks):
        refuse_shared_elements(geo.name, tensor)
