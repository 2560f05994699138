"""Makes the model of `scripts/pretrain_gpt_tiny.py` one of Megatron's gated delta nets.

Megatron's own module runs with its own kernel in plain torch (`deterministic_mode`). It needs one
function of the package flash-linear-attention, which this file replaces.

Tensor ranks replicate `out_norm.weight`, but each rank applies it to its own heads, and nothing
reduces the gradients: the replicas drift apart from the first step on.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.ssm import gated_delta_net
from megatron.core.transformer.spec_utils import ModuleSpec

from scripts import pretrain_gpt_tiny as tiny


def l2norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(x, dim=-1, eps=1e-6)


def install() -> None:
    """Make `tiny.model_provider` build gated delta nets."""
    gated_delta_net.HAVE_FLA = True
    gated_delta_net.l2norm = l2norm
    # The kernel loops over the positions of a chunk: 8 of them instead of 64.
    kernel = functools.partial(gated_delta_net.torch_chunk_gated_delta_rule, chunk_size=8)
    gated_delta_net.torch_chunk_gated_delta_rule = kernel
    layer_spec, make_config = tiny.get_gpt_layer_local_spec, tiny.core_transformer_config_from_args

    @functools.wraps(layer_spec)
    def with_delta_net(*args: Any) -> ModuleSpec:
        spec, backend = layer_spec(*args), LocalSpecProvider()
        spec.submodules.self_attention = ModuleSpec(
            module=gated_delta_net.GatedDeltaNet,
            submodules=gated_delta_net.GatedDeltaNetSubmodules(
                in_proj=backend.column_parallel_linear(),
                out_norm=backend.layer_norm(rms_norm=False, for_qk=False),
                out_proj=backend.row_parallel_linear(),
            ),
        )
        return spec

    @functools.wraps(make_config)
    def of_delta_net(args: Any) -> Any:
        config = make_config(args)
        config.deterministic_mode = True
        config.linear_conv_kernel_dim = 4
        config.linear_key_head_dim = config.linear_value_head_dim = 16
        config.linear_num_key_heads = config.linear_num_value_heads = 4
        config.activation_func = torch.nn.functional.silu
        return config

    tiny.get_gpt_layer_local_spec = with_delta_net
    tiny.core_transformer_config_from_args = of_delta_net
