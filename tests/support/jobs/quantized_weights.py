"""Gives real Megatron models stand-ins for FP8 or FP4 weights: TransformerEngine needs a GPU.

`install` makes Megatron's own DDP and DistributedOptimizer treat the stand-ins of
`tests/megatron_lm/quantized_double.py` as TransformerEngine's classes. It replaces the parts of
TransformerEngine: the class checks, moving the bytes into DDP's buffer, casting shards of masters,
and the steps after an all-gather. Megatron decides which masters are copied when, and which weights
are gathered.

The weights of the linear layers are swapped after the model has become bfloat16 and before DDP
wraps it; Megatron's local layers then compute with dequantized copies.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import fp4_utils, fp8_utils, parallel_state
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.training import get_args, training

from tests.megatron_lm.quantized_double import BlockDouble, PackedDouble, QuantizedDouble


@dataclasses.dataclass(frozen=True)
class Recipe:
    """An FP8 or FP4 recipe of Megatron, with the tensor classes of its weights."""

    tensor: type[QuantizedDouble]
    fp8_recipe: str
    reuse_gradient_buffer: bool = False
    first_layers_plain: bool = False

    @property
    def packed(self) -> bool:
        return self.tensor is PackedDouble


class DelayedDouble(QuantizedDouble):
    """An FP8 tensor that keeps a scale computed earlier (delayed scaling)."""

    def _set_scale(self, largest: torch.Tensor) -> None:
        """Keep the scale regardless of the values."""


RECIPES = {
    "tensorwise": Recipe(QuantizedDouble, "tensorwise"),
    "plain-ends": Recipe(QuantizedDouble, "tensorwise", first_layers_plain=True),
    "delayed": Recipe(DelayedDouble, "delayed"),
    "mxfp8": Recipe(BlockDouble, "mxfp8", reuse_gradient_buffer=True),
    "nvfp4": Recipe(PackedDouble, "tensorwise"),
}


def install(name: str) -> None:
    """Give every model that Megatron builds in this process FP8 weights of recipe `name`."""
    recipe = RECIPES[name]
    swap = functools.partial(quantize_models, recipe)
    mock.patch.object(training, "correct_amax_history_if_needed", swap).start()
    patches = {
        "HAVE_TE_FP8_TENSOR_CLASS": True,
        "FP8_TENSOR_CLASS": QuantizedDouble,
        "HAVE_TE_MXFP8TENSOR": True,
        "MXFP8Tensor": BlockDouble,
        "_modify_underlying_storage_impl": move_bytes,
        "_quantize_param_shard_impl": quantize_shards,
        # TransformerEngine would make transposes anew.
        "te_post_all_gather_processing": lambda weights: None,
    }
    mock.patch.multiple(fp8_utils, create=True, **patches).start()
    packed = {"HAVE_TE_FP4_TENSOR_CLASS": True, "FP4_TENSOR_CLASS": PackedDouble}
    mock.patch.multiple(fp4_utils, **packed).start()
    mock.patch.object(distrib_optimizer, "quantize_nvfp4_param_shard", quantize_shards).start()


def quantize_models(recipe: Recipe, chunks: list[torch.nn.Module]) -> None:
    """Swap the weights of the linear layers, and set the arguments that FP8 weights imply."""
    args = get_args()  # with TransformerEngine, the command line would set these
    args.fp8_param_gather, args.fp4_param_gather = not recipe.packed, recipe.packed
    args.fp8_recipe = recipe.fp8_recipe
    args.reuse_grad_buf_for_mxfp8_param_ag = recipe.reuse_gradient_buffer
    for chunk in chunks:
        for name, module in chunk.named_modules():
            is_linear = isinstance(module, ColumnParallelLinear | RowParallelLinear)
            if not is_linear or ".layers." not in name:
                continue
            layer = chunk.get_submodule(name.partition(".layers.")[0] + ".layers")
            number = layer[int(name.partition(".layers.")[2].partition(".")[0])].layer_number
            if recipe.first_layers_plain and number == 1:
                continue
            quantize(module, recipe.tensor)


def quantize(module: Any, kind: type[QuantizedDouble]) -> None:
    plain = module.weight
    values = plain.detach()
    double = kind.zeros(values.shape)
    if kind is DelayedDouble:
        # A resuming process begins with another scale, as it has processed other weights.
        resumes = Path(get_args().load, "latest_checkpointed_iteration.txt").exists()
        double.scale_inv.copy_(values.float().abs().max() / (70 if resumes else 100))
        keep_scale(module, double)
    weight = torch.nn.Parameter(double.quantize_(values))
    for name, value in vars(plain).items():
        setattr(weight, name, value)
    # TransformerEngine keeps the weight's former values, so that masters begin exact.
    weight.get_high_precision_init_val = lambda: values
    weight.clear_high_precision_init_val = lambda: None
    module.weight = weight


def keep_scale(module: Any, double: QuantizedDouble) -> None:
    """Keep the scale in the module's extra state, where delayed scaling has it."""
    module.get_extra_state = lambda: {"scale_inv": double.scale_inv.clone()}
    module.set_extra_state = lambda state: double.scale_inv.copy_(state["scale_inv"])


def move_bytes(tensor: QuantizedDouble, raw: torch.Tensor) -> None:
    raw.detach().copy_(tensor.raw)
    tensor.raw = raw


def quantize_shards(
    weights: list[QuantizedDouble],
    masters: list[torch.Tensor | None],
    starts: list[int | None],
    group: Any,
    *_: Any,
) -> None:
    for weight, master, start in zip(weights, masters, starts, strict=True):
        weight.quantize_shard(master, start, group)


def quantized(chunks: list[Any]) -> Iterator[tuple[str, QuantizedDouble]]:
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if isinstance(parameter, QuantizedDouble):
                yield f"{number}:{name}", parameter


def digests(chunks: list[Any]) -> dict[str, str]:
    """Return a digest of bytes and scales of every FP8 weight of this rank, by name."""
    return {
        name: hashlib.sha256(
            weight.raw.contiguous().numpy().tobytes() + weight.scale_inv.numpy().tobytes()
        ).hexdigest()
        for name, weight in quantized(chunks)
    }


def unlike_their_masters(chunks: list[Any], optimizer: Any) -> list[str]:
    """Return the names of FP8 weights that differ from their whole master, quantized.

    Collective: masters are assembled from the parts of all replicas.
    """
    masters = whole_masters(optimizer)
    different = []
    for name, weight in quantized(chunks):
        master = masters(weight)
        expected = type(weight)(torch.zeros_like(weight.raw), weight.scale_inv.clone())
        expected.quantize_(master.to(weight.dtype))
        equal = (
            torch.equal(weight.raw, expected.raw)
            and torch.equal(weight.scale_inv, expected.scale_inv)
            and torch.equal(weight.dequantize(), expected.dequantize())
        )
        if not equal:
            different.append(name)
    return different


def whole_masters(optimizer: Any) -> Callable[[torch.nn.Parameter], torch.Tensor]:
    owned = {}
    for sub in optimizer.chained_optimizers:
        for models, masters in zip(
            sub.model_float16_groups, sub.shard_fp32_from_float16_groups, strict=True
        ):
            for model, master in zip(models, masters, strict=True):
                owned[id(model)] = sub._get_model_param_range_map(model)["param"], master

    def whole(parameter: torch.nn.Parameter) -> torch.Tensor:
        master = torch.zeros(parameter.numel())
        if id(parameter) in owned:
            extent, part = owned[id(parameter)]
            master[extent.start : extent.end] = part.detach()
        torch.distributed.all_reduce(master, group=parallel_state.get_data_parallel_group())
        return master.view(parameter.shape)

    return whole
