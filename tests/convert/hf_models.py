"""Small models of Megatron with random weights, and the templates of the same Hugging Face models.

Megatron's own parser reads the flags with which a user would train the architecture, so the tables
of the package are compared with what Megatron makes of these flags.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

from megatron_flashckpt.convert.common.contents import Contents
from megatron_flashckpt.convert.common.tensor_parts import global_tensors, part_of
from megatron_flashckpt.megatron_lm.model_geometry import model_geometry
from megatron_flashckpt.megatron_lm.stock import stock_module
from tests.convert.made import ITERATION, common_of

WORDS, PADDED = 90, 96
SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 64 "
    "--seq-length 16 --micro-batch-size 1 --lr 1e-3 --train-iters 1 --hidden-dropout 0 "
    "--attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 90 --transformer-impl local "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm "
    "--no-bias-dropout-fusion --no-rope-fusion --attention-backend unfused "
    "--use-cpu-initialization --distributed-backend gloo"
)
LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--no-bias-swiglu-fusion --ffn-hidden-size 48"
)
GROUPS = "--group-query-attention --num-query-groups 2"
UNTIED = "--untie-embeddings-and-output-weights"
DECODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "tie_word_embeddings": False,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model for both sides."""

    flags: str
    config: dict[str, Any]
    """Contents of `config.json`, as transformers 4 writes it."""
    renamed: dict[str, str] = dataclasses.field(default_factory=dict)
    """Keys of local layers, with those of Transformer Engine's layers, which the reader gives."""


def of(
    architecture: str,
    flags: str,
    *,
    config: dict[str, Any] = DECODER,
    renamed: dict[str, str] | None = None,
    **changes: Any,
) -> Case:
    """Return a case of an architecture, whose `config.json` is `config` with `changes`."""
    named = {"architectures": [f"{architecture}ForCausalLM"], "model_type": TYPES[architecture]}
    return Case(flags, config | named | changes, renamed or {})


#: `model_type` by architecture.
TYPES = {
    "DeepseekV3": "deepseek_v3",
    "Llama": "llama",
    "Mixtral": "mixtral",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3Moe": "qwen3_moe",
}
GPT2_FLAGS = "--position-embedding-type learned_absolute --ffn-hidden-size 128"
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "vocab_size": WORDS,
}
LLAMA3_ROPE = {
    "factor": 4.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
EXPERTS = (
    f"{LLAMA} {GROUPS} {UNTIED} --num-experts 4 --moe-router-load-balancing-type none "
    "--moe-ffn-hidden-size 24"
)
MOE = {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4, "rms_norm_eps": 1e-5}
NORM = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
OF_ALL_LAYERS = {f"decoder.layers.{NORM[0]}": f"decoder.layers.{NORM[1]}"}
LATENT = (
    f"{LLAMA} {UNTIED} --num-layers 3 --moe-layer-freq [0,1,1] --num-experts 8 --moe-router-topk 4 "
    "--moe-ffn-hidden-size 24 --moe-router-load-balancing-type none "
    "--multi-latent-attention --qk-layernorm --kv-lora-rank 12 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 10 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-shared-expert-intermediate-size 48"
)
DEEPSEEK = DECODER | {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.5,
    "topk_group": 2,
    "v_head_dim": 10,
}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}


def _latent_renamed(*norms: str) -> dict[str, str]:
    renamed = {}
    for layer in range(3):
        attention = f"decoder.layers.{layer}.self_attention."
        for norm in norms:
            up = f"{attention}linear_{norm}_up_proj.layer_norm_weight"
            renamed[f"{attention}{norm}_layernorm.weight"] = up
    # The local layers of latent attention call all norms as the other layers with experts do.
    renamed[f"decoder.layers.0.{NORM[1]}"] = f"decoder.layers.0.{NORM[0]}"
    return renamed


CASES = {
    "llama": of(
        *("Llama", f"{LLAMA} {GROUPS} {UNTIED} --rotary-base 500000 --norm-epsilon 1e-6"),
        rms_norm_eps=1e-6,
        rope_theta=500000.0,
    ),
    "llama-scaled-rope-tied": of(
        *("Llama", f"{LLAMA} {GROUPS} --kv-channels 12 --use-rope-scaling --rope-scaling-factor 4"),
        head_dim=12,
        rms_norm_eps=1e-5,
        rope_scaling=LLAMA3_ROPE,
        tie_word_embeddings=True,
    ),
    "qwen2": of(
        *("Qwen2", f"{LLAMA} {UNTIED} --add-qkv-bias --norm-epsilon 1e-6 --rotary-base 1000000"),
        num_key_value_heads=4,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
    ),
    "gpt2": Case(GPT2_FLAGS, GPT2),
    "gpt2-exact-gelu": Case(
        f"{GPT2_FLAGS} --no-bias-gelu-fusion", GPT2 | {"activation_function": "gelu"}
    ),
    "qwen3": of(
        "Qwen3",
        f"{LLAMA} {GROUPS} {UNTIED} --qk-layernorm --kv-channels 16 --norm-epsilon 1e-6",
        head_dim=16,
        rms_norm_eps=1e-6,
    ),
    "mixtral": of(
        *("Mixtral", f"{EXPERTS} --moe-router-topk 2"),
        renamed=OF_ALL_LAYERS,
        intermediate_size=24,
        num_experts_per_tok=2,
        num_local_experts=4,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
    ),
    "qwen3-moe": of(
        *("Qwen3Moe", f"{EXPERTS} --moe-router-topk 3 --qk-layernorm --kv-channels 16"),
        config=DECODER | MOE,
        renamed=OF_ALL_LAYERS,
        norm_topk_prob=True,
        num_experts_per_tok=3,
    ),
    "qwen3-moe-dense-layer-unnormalized": of(
        "Qwen3Moe",
        f"{EXPERTS} --moe-router-topk 2 --qk-layernorm --kv-channels 16 --moe-layer-freq [0,1] "
        "--moe-router-pre-softmax",
        config=DECODER | MOE,
        renamed={f"decoder.layers.1.{NORM[0]}": f"decoder.layers.1.{NORM[1]}"},
        mlp_only_layers=[0],
        norm_topk_prob=False,
        num_experts_per_tok=2,
    ),
    "deepseek-v3": of(
        "DeepseekV3",
        f"{LATENT} --q-lora-rank 14 --rope-type yarn --rotary-scaling-factor 40 --mscale 1 "
        "--mscale-all-dim 1",
        config=DEEPSEEK,
        renamed=_latent_renamed("kv", "q"),
        q_lora_rank=14,
        rope_scaling=YARN,
    ),
    "deepseek-v3-plain-rope": of(
        *("DeepseekV3", f"{LATENT} --rope-type rope"),
        config=DEEPSEEK,
        renamed=_latent_renamed("kv"),
    ),
}


def write_template(directory: Path, config: dict[str, Any]) -> Path:
    """Write a template with a file in place of a tokenizer; return it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text('{"of": "the template"}')
    return directory


def megatron_args(flags: str) -> argparse.Namespace:
    """Return what Megatron's own parser and checks make of `flags`."""
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    arguments = stock_module("arguments")
    with (
        mock.patch.dict(os.environ, one_rank),
        mock.patch.object(sys, "argv", ["pretrain_gpt.py", *SMALL.split(), *flags.split()]),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        args = arguments.validate_args(arguments.parse_args(), {})
    args.padded_vocab_size = PADDED
    return args


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Make this process the only rank of a job."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        parallel_state.initialize_model_parallel()
        with (
            # Rotary embeddings move themselves to the GPU.
            mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
            # The compiler would need half a minute.
            mock.patch.object(torch._dynamo.config, "disable", True),
            # Without dropout nothing is random.
            mock.patch.object(CudaRNGStatesTracker, "fork", side_effect=contextlib.nullcontext),
        ):
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class LatentCore(torch.nn.Module):
    """Causal attention with heads of two sizes, which Megatron leaves to Transformer Engine."""

    def __init__(self, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Take `(sequence, batch, head, size)` and return `(sequence, batch, heads x size)`."""
        heads = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        result = torch.nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, scale=self.scale
        )
        return result.permute(2, 0, 1, 3).flatten(2)


def megatron_model(args: argparse.Namespace, seed: int = 0) -> GPTModel:
    """Return Megatron's model; all its tensors are random, so that none is like another."""
    config = stock_module("arguments").core_transformer_config_from_args(args)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=args.normalization
    )
    if args.multi_latent_attention:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = LatentCore
    model = GPTModel(
        config,
        spec,
        args.padded_vocab_size,
        args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
    )
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            base = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.data.copy_(base + 0.3 * noise)
    return model.eval()


def tokens(seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, WORDS, (3, 16), generator=generator)


def megatron_logits(model: GPTModel) -> torch.Tensor:
    words = tokens()
    count = words.shape[1]
    positions = torch.arange(count).expand_as(words)
    mask = torch.ones(count, count, dtype=torch.bool).triu(1).view(1, 1, count, count)
    with torch.no_grad():
        return model(words, positions, mask)[..., :WORDS].float()


def contents_of(model: GPTModel, args: argparse.Namespace) -> Contents:
    """Return the contents of a save of `model`, by the keys of its own sharded state dict."""
    geometry = model_geometry([model])
    parts = [part_of(geo, "weight", parameter) for parameter, geo in geometry.parameters]
    parts += [part_of(geo, "buffer", buffer) for geo, buffer in geometry.buffer_tensors([model])]
    return Contents("nowhere", ITERATION, common_of(args), global_tensors(parts), None)
