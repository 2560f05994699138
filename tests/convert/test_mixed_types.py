"""Conversion of layers that share a key but differ in element type."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.convert.common.contents import Contents, GlobalTensor
from megatron_flashckpt.convert.common.damage_check import masters_that_differ
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import convert, open_source
from megatron_flashckpt.convert.readers.flashckpt import open_ours
from megatron_flashckpt.convert.writers.legacy import write_legacy
from megatron_flashckpt.convert.writers.torch_dist import write_torch_dist
from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.layout.piece import UNUSED
from megatron_flashckpt.layout.reshard import Box
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.convert.made import held, save_as_ranks
from tests.convert.rebuilt import ITERATION, arguments, contents
from tests.support.checkpoints import snapshot

DISTRIBUTED = {"use_distributed_optimizer": True}
PP2 = {"pipeline_model_parallel_size": 2}
NORM = "decoder.layers.mlp.linear_fc1.layer_norm_weight"


def is_first_norm(key: str, box: Box) -> bool:
    return "layer_norm" in key and ".layers." in key and box[0][0] == 0


def with_fp32_norms(made: Contents) -> Contents:
    """Return `made` with the norms of layer 0 in fp32, which have no masters."""
    masters = {tensor.key: tensor for tensor in made.tensors if tensor.kind == "master"}
    return dataclasses.replace(
        made, tensors=[_mixed(tensor, masters.get(tensor.key)) for tensor in made.tensors]
    )


def _mixed(tensor: GlobalTensor, master: GlobalTensor | None) -> GlobalTensor:
    first = [box for box in tensor.boxes if is_first_norm(tensor.key, box)]
    if tensor.kind == "master":
        return dataclasses.replace(
            tensor, boxes=tuple(box for box in tensor.boxes if box not in first)
        )
    if tensor.kind != "weight" or not first:
        return tensor
    assert master is not None

    def read(region: Box) -> torch.Tensor:
        return (master if is_first_norm(tensor.key, region) else tensor).read(region)

    return dataclasses.replace(tensor, read=read, others=dict.fromkeys(first, torch.float32))


def boxes(made: Contents) -> dict[tuple[str, str, Box], torch.Tensor]:
    """Return the contents of every box by kind, key and place."""
    return {
        (tensor.kind, tensor.key, box): tensor.read(box)
        for tensor in made.tensors
        for box in tensor.boxes
    }


def assert_same(actual: Contents, expected: Contents) -> None:
    actual_boxes, expected_boxes = boxes(actual), boxes(expected)
    assert actual_boxes.keys() == expected_boxes.keys()
    for name, tensor in expected_boxes.items():
        assert actual_boxes[name].dtype == tensor.dtype, name
        assert torch.equal(actual_boxes[name], tensor), name
    assert actual_boxes["weight", NORM, _layer(0)].dtype == torch.float32
    assert actual_boxes["weight", NORM, _layer(1)].dtype == torch.bfloat16
    for tensor in actual.tensors:
        assert all(tensor.dtype_of(box) == tensor.read(box).dtype for box in tensor.boxes)
    assert masters_that_differ(actual) == []


def _layer(number: int) -> Box:
    return (number, 0), (1, 24)


def opened(root: Path) -> Contents:
    return open_ours(PosixStore(root), ITERATION, Options())


def test_each_layer_keeps_its_type_in_our_format_and_an_export_but_not_in_torch_dist(
    tmp_path: Path,
) -> None:
    made = with_fp32_norms(contents(arguments(**DISTRIBUTED)))
    save_as_ranks(made, tmp_path / "ranks", replicas=3)
    assert_same(opened(tmp_path / "ranks"), made)
    source = open_source(tmp_path / "ranks", ITERATION, Options())
    before = snapshot(tmp_path)
    # So does Megatron.
    message = r"has layers of several element types \(bfloat16, float32\).*flashckpt or safetensors"
    with pytest.raises(UnsupportedError, match=message):
        convert(source, tmp_path / "dist", "torch_dist", Options())
    assert snapshot(tmp_path) == before
    convert(source, tmp_path / "again", "flashckpt", Options(shard_nbytes=1000))
    assert_same(opened(tmp_path / "again"), made)
    assert verify(open_checkpoint(PosixStore(tmp_path / "again"), ITERATION)) == []
    source = open_source(tmp_path / "ranks", ITERATION, Options(weights_only=True))
    convert(source, tmp_path / "hf", "safetensors", Options())
    exported = load_file(tmp_path / "hf/model-00001-of-00001.safetensors")
    expected = boxes(made)
    for layer in range(4):
        tensor = exported[f"decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight"]
        assert tensor.dtype == (torch.bfloat16 if layer else torch.float32)
        assert torch.equal(tensor, expected["weight", NORM, _layer(layer)].reshape(-1))


def test_weights_derived_from_masters_are_merged_with_stored_weights(tmp_path: Path) -> None:
    """The setting `weights: derive` leaves out only 16-bit weights."""
    made = with_fp32_norms(contents(arguments(**DISTRIBUTED)))
    stored = []
    for tensor in made.tensors:
        if tensor.kind != "weight":
            stored.append(tensor)
        elif tensor.others:
            stored.append(
                dataclasses.replace(
                    tensor, boxes=tuple(tensor.others), dtype=torch.float32, others={}
                )
            )
    save_as_ranks(dataclasses.replace(made, tensors=stored), tmp_path, replicas=2)
    assert_same(opened(tmp_path), made)


@pytest.mark.parametrize(
    "layout",
    [{}, PP2 | DISTRIBUTED, DISTRIBUTED | {"overlap_param_gather": True}],
    ids=["plain", "two stages", "stored weights"],
)
def test_each_layer_keeps_its_type_in_the_legacy_format(tmp_path: Path, layout: dict) -> None:
    made = with_fp32_norms(contents(arguments(**layout)))
    write_legacy(made, tmp_path, Options())
    options = Options(accept_damage="overlap_param_gather" in layout)
    assert_same(open_source(tmp_path, None, options).contents, made)


def test_a_weight_that_no_forward_pass_uses_is_skipped_with_a_warning(tmp_path: Path) -> None:
    made = contents(arguments())
    key = f"output_layer.weight{UNUSED}"
    unused = held(key, "weight", torch.ones(4, 2), (((0, 0), (4, 2)),))
    more = dataclasses.replace(made, tensors=[*made.tensors, unused])
    save_as_ranks(more, tmp_path, replicas=2)
    reopened = opened(tmp_path)
    assert boxes(reopened).keys() == boxes(made).keys()
    (warning,) = reopened.warnings
    assert warning.startswith(f"{key} is not converted: no forward uses it")


@pytest.mark.parametrize("write", [write_torch_dist, write_legacy])
def test_masters_of_which_only_low_halves_are_stored_are_refused_with_the_reason(
    tmp_path: Path, write: Callable[[Contents, Path, Options], Path]
) -> None:
    """A precision-aware optimizer keeps the low halves of masters."""
    made = contents(arguments(**DISTRIBUTED))
    tensors = [
        held(tensor.key, "master_param", torch.zeros(tensor.shape, dtype=torch.int16), tensor.boxes)
        if tensor.kind == "master"
        else tensor
        for tensor in made.tensors
    ]
    message = r"master_param/decoder\.final.* holds the low halves of fp32 .*--weights-only"
    with pytest.raises(UnsupportedError, match=message):
        write(dataclasses.replace(made, tensors=tensors), tmp_path, Options())
    assert not list(tmp_path.rglob("iter_*"))
