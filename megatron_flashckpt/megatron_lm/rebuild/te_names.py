"""Models of Transformer Engine layers, described without Transformer Engine.

Transformer Engine needs CUDA, so models are rebuilt from Megatron's local layers. These have the
same parameters, but other names where Transformer Engine fuses modules. It fuses a layer norm with
the next linear layer, and the experts of a grouped GEMM into one module. Registration order, and so
the order of optimizers and buckets, follows the modules.
"""

from __future__ import annotations

import dataclasses
import re

from megatron_flashckpt.megatron_lm.rebuild.rank_model import Chunk, LocalTensor

_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")


def renamed(chunk: Chunk, grouped_experts: bool) -> Chunk:
    """Return `chunk`, which has local layers, as a chunk of Transformer Engine layers."""
    names = {tensor.name for tensor in chunk.parameters}
    tensors = [_renamed(tensor, names, grouped_experts) for tensor in chunk.parameters]
    places = {tensor.name: place for place, tensor in enumerate(tensors)}
    parameters = sorted(tensors, key=lambda tensor: _order(tensor.name, places))
    known = {old.name: new.name for old, new in zip(chunk.parameters, tensors, strict=True)}
    return Chunk(
        tuple(parameters),
        chunk.buffers,
        tuple(known.get(name, name) for name in chunk.state_names),
        chunk.objects,
    )


def _renamed(tensor: LocalTensor, names: set[str], grouped_experts: bool) -> LocalTensor:
    name = tensor.name
    expert = _EXPERT.fullmatch(name)
    if expert and grouped_experts:
        return _with_name(tensor, f"{expert[1]}.{expert[3]}.{expert[4]}{expert[2]}")
    layer, _, leaf = name.rpartition("pre_mlp_layernorm.")
    if layer:
        if f"{layer}mlp.linear_fc1.weight" in names:
            return _with_name(tensor, f"{layer}mlp.linear_fc1.layer_norm_{leaf}")
        # The norm before experts is a separate module with its own key.
        (run,) = tensor.geometry.runs
        key = run.key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        runs = (dataclasses.replace(run, key=key),)
        return dataclasses.replace(tensor, geometry=dataclasses.replace(tensor.geometry, runs=runs))
    layer, _, leaf = name.rpartition("input_layernorm.")
    if layer:
        return _with_name(tensor, f"{layer}self_attention.linear_qkv.layer_norm_{leaf}")
    return tensor


def _with_name(tensor: LocalTensor, name: str) -> LocalTensor:
    return dataclasses.replace(tensor, geometry=dataclasses.replace(tensor.geometry, name=name))


def _order(name: str, places: dict[str, int]) -> tuple[int, ...]:
    """Return a sort key for registration order; unfused parameters keep the local layers' order."""
    module, _, leaf = name.rpartition(".")
    if leaf.startswith("layer_norm_"):
        # The fused layer registers its norm before its own weight.
        return (places[f"{module}.weight"], 0, places[name])
    grouped = re.fullmatch(r"(weight|bias)(\d+)", leaf)
    if grouped:
        # Module by module; in each module all weights before all biases.
        layer, _, linear = module.rpartition(".")
        first = min(place for other, place in places.items() if other.startswith(f"{layer}."))
        return (first, 1, int(linear[-1]), int(grouped[1] == "bias"), int(grouped[2]))
    return (places[name], 1)
