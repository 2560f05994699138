"""Contents for a layout without a job: random tensors of the model that the args describe."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from megatron_flashckpt.convert.common.contents import Contents, GlobalTensor
from megatron_flashckpt.layout.reshard import Box
from megatron_flashckpt.megatron_lm.rebuild.rank_models import rank_models
from tests.convert.made import ITERATION, common_of, held

#: Template of the Hugging Face model that `arguments()` without changes describe.
TEMPLATE = Path(__file__).with_name("gpt2_template")


def options_of(form: str) -> list[str]:
    """Return the options that a conversion to `form` needs."""
    return ["--hf-config", str(TEMPLATE)] if form == "hf" else []


def arguments(**changes) -> argparse.Namespace:
    """Return args of a small GPT without parallelism, with `changes` applied."""
    return argparse.Namespace(
        **{
            "num_layers": 4,
            "hidden_size": 24,
            "ffn_hidden_size": 40,
            "num_attention_heads": 8,
            "kv_channels": 3,
            "max_position_embeddings": 10,
            "padded_vocab_size": 96,
            "params_dtype": torch.bfloat16,
            "bf16": True,
            "fp16": False,
            "transformer_impl": "local",
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": None,
            "data_parallel_size": 1,
            "accumulate_allreduce_grads_in_fp32": True,
            **changes,
        }
    )


def contents(args: argparse.Namespace, seed: int = 0) -> Contents:
    """Return the contents of a save of a job with `args`."""
    generator = torch.Generator().manual_seed(seed)
    boxes: dict[tuple[str, str, tuple[int, ...]], set[Box]] = {}
    experts = False
    for model in rank_models(args):
        for chunk in model.chunks:
            experts |= any(tensor.expert for tensor in chunk.parameters)
            for kind, of_kind in (("weight", chunk.parameters), ("buffer", chunk.buffers)):
                for tensor in of_kind:
                    for run in tensor.geometry.runs:
                        name = (kind, run.key, run.global_shape)
                        boxes.setdefault(name, set()).add((run.offset, run.shape))
    tensors: list[GlobalTensor] = []
    for (kind, key, shape), of_key in sorted(boxes.items()):
        master = torch.randn(shape, generator=generator)
        values = {kind: master.to(args.params_dtype if kind == "weight" else torch.float32)}
        if kind == "weight":
            values["exp_avg"] = torch.randn(shape, generator=generator)
            values["exp_avg_sq"] = torch.rand(shape, generator=generator)
            if args.params_dtype != torch.float32:
                values["master"] = master
        tensors += [
            held(key, kind, tensor, tuple(sorted(of_key))) for kind, tensor in values.items()
        ]
    groups = [_group(wd_mult) for wd_mult in (1.0, 0.0)]
    optimizer = [{"param_groups": groups, "step": 10.0, "grad_scaler": None}]
    if experts:
        of_experts = [_group(wd_mult, is_expert_parallel=True) for wd_mult in (1.0, 0.0)]
        optimizer.append({"param_groups": of_experts, "step": 10.0, "grad_scaler": None})
    tensors.sort(key=lambda tensor: (tensor.key, tensor.kind))
    return Contents("nowhere", ITERATION, common_of(args), tensors, optimizer)


def _group(wd_mult: float, *, is_expert_parallel: bool = False) -> dict:
    return {
        "wd_mult": wd_mult,
        "lr_mult": 1.0,
        "is_expert_parallel": is_expert_parallel,
        "is_decoupled_lr": False,
        "lr": 1e-3,
        "betas": (0.9, 0.999),
    }
