"""Rules of TransformerEngine's quantized tensors that the stand-ins follow."""

from __future__ import annotations

import pytest
import torch

from tests.megatron_lm.quantized_double import BLOCK, BlockDouble, PackedDouble, QuantizedDouble

KINDS = [QuantizedDouble, BlockDouble, PackedDouble]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> type[QuantizedDouble]:
    return request.param


def values(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 2 * BLOCK, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_the_nominal_type_differs_from_the_stored_type(kind: type[QuantizedDouble]) -> None:
    tensor = torch.nn.Parameter(kind.of(values()))
    assert type(tensor) is kind
    assert isinstance(tensor, torch.nn.Parameter)
    assert (tensor.dtype, tensor.raw.dtype) == (torch.bfloat16, torch.uint8)
    assert tensor.dequantize().sub(values()).abs().max() < 0.3, (
        "the values differ by more than a rounding error"
    )
    assert not torch.equal(tensor.dequantize(), values()), "the values were not quantized"


def test_copies_quantize_in_and_dequantize_out_and_slices_are_copies(
    kind: type[QuantizedDouble],
) -> None:
    tensor, plain = torch.nn.Parameter(kind.of(values())), torch.empty(values().shape)
    for alias in (tensor.detach(), tensor.data):
        assert type(alias) is kind
        alias.copy_(values(1))
        assert torch.equal(tensor.raw, kind.of(values(1)).raw)
        tensor.data.copy_(values())
    plain.copy_(tensor.data)
    assert torch.equal(plain, tensor.dequantize().float())
    part = tensor.data[1:3]
    assert type(part) is torch.Tensor
    part.fill_(7)
    assert torch.equal(tensor.raw, kind.of(values()).raw), "a write to a slice changed the tensor"


def test_changed_arguments_are_written_back_as_whole_tensors(
    kind: type[QuantizedDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = kind.of(values())
    tensor.add_(1)
    assert torch.equal(tensor.raw, kind.of(kind.of(values()).dequantize() + 1).raw)
    torch._foreach_copy_([tensor], [values(1)])
    assert torch.equal(tensor.raw, kind.of(values(1)).raw)
    monkeypatch.setattr(QuantizedDouble, "writes_lists_back", False)
    torch._foreach_copy_([tensor], [values(2)])
    assert torch.equal(tensor.raw, kind.of(values(1)).raw), (
        "a release before 2025 wrote the list back"
    )


def test_casts_return_plain_tensors_but_expand_as_stays_quantized(
    kind: type[QuantizedDouble],
) -> None:
    tensor = torch.nn.Parameter(kind.of(values()))
    for cast in (tensor.float(), tensor.bfloat16(), tensor.half(), tensor.cpu()):
        assert type(cast) is torch.Tensor
    node = tensor.expand_as(tensor).grad_fn
    assert node is not None
    assert node.next_functions[0][0].variable is tensor


def test_fp4_packs_two_values_into_a_byte_and_only_one_scale_allows_flat_views() -> None:
    tensor = PackedDouble.of(values())
    assert (tensor.shape, tensor.raw.shape) == ((4, 2 * BLOCK), (4, BLOCK))
    tensor._rowwise_data = moved = tensor.raw.clone()
    assert tensor.detach().raw is moved
    flat = QuantizedDouble.of(values()).view(-1)
    assert flat.shape == (8 * BLOCK,)
    for kind in (BlockDouble, PackedDouble):
        tensor = kind.of(values())
        assert tensor.view(2, 2, 2 * BLOCK).shape == (2, 2, 2 * BLOCK)
        for flatten in (lambda tensor: tensor.view(-1), lambda tensor: tensor.reshape(-1)):
            with pytest.raises(ValueError, match="blocks lie in rows"):
                flatten(tensor)


@pytest.mark.parametrize("kind", [QuantizedDouble, PackedDouble])
def test_quantizing_shards_equals_quantizing_the_whole_master(
    kind: type[QuantizedDouble],
) -> None:
    master = values().float() + 0.001
    whole, cast = kind.of(master.bfloat16()), kind.of(torch.zeros(4, 64))
    cast.quantize_shard(master.view(-1), 0)
    assert torch.equal(cast.raw, whole.raw)
    assert torch.equal(cast.scale_inv, whole.scale_inv)
    cast.quantize_shard(master.view(-1)[11:20], 11)
    cast.quantize_shard(None, None)
