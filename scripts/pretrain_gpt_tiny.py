"""Tiny GPT trained by Megatron's own loop (`megatron.training.pretrain`) on Megatron's mock data.

This file does not use megatron_flashckpt: Megatron's `training.py` imports `save_checkpoint` and
`load_checkpoint`. `scripts/demo` and the tests run the script with these imports swapped, or
unedited through `python -m megatron_flashckpt.launch`.

It needs the megatron-core wheel (>= 0.17) and no Megatron-LM checkout. Without a GPU, put
`tests/cpu_megatron` on PYTHONPATH. With LOSS_LOG=FILE each rank that computes losses appends
`iteration loss` lines to FILE.<rank>, with the loss as an exact hexadecimal float.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import megatron.core.datasets.utils as dataset_utils
import torch
import torch.utils.deterministic
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import (
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import arguments, get_args, training
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.initialize import initialize_megatron

# A tiny job sees a few hundred samples; the indices of Megatron's 100,000 documents take longer.
MockGPTLowLevelDataset.size = 1000
# The wheel ships the compiled dataset helper, but not the Makefile that Megatron would run.
dataset_utils.compile_helpers = lambda: None
_DEFAULTS = {"tokenizer_type": "NullTokenizer"}


def initialize(**options: Any) -> None:
    """Parse the command line and initialize Megatron, in the way of the installed release."""
    if hasattr(arguments, "parse_and_validate_args"):  # since core 0.19
        arguments.parse_and_validate_args(args_defaults=_DEFAULTS)
        initialize_megatron(**options)
    else:
        initialize_megatron(args_defaults=_DEFAULTS, **options)


def train(datasets: Any, model: Any, step: Any, **options: Any) -> None:
    """Parse the command line and train, in the way of the installed release."""
    kind = ModelType.encoder_or_decoder
    if hasattr(arguments, "parse_and_validate_args"):  # since core 0.19
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        args = arguments.parse_and_validate_args(args_defaults=_DEFAULTS)
        config = pretrain_cfg_container_from_args(args)
        training.pretrain(config, datasets, kind, step, model_provider=model, **options)
    else:
        training.pretrain(datasets, model, kind, step, args_defaults=_DEFAULTS, **options)


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **_: Any
) -> GPTModel:
    """Return this pipeline stage's part of the model."""
    args = get_args()
    return GPTModel(
        core_transformer_config_from_args(args),
        get_gpt_layer_local_spec(args.num_experts, args.moe_grouped_gemm, False, False),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
    )


def datasets_provider(sizes: list[int], vp_stage: int | None = None) -> Any:
    """Return Megatron's mock training, validation and test sets."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split or "99,1,0",
        blend=None,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config).build()


datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def loss_func(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the mean loss of the micro-batch, and its mean over the replicas for the log."""
    loss = (output.float() * mask).sum() / mask.sum()
    if "LOSS_LOG" in os.environ:
        with open(f"{os.environ['LOSS_LOG']}.{torch.distributed.get_rank()}", "a") as log:
            print(get_args().curr_iteration + 1, float(loss).hex(), file=log)
    report = torch.stack([loss.detach(), torch.ones_like(loss)])
    torch.distributed.all_reduce(report, group=mpu.get_data_parallel_group())
    return loss, {"lm loss": report[0] / report[1]}


def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
    """Return the model's output, and the function that computes its loss."""
    batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(batches).items()}
    tokens = batch["tokens"]
    length = tokens.size(1)
    causal = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    output = model(tokens, batch["position_ids"], causal, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"].float())


if __name__ == "__main__":
    # With --deterministic-mode torch would fill each new tensor, the buffers of a load included.
    torch.utils.deterministic.fill_uninitialized_memory = False
    train(datasets_provider, model_provider, forward_step)
