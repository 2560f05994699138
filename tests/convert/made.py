"""Checkpoints made without Megatron: known tensors, sharded as ranks would hold them."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_flashckpt.convert.common.contents import Contents, GlobalTensor
from megatron_flashckpt.layout.piece import Piece, equal_shares
from megatron_flashckpt.layout.reshard import Box
from megatron_flashckpt.layout.template import order
from megatron_flashckpt.megatron_lm import side_state
from megatron_flashckpt.megatron_lm.torch_dtypes import dtype_name
from tests.support import checkpoints

ITERATION = 10
LAYERS, EXPERTS = 2, 3
#: Global shape, and the number of equal boxes along each axis.
MODEL: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "embedding.word_embeddings.weight": ((12, 5), (2, 1)),
    "decoder.layers.mlp.linear_fc2.weight": ((LAYERS, 6, 8), (LAYERS, 1, 2)),
    "decoder.layers.mlp.linear_fc2.bias": ((LAYERS, 7), (LAYERS, 1)),
    "decoder.layers.mlp.experts.experts.linear_fc1.weight": (
        (LAYERS, EXPERTS, 4, 5),
        (LAYERS, EXPERTS, 2, 1),
    ),
    "decoder.final_layernorm.weight": ((9,), (1,)),
}


def tensors(seed: int = 0) -> list[GlobalTensor]:
    """Return weights of 16 bit with masters, two moments, and a buffer of 32 bit."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for key, (shape, cuts) in sorted(MODEL.items()):
        boxes = tuple(cut(shape, cuts))
        master = torch.randn(shape, generator=generator)
        made += [
            held(key, "exp_avg", torch.randn(shape, generator=generator), boxes),
            held(key, "exp_avg_sq", torch.rand(shape, generator=generator), boxes),
            held(key, "master", master, boxes),
            held(key, "weight", master.to(torch.bfloat16), boxes),
        ]
    bias = torch.randn((LAYERS, EXPERTS), generator=generator)
    whole = ((0, 0), (LAYERS, EXPERTS))
    made.append(held("decoder.layers.mlp.router.expert_bias", "buffer", bias, (whole,)))
    return sorted(made, key=lambda tensor: (tensor.key, tensor.kind))


def held(key: str, kind: str, value: torch.Tensor, boxes: tuple[Box, ...]) -> GlobalTensor:
    """Return `value` as a global tensor."""

    def read(region: Box) -> torch.Tensor:
        offset, shape = region
        ranges = zip(offset, shape, strict=True)
        return value[tuple(slice(low, low + n) for low, n in ranges)].contiguous()

    return GlobalTensor(key, kind, value.dtype, tuple(value.shape), boxes, read)


def cut(shape: tuple[int, ...], cuts: tuple[int, ...]) -> list[Box]:
    extent = tuple(n // parts for n, parts in zip(shape, cuts, strict=True))
    return [
        (tuple(number * n for number, n in zip(numbers, extent, strict=True)), extent)
        for numbers in itertools.product(*map(range, cuts))
    ]


def rng(seed: int) -> dict[str, Any]:
    """Return a random state in the form of `side_state.rng_state`."""
    source = random.Random(seed)
    state = torch.Generator().manual_seed(seed).get_state()
    return {
        "random_rng_state": source.getstate(),
        "np_rng_state": np.random.RandomState(seed).get_state(),
        "torch_rng_state": state,
        "cuda_rng_state": state[:16].clone(),
        "rng_tracker_states": {"model-parallel-rng": state[:8].clone()},
    }


def group(**identity: Any) -> dict[str, Any]:
    """Return a param group of a fused optimizer."""
    values = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "step": 7, "weight_decay": 0.01}
    named = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return {**values, **named, **identity}


def common_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the state that is equal on all ranks of a job with `args`."""
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "num_floating_point_operations_so_far": 1.5,
        "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": 80},
    }


def contents(seed: int = 0, **arguments: Any) -> Contents:
    """Return a whole checkpoint of a job with TP 2 and PP 2."""
    args = argparse.Namespace(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        use_distributed_optimizer=True,
        **arguments,
    )
    return Contents(
        place="made",
        iteration=ITERATION,
        common=common_of(args),
        tensors=tensors(seed),
        optimizer=[
            {
                "param_groups": [group(), group(wd_mult=0.0, weight_decay=0.0)],
                "step": None,
                "grad_scaler": None,
            }
        ],
        rng={(pp, tp): [rng(10 * pp + tp)] for pp in range(2) for tp in range(2)},
        objects={"decoder.layers.mlp.linear_fc1._extra_state/shard_1_2": torch.arange(3)},
    )


def whole(tensor: GlobalTensor) -> torch.Tensor:
    """Assemble `tensor` from its boxes; fail unless each element is in exactly one box."""
    assembled = torch.zeros(tensor.shape, dtype=tensor.dtype)
    count = torch.zeros(tensor.shape, dtype=torch.int8)
    for box in tensor.boxes:
        place = tuple(slice(low, low + n) for low, n in zip(*box, strict=True))
        assembled[place] = tensor.read(box)
        count[place] += 1
    assert bool((count == 1).all()), tensor.name
    return assembled


def differing(one: list[GlobalTensor], other: list[GlobalTensor]) -> list[str]:
    """Return the names of tensors that differ in any bit, in type or in shape."""
    tensors_by_name = {tensor.name: tensor for tensor in one}
    other_by_name = {tensor.name: tensor for tensor in other}
    unequal = sorted(tensors_by_name.keys() ^ other_by_name.keys())
    for name in sorted(tensors_by_name.keys() & other_by_name.keys()):
        left, right = whole(tensors_by_name[name]), whole(other_by_name[name])
        if left.dtype != right.dtype or not torch.equal(left, right):
            unequal.append(name)
    return unequal


def save_as_ranks(made: Contents, root: Path, replicas: int) -> None:
    """Write `made` as a job would, with the bytes of each box split over `replicas` ranks."""
    boxes = [(tensor, box) for tensor in made.tensors for box in tensor.boxes]
    sizes = [(torch.Size(box[1]).numel(), tensor.dtype_of(box).itemsize) for tensor, box in boxes]
    state = {
        "rng": made.rng[0, 0][0] if made.rng else None,
        "optimizer": made.optimizer,
        "rerun": None,
        "objects": made.objects,
    }
    ranks, data = [], {}
    for rank in range(replicas):
        framed = side_state.frame(state, rank, replicas)
        pieces = [framed.piece]
        data[framed.piece] = framed.tensor
        for (tensor, box), (start, end) in zip(
            boxes, equal_shares(sizes, replicas, rank), strict=True
        ):
            dtype = dtype_name(tensor.dtype_of(box))
            piece = Piece(tensor.key, tensor.kind, dtype, tensor.shape, *box, start, end)
            if start < end:
                pieces.append(piece)
                data[piece] = tensor.read(box).reshape(-1)[start:end]
        ranks.append([pieces[position] for position in order(pieces)])
    checkpoints.make(
        root,
        made.iteration,
        ranks=ranks,
        common=side_state.encode_common(made.common),
        content_of=lambda piece: data[piece].view(torch.uint8).numpy().tobytes(),
    )


def with_tensor(made: Contents, name: str, value: torch.Tensor) -> Contents:
    """Return `made` with another value for one tensor."""
    changed = [
        held(tensor.key, tensor.kind, value, tensor.boxes) if tensor.name == name else tensor
        for tensor in made.tensors
    ]
    return dataclasses.replace(made, tensors=changed)
