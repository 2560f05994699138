"""Exported weights, opened with the real safetensors library."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megatron_flashckpt.convert.common import contents as common_contents
from megatron_flashckpt.convert.common import named_regions
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.common.safetensors_files import INDEX
from megatron_flashckpt.convert.writers.safetensors import write_safetensors
from megatron_flashckpt.layout.reshard import Box, intersection
from tests.convert.hf_files import weights
from tests.convert.made import EXPERTS, LAYERS, contents, held, whole
from tests.support.megatron_jobs import same


def expected() -> dict[str, torch.Tensor]:
    """Return every tensor by its name in Megatron's state dict."""
    held = {tensor.key: whole(tensor) for tensor in contents().tensors if tensor.kind == "weight"}
    (buffer,) = (tensor for tensor in contents().tensors if tensor.kind == "buffer")
    tensors = {key: held[key] for key in held if ".layers." not in key}
    for layer in range(LAYERS):
        start = f"decoder.layers.{layer}.mlp"
        fc1 = held["decoder.layers.mlp.experts.experts.linear_fc1.weight"][layer]
        for expert in range(EXPERTS):
            name = f"{start}.experts.local_experts.{expert}.linear_fc1.weight"
            tensors[name] = fc1[expert]
        tensors[f"{start}.linear_fc2.weight"] = held["decoder.layers.mlp.linear_fc2.weight"][layer]
        tensors[f"{start}.linear_fc2.bias"] = held["decoder.layers.mlp.linear_fc2.bias"][layer]
        tensors[f"{start}.router.expert_bias"] = whole(buffer)[layer]
    return tensors


def test_experts_are_separated_if_layers_have_numbers_in_their_keys(tmp_path: Path) -> None:
    """Layers of different kinds and layers of multi-token prediction have such keys."""
    experts = torch.arange(24.0).view(EXPERTS, 2, 4)
    starts = ("decoder.layers.1.", "mtp.layers.0.transformer_layer.")
    tensors = [
        held(
            f"{start}mlp.experts.experts.linear_fc1.weight",
            "weight",
            experts,
            (((0, 0, 0), tuple(experts.shape)),),
        )
        for start in starts
    ]
    write_safetensors(dataclasses.replace(contents(), tensors=tensors), tmp_path / "hf", Options())
    exported = weights(tmp_path / "hf")
    assert len(exported) == len(starts) * EXPERTS
    for start in starts:
        for expert in range(EXPERTS):
            name = f"{start}mlp.experts.local_experts.{expert}.linear_fc1.weight"
            assert torch.equal(exported[name], experts[expert])


@pytest.mark.parametrize("limit_nbytes", [1, 200, 2**30])
def test_the_index_names_the_file_of_every_tensor(tmp_path: Path, limit_nbytes: int) -> None:
    write_safetensors(contents(), tmp_path / "hf", Options(shard_nbytes=limit_nbytes))
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    tensors = expected()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert {1: count == len(tensors), 200: count > 3, 2**30: count == 1}[limit_nbytes]
    assert files == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    for file in files:
        with safe_open(tmp_path / "hf" / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        held = load_file(tmp_path / "hf" / file)
        assert held.keys() == {n for n, other in index["weight_map"].items() if other == file}
        assert same(held, {name: tensors[name] for name in held})
        assert limit_nbytes == 1 or sum(t.nbytes for t in held.values()) <= limit_nbytes


def test_an_export_reads_each_box_of_the_source_once(tmp_path: Path) -> None:
    """Rows in several boxes are written box by box; columns need all boxes of their layer."""
    made = contents()
    regions = []
    for number, tensor in enumerate(made.tensors):
        read = tensor.read

        def noting(region, tensor=tensor, read=read):
            regions.append((tensor.name, region))
            return read(region)

        object.__setattr__(made.tensors[number], "read", noting)
    write_safetensors(made, tmp_path / "hf", Options())
    embedding = [r for name, r in regions if name == "weight/embedding.word_embeddings.weight"]
    assert embedding == [((0, 0), (6, 5)), ((6, 0), (6, 5))]
    columns = [r for name, r in regions if name == "weight/decoder.layers.mlp.linear_fc2.weight"]
    assert columns == [((n, 0, column), (1, 6, 4)) for n in range(LAYERS) for column in (0, 4)]


def test_only_the_boxes_of_an_expert_are_searched_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large models have 15,000 experts, and twice as many boxes."""
    places = [(layer, expert) for layer in range(6) for expert in range(20)]
    boxes = tuple(((*place, 0, column), (1, 1, 4, 2)) for place in places for column in (0, 2))
    values = torch.arange(6 * 20 * 16.0).view(6, 20, 4, 4)
    key = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    searched = []

    def note(box: Box, region: Box) -> Box | None:
        searched.append(box)
        return intersection(box, region)

    monkeypatch.setattr(common_contents, "intersection", note)
    monkeypatch.setattr(named_regions, "intersection", note)
    made = dataclasses.replace(contents(), tensors=[held(key, "weight", values, boxes)])
    write_safetensors(made, tmp_path / "hf", Options())
    assert len(searched) <= 2 * len(boxes)
    exported = weights(tmp_path / "hf")
    for layer, expert in places:
        name = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight"
        assert torch.equal(exported[name], values[layer, expert])
