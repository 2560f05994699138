"""Local models of all ranks, rebuilt from args without ranks and without CUDA."""

from __future__ import annotations

import math
import os
import sys

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.megatron_lm.rebuild.model import rank_models
from megatron_flashckpt.megatron_lm.rebuild.rank_model import RankModel
from tests.convert.rebuilt import arguments


def layout(**sizes: int) -> dict[str, object]:
    """Return Megatron's settings for short names of sizes."""
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
    }
    sequence = {"sequence_parallel": True} if {"tp", "ep"} <= sizes.keys() else {}
    return {names[name]: size for name, size in sizes.items()} | sequence


VIRTUAL, STAGES = layout(pp=2, vpp=2), layout(tp=2, pp=4)
LAYOUTS = [layout(tp=4), VIRTUAL, STAGES]
EXPERTS_TP1 = layout(tp=2, ep=2, etp=1)
EXPERT_LAYOUTS = [layout(ep=4), layout(tp=2, ep=2), EXPERTS_TP1, layout(pp=2, ep=2)]
MODELS = {
    "tied": {},
    "untied-swiglu-gqa-rms": {
        "untie_embeddings_and_output_weights": True,
        "swiglu": True,
        "normalization": "RMSNorm",
        "group_query_attention": True,
        "num_query_groups": 4,
        "qk_layernorm": True,
        "position_embedding_type": "rope",
    },
}
EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "add_bias_linear": False,
    "swiglu": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def shapes(models: list[RankModel]) -> dict[str, tuple[int, ...]]:
    """Return global shapes by key; fail unless the main boxes cover each tensor once."""
    global_shapes: dict[str, tuple[int, ...]] = {}
    boxes: dict[str, set] = {}
    for model in models:
        for chunk in model.chunks:
            for local in (*chunk.parameters, *chunk.buffers):
                assert sum(run.numel for run in local.geometry.runs) == local.numel
                for run in local.geometry.runs if local.geometry.main else ():
                    global_shapes.setdefault(run.key, run.global_shape)
                    assert global_shapes[run.key] == run.global_shape
                    boxes.setdefault(run.key, set()).add((run.offset, run.shape))
    for key, shape in global_shapes.items():
        assert sum(math.prod(extent) for _, extent in boxes[key]) == math.prod(shape), key
        assert len({offset for offset, _ in boxes[key]}) == len(boxes[key])
    return global_shapes


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_every_layout_rebuilds_the_same_dense_model(model: dict) -> None:
    whole = shapes(rank_models(arguments(**model)))
    assert whole["decoder.layers.self_attention.linear_proj.weight"] == (4, 24, 24)
    for sizes in LAYOUTS:
        assert shapes(rank_models(arguments(**model, **sizes))) == whole


def test_every_layout_rebuilds_the_same_model_with_experts() -> None:
    whole = shapes(rank_models(arguments(**EXPERTS)))
    assert whole["decoder.layers.mlp.experts.experts.linear_fc2.weight"] == (4, 4, 24, 40)
    assert whole["decoder.layers.mlp.router.expert_bias"] == (4, 4)
    for sizes in EXPERT_LAYOUTS:
        assert shapes(rank_models(arguments(**EXPERTS, **sizes))) == whole


def test_every_coordinate_of_a_layout_is_rebuilt_once() -> None:
    def places(**settings) -> list[tuple[int, int, int]]:
        return [(model.tp, model.pp, model.ep) for model in rank_models(arguments(**settings))]

    assert places(**STAGES) == [(tp, pp, 0) for tp in range(2) for pp in range(4)]
    assert places(**EXPERTS, **layout(tp=2, ep=2)) == [
        (tp, 0, ep) for tp in range(2) for ep in range(2)
    ]
    # In Megatron's rank order, expert-parallel ranks follow the tensor-parallel ranks.
    assert places(**EXPERTS, **EXPERTS_TP1) == [(0, 0, 0), (1, 0, 1)]


def test_both_tied_embeddings_are_marked_and_the_first_is_the_main_copy() -> None:
    models = rank_models(arguments(**VIRTUAL))
    shared = [
        (model.pp, number, parameter.name, parameter.geometry.main)
        for model in models
        for number, chunk in enumerate(model.chunks)
        for parameter in chunk.parameters
        if parameter.shared_embedding
    ]
    assert shared == [
        (0, 0, "embedding.word_embeddings.weight", True),
        (1, 1, "output_layer.weight", False),
    ]


def test_rebuilding_models_restores_all_global_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention backend chosen by an earlier model has no influence."""
    args = arguments(**STAGES)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)
    environment = dict(os.environ)
    args_before = dict(vars(args))
    hook, random_state = sys.excepthook, torch.get_rng_state()
    to_cuda, current_device = torch.Tensor.cuda, torch.cuda.current_device
    rank_models(args)
    assert vars(args) == args_before
    assert dict(os.environ) == environment
    assert not dist.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()
    assert sys.excepthook is hook
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (torch.Tensor.cuda, torch.cuda.current_device) == (to_cuda, current_device)
    assert torch.empty(1).device.type == "cpu"


def test_models_that_cannot_be_rebuilt_are_refused_with_the_remedy() -> None:
    with pytest.raises(UnsupportedError) as caught:
        rank_models(arguments(spec=["somewhere", "spec"], mtp_num_layers=1))
    assert "--spec, --mtp-num-layers" in str(caught.value)
    assert "the job's next save is in the format flashckpt" in str(caught.value)
    with pytest.raises(UnsupportedError, match="--heterogeneous-layers-config-encoded-json; wear"):
        rank_models(arguments(heterogeneous_layers_config_encoded_json="{}"), "wear a hat")
    with pytest.raises(UnsupportedError, match=r"num_attention_heads.*next save"):
        rank_models(arguments(num_attention_heads=3, tensor_model_parallel_size=2))
    assert not dist.is_initialized()


def names(**changes) -> list[str]:
    (model,) = rank_models(
        arguments(num_layers=1, transformer_impl="transformer_engine", **changes)
    )
    layer = "decoder.layers.0."
    return [
        parameter.name.removeprefix(layer)
        for parameter in model.chunks[0].parameters
        if parameter.name.startswith(layer)
    ]


def test_a_dense_layer_has_transformer_engines_names_and_order() -> None:
    """The norm of a fused layer directly precedes its weight."""
    assert names() == [
        "self_attention.linear_proj.weight",
        "self_attention.linear_proj.bias",
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.layer_norm_bias",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_bias",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc1.bias",
        "mlp.linear_fc2.weight",
        "mlp.linear_fc2.bias",
    ]


def test_grouped_experts_have_transformer_engines_names_order_and_keys() -> None:
    changes = {**EXPERTS, "moe_grouped_gemm": True}
    assert names(**changes) == [
        "self_attention.linear_proj.weight",
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.layer_norm_bias",
        "self_attention.linear_qkv.weight",
        "pre_mlp_layernorm.weight",
        "pre_mlp_layernorm.bias",
        "mlp.router.weight",
        *(f"mlp.experts.linear_fc{layer}.weight{n}" for layer in (1, 2) for n in range(4)),
    ]
    fused = shapes(rank_models(arguments(**changes, transformer_impl="transformer_engine")))
    local = shapes(rank_models(arguments(**EXPERTS)))
    # Before experts, Transformer Engine's norm is a separate module with its own key.
    moved = {f"decoder.layers.mlp.linear_fc1.layer_norm_{leaf}" for leaf in ("weight", "bias")}
    assert local.keys() - fused.keys() == moved
    assert fused.keys() - local.keys() == {
        f"decoder.layers.pre_mlp_layernorm.{leaf}" for leaf in ("weight", "bias")
    }
