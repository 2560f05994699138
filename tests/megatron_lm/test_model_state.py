"""Pieces of local tensors: views wherever that is possible, and none made twice."""

from __future__ import annotations

import torch

from megatron_flashckpt.megatron_lm.model_state import LocalPiece, _cut
from megatron_flashckpt.megatron_lm.runs import Geometry, Run


def halves() -> Geometry:
    """Two boxes in one local tensor of 4 x 6, as SwiGLU has them."""
    runs = tuple(Run("fc1", (4, 6), (2 * n, 0), (2, 6), 0, 12 * n, 12) for n in (0, 1))
    return Geometry("fc1.weight", runs, main=True, replica=0, resizable=False)


def storages(pieces: list[LocalPiece]) -> set[int]:
    return {local.tensor.untyped_storage().data_ptr() for local in pieces}


def test_pieces_are_views_without_gradients() -> None:
    parameter = torch.nn.Parameter(torch.arange(24.0).view(4, 6))
    pieces = _cut(halves(), "weight", parameter, 0, 24)
    assert [local.tensor.tolist() for local in pieces] == [
        list(map(float, range(12))),
        list(map(float, range(12, 24))),
    ]
    assert storages(pieces) == {parameter.untyped_storage().data_ptr()}
    assert not any(local.tensor.requires_grad for local in pieces)


def test_a_range_within_one_box_is_one_piece() -> None:
    flat = torch.arange(24.0)
    (only,) = _cut(halves(), "master", flat[13:20], 13, 20)
    assert (only.piece.start, only.piece.end, only.piece.offset) == (1, 8, (2, 0))
    assert torch.equal(only.tensor, flat[13:20])


def test_a_tensor_that_is_not_contiguous_is_copied_once_for_all_its_pieces() -> None:
    transposed = torch.arange(24.0).view(6, 4).t()
    pieces = _cut(halves(), "weight", transposed, 0, 24)
    assert len(storages(pieces)) == 1
    assert torch.equal(torch.cat([local.tensor for local in pieces]), transposed.reshape(-1))


def test_another_save_has_the_same_pieces_and_other_tensors() -> None:
    geometry = halves()
    before = _cut(geometry, "weight", torch.zeros(4, 6), 0, 24)
    after = _cut(geometry, "weight", torch.ones(4, 6), 0, 24)
    assert all(a.piece is b.piece for a, b in zip(before, after, strict=True))
    assert [float(local.tensor.sum()) for local in after] == [12.0, 12.0]
    (other, _) = _cut(geometry, "weight", torch.ones(4, 6, dtype=torch.bfloat16), 0, 24)
    assert (other.piece.dtype, after[0].piece.dtype) == ("BF16", "F32")
