"""GPT of Megatron's local layers with the names and shapes that args describe."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer import transformer_block
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_flashckpt.megatron_lm.stock import stock_module

try:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm as TorchNorm
except ImportError:  # before core 0.9
    from megatron.core.transformer.torch_layer_norm import WrappedTorchLayerNorm as TorchNorm


def call_known(function: Callable[..., Any], settings: dict[str, Any]) -> Any:
    """Call `function` with the `settings` that it accepts in this release."""
    known = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return function(**settings)
    return function(**{name: value for name, value in settings.items() if name in known})


def model(args: argparse.Namespace, stage: int | None) -> Any:
    """Return this rank's part of the model in virtual pipeline `stage` (None: not interleaved)."""
    if stage is not None and hasattr(parallel_state, "set_virtual_pipeline_model_parallel_rank"):
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
    config = stock_module("arguments").core_transformer_config_from_args(args)
    # Set late: with experts the configuration requires it, but torch's layer norm refuses it.
    config.sequence_parallel = False
    ends = {"ignore_virtual": False, "vp_stage": stage}
    return call_known(
        GPTModel,
        {
            "config": config,
            "transformer_layer_spec": _block_spec(args, config, stage),
            "vocab_size": args.padded_vocab_size,
            "max_sequence_length": args.max_position_embeddings,
            "pre_process": call_known(parallel_state.is_pipeline_first_stage, ends),
            "post_process": call_known(parallel_state.is_pipeline_last_stage, ends),
            "parallel_output": True,
            "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
            "position_embedding_type": args.position_embedding_type,
            "rotary_percent": args.rotary_percent,
            "vp_stage": stage,
        },
    )


def _block_spec(args: argparse.Namespace, config: Any, stage: int | None) -> Any:
    """Return the local layers of a stage; Transformer Engine's layers have equal parameters."""
    # Grouped experts of Transformer Engine are renamed afterwards.
    config.moe_grouped_gemm = args.moe_grouped_gemm and args.transformer_impl == "local"
    settings = {
        "config": config,
        "use_transformer_engine": False,
        "normalization": args.normalization,
        "qk_l2_norm": getattr(args, "qk_l2_norm", False),
        "vp_stage": stage,
    }
    if args.num_experts and hasattr(gpt_layer_specs, "get_gpt_decoder_block_spec"):
        block = call_known(gpt_layer_specs.get_gpt_decoder_block_spec, settings)
    else:
        layer = call_known(
            gpt_layer_specs.get_gpt_layer_local_spec,
            {
                "num_experts": args.num_experts,
                "moe_grouped_gemm": config.moe_grouped_gemm,
                "qk_layernorm": args.qk_layernorm,
                "multi_latent_attention": getattr(args, "multi_latent_attention", False),
                "normalization": args.normalization,
                "qk_l2_norm": getattr(args, "qk_l2_norm", False),
            },
        )
        count = call_known(transformer_block.get_num_layers_to_build, settings)
        block = transformer_block.TransformerBlockSubmodules(layer_specs=[layer] * count)
    _use_torch_norms(block)
    block.layer_norm = TorchNorm
    return block


def _use_torch_norms(submodules: Any) -> None:
    """Replace Apex's norm, which has no RMSNorm, by torch's norm in all layers."""
    for field in dataclasses.fields(submodules):
        value = getattr(submodules, field.name)
        if value is FusedLayerNorm:
            setattr(submodules, field.name, TorchNorm)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ModuleSpec) and dataclasses.is_dataclass(part.submodules):
                _use_torch_norms(part.submodules)
