"""Architectures of Hugging Face: names of tensors, and Megatron's arguments for a `config.json`.

An entry of a table has Megatron's tensor in a layer, its dimensions, and the tensors that hold its
rows. Names of Megatron that are divided by `|` mean the same tensor: Transformer Engine's layers
have the first, local layers the second. A dimension has a name, which `Geometry` resolves. `T`
marks a tensor that the Hugging Face model stores transposed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from megatron_flashckpt.convert.hugging_face import hf_config, rows
from megatron_flashckpt.convert.hugging_face.hf_config import HfConfig
from megatron_flashckpt.convert.hugging_face.rows import Dimension, Match
from megatron_flashckpt.errors import UnsupportedError

Table = tuple[tuple[str, ...], ...]
Geometry = dict[str, Dimension]

_ENDS: Table = (
    ("embedding.word_embeddings.weight", "vocabulary hidden", "model.embed_tokens.weight"),
    ("decoder.final_layernorm.weight", "hidden", "model.norm.weight"),
)
_OUTPUT: Table = (("output_layer.weight", "vocabulary hidden", "lm_head.weight"),)
_ATTENTION: Table = (
    (
        "self_attention.linear_qkv.layer_norm_weight|input_layernorm.weight",
        *("hidden", "input_layernorm.weight"),
    ),
    (
        *("self_attention.linear_qkv.weight", "qkv hidden"),
        *("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ),
    ("self_attention.linear_proj.weight", "hidden heads", "self_attn.o_proj.weight"),
)
_QKV_BIAS: Table = (
    (
        *("self_attention.linear_qkv.bias", "qkv"),
        *("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    ),
)
_QK_NORMS: Table = (
    ("self_attention.q_layernorm.weight", "head", "self_attn.q_norm.weight"),
    ("self_attention.k_layernorm.weight", "head", "self_attn.k_norm.weight"),
)
_LATENT_ATTENTION: Table = (
    (
        "input_layernorm.weight|self_attention.linear_qkv.layer_norm_weight",
        *("hidden", "input_layernorm.weight"),
    ),
    (
        *("self_attention.linear_kv_down_proj.weight", "kv_down hidden"),
        "self_attn.kv_a_proj_with_mqa.weight",
    ),
    (
        "self_attention.linear_kv_up_proj.layer_norm_weight|self_attention.kv_layernorm.weight",
        *("kv_rank", "self_attn.kv_a_layernorm.weight"),
    ),
    ("self_attention.linear_kv_up_proj.weight", "kv_up kv_rank", "self_attn.kv_b_proj.weight"),
    ("self_attention.linear_proj.weight", "hidden heads", "self_attn.o_proj.weight"),
)
_QUERIES_OF_RANK: Table = (
    ("self_attention.linear_q_down_proj.weight", "q_rank hidden", "self_attn.q_a_proj.weight"),
    (
        "self_attention.linear_q_up_proj.layer_norm_weight|self_attention.q_layernorm.weight",
        *("q_rank", "self_attn.q_a_layernorm.weight"),
    ),
    ("self_attention.linear_q_up_proj.weight", "q_up q_rank", "self_attn.q_b_proj.weight"),
)
_QUERIES: Table = (
    ("self_attention.linear_q_proj.weight", "q_up hidden", "self_attn.q_proj.weight"),
)
_DENSE: Table = (
    (
        "mlp.linear_fc1.layer_norm_weight|pre_mlp_layernorm.weight",
        *("hidden", "post_attention_layernorm.weight"),
    ),
    (
        *("mlp.linear_fc1.weight", "gate_up hidden"),
        *("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    ),
    ("mlp.linear_fc2.weight", "hidden ffn", "mlp.down_proj.weight"),
)
_NORM_OF_EXPERTS: Table = (
    (
        "pre_mlp_layernorm.weight|mlp.linear_fc1.layer_norm_weight",
        *("hidden", "post_attention_layernorm.weight"),
    ),
)
_ROUTER: Table = (("mlp.router.weight", "experts hidden", "mlp.gate.weight"),)
_ROUTER_BIAS: Table = (("mlp.router.expert_bias", "experts", "mlp.gate.e_score_correction_bias"),)
_SHARED_EXPERTS: Table = (
    (
        *("mlp.shared_experts.linear_fc1.weight", "shared_gate_up hidden"),
        *("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    ),
    (
        *("mlp.shared_experts.linear_fc2.weight", "hidden shared_ffn"),
        "mlp.shared_experts.down_proj.weight",
    ),
)
_EXPERT: Table = (
    ("linear_fc1.weight", "expert_gate_up hidden", "gate_proj.weight", "up_proj.weight"),
    ("linear_fc2.weight", "hidden expert_ffn", "down_proj.weight"),
)
_MIXTRAL_ROUTER: Table = (("mlp.router.weight", "experts hidden", "block_sparse_moe.gate.weight"),)
_MIXTRAL_EXPERT: Table = (
    ("linear_fc1.weight", "expert_gate_up hidden", "w1.weight", "w3.weight"),
    ("linear_fc2.weight", "hidden expert_ffn", "w2.weight"),
)
_GPT2_ENDS: Table = (
    ("embedding.word_embeddings.weight", "vocabulary hidden", "transformer.wte.weight"),
    ("embedding.position_embeddings.weight", "positions hidden", "transformer.wpe.weight"),
    ("decoder.final_layernorm.weight", "hidden", "transformer.ln_f.weight"),
    ("decoder.final_layernorm.bias", "hidden", "transformer.ln_f.bias"),
)
_GPT2_LAYER: Table = (
    ("self_attention.linear_qkv.layer_norm_weight|input_layernorm.weight", "hidden", "ln_1.weight"),
    ("self_attention.linear_qkv.layer_norm_bias|input_layernorm.bias", "hidden", "ln_1.bias"),
    ("self_attention.linear_qkv.weight", "joined_qkv hidden T", "attn.c_attn.weight"),
    ("self_attention.linear_qkv.bias", "joined_qkv", "attn.c_attn.bias"),
    ("self_attention.linear_proj.weight", "hidden heads T", "attn.c_proj.weight"),
    ("self_attention.linear_proj.bias", "hidden", "attn.c_proj.bias"),
    ("mlp.linear_fc1.layer_norm_weight|pre_mlp_layernorm.weight", "hidden", "ln_2.weight"),
    ("mlp.linear_fc1.layer_norm_bias|pre_mlp_layernorm.bias", "hidden", "ln_2.bias"),
    ("mlp.linear_fc1.weight", "ffn hidden T", "mlp.c_fc.weight"),
    ("mlp.linear_fc1.bias", "ffn", "mlp.c_fc.bias"),
    ("mlp.linear_fc2.weight", "hidden ffn T", "mlp.c_proj.weight"),
    ("mlp.linear_fc2.bias", "hidden", "mlp.c_proj.bias"),
)

#: Values of Megatron's arguments for all architectures whose own arguments do not replace them.
#: Other values mean computations that no supported architecture has.
_PLAIN: dict[str, Any] = {
    "activation_func_clamp_value": None,
    "apply_query_key_layer_scaling": False,
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "glu_linear_offset": 0.0,
    "heterogeneous_layers_config_path": None,
    "hybrid_layer_pattern": None,
    "layernorm_zero_centered_gamma": False,
    "moe_apply_probs_on_input": False,
    "moe_latent_size": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_group_topk": None,
    "moe_router_num_groups": None,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "moe_shared_expert_gate": False,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "no_rope_freq": None,
    "qk_l2_norm": False,
    "qk_layernorm": False,
    "quick_geglu": False,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "rotary_seq_len_interpolation_factor": None,
    "softmax_type": "vanilla",
    "squared_relu": False,
    "use_mup": False,
    "use_rope_scaling": False,
    "window_size": None,
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as a `config.json` describes it."""

    args: dict[str, Any]
    """Megatron's arguments of this model. An argument's name in older releases is an entry, too."""
    geometry: Geometry
    ends: Table
    dense: Table
    """Tensors of a layer without experts."""
    sparse: Table = ()
    """Tensors of a layer with experts, outside of these."""
    expert: Table = ()
    layer_prefix: str = "model.layers.{}."
    expert_prefix: str = "mlp.experts.{}."
    sparse_layers: tuple[bool, ...] = ()
    """True for each layer with experts. Empty if no layer has experts."""

    @property
    def numbered_layers(self) -> bool:
        """True if Megatron's keys have the numbers of layers, because layers differ."""
        return len(set(self.sparse_layers)) > 1

    def matches(self) -> Iterator[Match]:
        """Yield every tensor of the model."""
        yield from self._of(self.ends)
        for layer in range(self.args["num_layers"]):
            prefixes = f"decoder.layers.{layer}.", self.layer_prefix.format(layer)
            if not any(self.sparse_layers[layer : layer + 1]):
                yield from self._of(self.dense, *prefixes)
                continue
            yield from self._of(self.sparse, *prefixes)
            for expert in range(self.args["num_experts"]):
                yield from self._of(
                    self.expert,
                    f"{prefixes[0]}mlp.experts.local_experts.{expert}.",
                    prefixes[1] + self.expert_prefix.format(expert),
                )

    def _of(self, table: Table, megatron: str = "", hf: str = "") -> Iterator[Match]:
        for names, dimensions, *hf_names in table:
            sizes = dimensions.removesuffix(" T").split()
            yield rows.match(
                tuple(megatron + name for name in names.split("|")),
                [self.geometry[size] for size in sizes],
                tuple(hf + name for name in hf_names),
                dimensions.endswith(" T"),
            )


def _decoder(
    config: HfConfig, rotary: Callable[[HfConfig], dict[str, Any]] = hf_config.rotary
) -> Model:
    """Return a model with RMSNorm, rotary embeddings and a gated MLP, as Llama has them."""
    config.require(hidden_act=("silu", None), use_sliding_window=(False, None))
    config.require(mlp_bias=(False, None), partial_rotary_factor=(1, None))
    heads = config.number("num_attention_heads")
    groups = config.number("num_key_value_heads", heads)
    hidden = config.number("hidden_size")
    head = config.number("head_dim", hidden // heads)
    ffn = config.number("intermediate_size")
    tied = bool(config.get("tie_word_embeddings", False))
    geometry = _geometry(config, hidden, heads, head, ffn) | {
        "qkv": rows.attention(heads, groups, head),
        "gate_up": rows.gate_up(ffn),
    }
    args = _sizes(config, config.number("num_hidden_layers"), hidden, heads, head, ffn) | {
        "add_bias_linear": False,
        "group_query_attention": groups != heads,
        "max_position_embeddings": config.number("max_position_embeddings"),
        "normalization": "RMSNorm",
        "num_query_groups": groups,
        "position_embedding_type": "rope",
        "swiglu": True,
        "untie_embeddings_and_output_weights": not tied,
        **_epsilon(config.float("rms_norm_eps")),
        **rotary(config),
    }
    ends = _ENDS if tied else _ENDS + _OUTPUT
    return Model(args, geometry, ends, _ATTENTION + _DENSE)


def _llama(config: HfConfig) -> Model:
    # With this setting Llama has a bias at the output projection, too, which Megatron has not.
    config.require(attention_bias=(False, None))
    return _decoder(config)


def _qwen2(config: HfConfig) -> Model:
    model = _decoder(config)
    args = {**model.args, "add_qkv_bias": True}
    return dataclasses.replace(model, args=args, dense=model.dense + _QKV_BIAS)


def _qwen3(config: HfConfig) -> Model:
    config.require(attention_bias=(False, None))
    # Qwen 3 does not divide the hidden size among the heads.
    model = _decoder(config.with_defaults(head_dim=128))
    args = {**model.args, "qk_layernorm": True}
    return dataclasses.replace(model, args=args, dense=model.dense + _QK_NORMS)


def _mixtral(config: HfConfig) -> Model:
    config.require(sliding_window=(None,))
    model = _decoder(config)
    return _sparse(
        dataclasses.replace(model, expert_prefix="block_sparse_moe.experts.{}."),
        _ATTENTION + _NORM_OF_EXPERTS + _MIXTRAL_ROUTER,
        _MIXTRAL_EXPERT,
        experts=config.number("num_local_experts"),
        expert_size=config.number("intermediate_size"),
        top_k=config.number("num_experts_per_tok"),
        sparse_layers=[True] * model.args["num_layers"],
    )


def _qwen3_moe(config: HfConfig) -> Model:
    model = _qwen3(config)
    step, dense = config.number("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    layers = range(model.args["num_layers"])
    model = _sparse(
        model,
        _ATTENTION + _QK_NORMS + _NORM_OF_EXPERTS + _ROUTER,
        _EXPERT,
        experts=config.number("num_experts"),
        expert_size=config.number("moe_intermediate_size"),
        top_k=config.number("num_experts_per_tok"),
        sparse_layers=[layer not in dense and (layer + 1) % step == 0 for layer in layers],
    )
    # Without this setting probabilities are those among all experts, not among the chosen ones.
    args = {**model.args, "moe_router_pre_softmax": not config.get("norm_topk_prob", False)}
    return dataclasses.replace(model, args=args)


def _deepseek_v3(config: HfConfig) -> Model:
    config.require(
        attention_bias=(False, None),
        moe_layer_freq=(1, None),
        norm_topk_prob=(True, None),
        num_nextn_predict_layers=(0, None),
        rope_interleave=(True, None),
        scoring_func=("sigmoid", None),
        topk_method=("noaux_tc", None),
    )
    head = config.number("qk_rope_head_dim")
    model = _decoder(config.with_defaults(head_dim=head), hf_config.latent_rotary)
    heads = model.args["num_attention_heads"]
    rank, kv_rank = config.get("q_lora_rank"), config.number("kv_lora_rank")
    flat = config.number("qk_nope_head_dim")
    values = config.number("v_head_dim")
    shared = config.number("n_shared_experts") * config.number("moe_intermediate_size")
    groups, chosen = config.number("n_group", 1), config.number("topk_group", 1)
    top_k = config.number("num_experts_per_tok")
    if groups > 1 and top_k != 2 * chosen:
        raise UnsupportedError(
            f"{config.place}: num_experts_per_tok is {top_k} and topk_group is {chosen}, and only "
            "twice as many experts as groups convert, because then Megatron ranks groups by their "
            "two best experts, as the model does; give the template of such a model"
        )
    attention = _LATENT_ATTENTION + (_QUERIES if rank is None else _QUERIES_OF_RANK)
    model = _sparse(
        dataclasses.replace(model, dense=attention + _DENSE),
        attention + _NORM_OF_EXPERTS + _ROUTER + _ROUTER_BIAS + _SHARED_EXPERTS,
        _EXPERT,
        experts=config.number("n_routed_experts"),
        expert_size=config.number("moe_intermediate_size"),
        top_k=top_k,
        sparse_layers=[
            layer >= config.get("first_k_dense_replace", 0)
            for layer in range(model.args["num_layers"])
        ],
    )
    args = model.args | {
        "kv_lora_rank": kv_rank,
        "moe_router_enable_expert_bias": True,
        "moe_router_group_topk": chosen if groups > 1 else None,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": config.float("routed_scaling_factor", 1.0),
        "moe_shared_expert_intermediate_size": shared,
        "multi_latent_attention": True,
        "q_lora_rank": rank,
        "qk_head_dim": flat,
        "qk_layernorm": True,
        "qk_pos_emb_head_dim": head,
        "v_head_dim": values,
    }
    geometry = model.geometry | {
        "heads": rows.whole(heads * values),
        "kv_down": rows.whole(kv_rank + head),
        "kv_rank": rows.whole(kv_rank),
        "kv_up": rows.whole(heads * (flat + values)),
        "q_rank": rows.whole(rank or 0),
        "q_up": rows.whole(heads * (flat + head)),
        "shared_ffn": rows.whole(shared),
        "shared_gate_up": rows.gate_up(shared),
    }
    return dataclasses.replace(model, args=args, geometry=geometry)


def _sparse(
    model: Model,
    sparse: Table,
    expert: Table,
    *,
    experts: int,
    expert_size: int,
    top_k: int,
    sparse_layers: list[bool],
) -> Model:
    """Return `model` with experts in `sparse_layers`."""
    args = model.args | {
        "moe_ffn_hidden_size": expert_size,
        "moe_layer_freq": 1 if all(sparse_layers) else list(map(int, sparse_layers)),
        "moe_router_topk": top_k,
        "num_experts": experts,
    }
    geometry = model.geometry | {
        "expert_ffn": rows.whole(expert_size),
        "expert_gate_up": rows.gate_up(expert_size),
        "experts": rows.whole(experts),
    }
    return dataclasses.replace(
        model,
        args=args,
        geometry=geometry,
        sparse=sparse,
        expert=expert,
        sparse_layers=tuple(sparse_layers),
    )


def _gpt2(config: HfConfig) -> Model:
    config.require(
        scale_attn_weights=(True, None),
        scale_attn_by_inverse_layer_idx=(False, None),
        add_cross_attention=(False, None),
        tie_word_embeddings=(True, None),
        activation_function=("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu", None),
    )
    heads, hidden = config.number("n_head"), config.number("n_embd")
    ffn, positions = config.number("n_inner", 4 * hidden), config.number("n_positions")
    head = hidden // heads
    geometry = _geometry(config, hidden, heads, head, ffn) | {
        "joined_qkv": rows.joined(rows.attention(heads, heads, head)),
        "positions": rows.whole(positions),
    }
    args = _sizes(config, config.number("n_layer"), hidden, heads, head, ffn) | {
        "add_bias_linear": True,
        "add_position_embedding": True,
        # Megatron's fused GeLU is the tanh approximation, its other one is exact.
        "bias_gelu_fusion": config.get("activation_function", "gelu_new") != "gelu",
        "group_query_attention": False,
        "max_position_embeddings": positions,
        "normalization": "LayerNorm",
        "num_query_groups": heads,
        "position_embedding_type": "learned_absolute",
        "swiglu": False,
        "untie_embeddings_and_output_weights": False,
        **_epsilon(config.float("layer_norm_epsilon", 1e-5)),
    }
    return Model(args, geometry, _GPT2_ENDS, _GPT2_LAYER, layer_prefix="transformer.h.{}.")


#: Supported architectures by their name in `config.json`.
ARCHITECTURES: dict[str, Callable[[HfConfig], Model]] = {
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "GPT2LMHeadModel": _gpt2,
    "LlamaForCausalLM": _llama,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}


def model_of(config: HfConfig) -> Model:
    """Return the model that `config` describes.

    Raises:
        UnsupportedError: the architecture or a setting of it has no counterpart here.
        ConfigError: `config.json` lacks a setting, or has a value of another type.
    """
    model = ARCHITECTURES[config.architecture(tuple(ARCHITECTURES))](config)
    return dataclasses.replace(model, args=_PLAIN | model.args)


def _geometry(config: HfConfig, hidden: int, heads: int, head: int, ffn: int) -> Geometry:
    return {
        "vocabulary": rows.vocabulary(config.number("vocab_size")),
        "hidden": rows.whole(hidden),
        "heads": rows.whole(heads * head),
        "head": rows.whole(head),
        "ffn": rows.whole(ffn),
    }


def _sizes(
    config: HfConfig, layers: int, hidden: int, heads: int, head: int, ffn: int
) -> dict[str, Any]:
    return {
        "ffn_hidden_size": ffn,
        "hidden_size": hidden,
        "kv_channels": head,
        "num_attention_heads": heads,
        "num_layers": layers,
        "vocab_size": config.number("vocab_size"),
    }


def _epsilon(value: float) -> dict[str, float]:
    return {"layernorm_epsilon": value, "norm_epsilon": value}
