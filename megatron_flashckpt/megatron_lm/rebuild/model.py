"""Local models of all ranks of a job, rebuilt from its args in one process.

Formats that store local tensors do not store their positions in the global tensors; Megatron's
model has them. So the model of each rank is built on the meta device, without storage or CUDA, and
its sharded state dict is read. The process groups are the fake groups of torch's own tests.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.model_geometry import ModelGeometry, model_geometry
from megatron_flashckpt.megatron_lm.optimizer_state import is_expert
from megatron_flashckpt.megatron_lm.rebuild import gpt, te_names
from megatron_flashckpt.megatron_lm.rebuild.rank_model import LOAD_IT, Chunk, LocalTensor, RankModel
from megatron_flashckpt.megatron_lm.stock import stock_module

#: Arguments that a model needs and for which Megatron has no defaults.
_NEEDED = (
    *("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size", "params_dtype"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
)
#: Arguments that describe models other than those of `gpt`, if they are set.
_REFUSED = (
    *("spec", "hybrid_layer_pattern", "hybrid_override_pattern"),
    *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
    *("experimental_attention_variant", "mtp_num_layers"),
    *("use_megatron_fsdp", "fp8_param_gather", "fp4_param_gather"),
)
#: Settings for a model of shapes only: no random numbers, no CUDA, no accelerating libraries.
_ONLY_SHAPES = {
    "perform_initialization": False,
    "use_cpu_initialization": True,
    "init_model_with_meta_device": True,
    "context_parallel_size": 1,
    "no_persist_layer_norm": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "tp_comm_overlap": False,
    "cpu_offloading": False,
    "delay_wgrad_compute": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_shared_expert_overlap": False,
    "overlap_moe_expert_parallel_comm": False,
    "cuda_graph_impl": "none",
    "te_precision_config_file": None,
    "fp8": None,
    "fp4": None,
}


def rank_models(args: Any, remedy: str = LOAD_IT) -> list[RankModel]:
    """Return the local models of the layout in `args`, one per model-parallel coordinate.

    The function uses torch's default process group and Megatron's parallel state and releases
    both. `args` are not changed.

    Args:
        remedy: end of the message if the model cannot be rebuilt.

    Raises:
        UnsupportedError: the model is no GPT of megatron.core that can be rebuilt, or this process
            is a rank of a job.
    """
    if dist.is_initialized():
        raise UnsupportedError(
            "this process is a rank of a torch.distributed job; convert checkpoints in a process "
            "of their own (flashckpt convert)"
        )
    _refuse_incomplete(args, remedy)
    args = _completed(args)
    _refuse_unknown(args, remedy)
    models: dict[tuple[int, int, int], RankModel] = {}
    world_size = _smallest_world(args)
    with _no_attention_backend():
        for rank in range(world_size):
            with _fake_rank(args, rank, world_size) as place:
                if place not in models:
                    first_replica = parallel.data_parallel()[1] == 0
                    groups = _group_numbers()
                    chunks = _chunks(args, remedy)
                    models[place] = RankModel(*place, first_replica, *groups, chunks)
    return [models[place] for place in sorted(models)]


def _refuse_incomplete(args: Any, remedy: str) -> None:
    missing = [name for name in _NEEDED if getattr(args, name, None) is None]
    if not hasattr(args, "virtual_pipeline_model_parallel_size"):  # None is valid
        missing.append("virtual_pipeline_model_parallel_size")
    if missing:
        raise UnsupportedError(
            f"the checkpoint's model cannot be rebuilt from its args, which lack "
            f"{', '.join(missing)}; {remedy}"
        )


def _completed(args: Any) -> argparse.Namespace:
    """Return a copy of `args` with defaults for settings that the saving release did not have."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments = stock_module("arguments")
    if hasattr(arguments, "add_megatron_arguments"):  # missing in old releases
        arguments.add_megatron_arguments(parser)
    completed, _ = parser.parse_known_args([])
    for name, value in vars(args).items():
        vars(completed)[name] = copy.copy(value)  # not every name is a text
    vars(completed).update(_ONLY_SHAPES)
    return completed


def _refuse_unknown(args: argparse.Namespace, remedy: str) -> None:
    named = [f"--{name.replace('_', '-')}" for name in _REFUSED if getattr(args, name, None)]
    if args.transformer_impl != "local" and getattr(args, "multi_latent_attention", False):
        named.append("--multi-latent-attention under Transformer Engine")
    if named:
        raise UnsupportedError(
            f"the checkpoint's model cannot be rebuilt from its args: {', '.join(named)}; {remedy}"
        )


def _smallest_world(args: argparse.Namespace) -> int:
    """Return the smallest number of ranks that includes every model-parallel coordinate."""
    ways = math.lcm(args.tensor_model_parallel_size, _expert_ranks(args))
    return int(args.pipeline_model_parallel_size) * ways


def _expert_ranks(args: argparse.Namespace) -> int:
    expert_tensor = getattr(args, "expert_tensor_parallel_size", None)
    if expert_tensor is None:
        expert_tensor = args.tensor_model_parallel_size
    return int(expert_tensor * getattr(args, "expert_model_parallel_size", 1))


@contextlib.contextmanager
def _fake_rank(
    args: argparse.Namespace, rank: int, world_size: int
) -> Iterator[tuple[int, int, int]]:
    """Make this process rank `rank`; yield its `(tp, pp, ep)`. No communication."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # init_process_group replaces the hook by one that prints the rank
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        settings = {
            "tensor_model_parallel_size": args.tensor_model_parallel_size,
            "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
            "virtual_pipeline_model_parallel_size": args.virtual_pipeline_model_parallel_size,
            "expert_model_parallel_size": args.expert_model_parallel_size,
            "expert_tensor_parallel_size": getattr(args, "expert_tensor_parallel_size", None),
            "create_gloo_process_groups": False,
        }
        if getattr(args, "use_tp_pp_dp_mapping", False):
            settings["order"] = "tp-cp-ep-pp-dp"
        gpt.call_known(parallel_state.initialize_model_parallel, settings)
        yield (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
        )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        sys.excepthook = hook


def _group_numbers() -> tuple[int, int]:
    """Return Megatron's numbers of this rank's data-parallel groups: dense, expert."""
    dense = dist.get_rank(parallel_state.get_model_parallel_group())
    if not hasattr(parallel_state, "get_expert_tensor_model_pipeline_parallel_group"):
        # before core 0.9
        experts = parallel_state.get_expert_model_parallel_rank()
        return dense, experts * dist.get_world_size(
            parallel_state.get_model_parallel_group()
        ) + dense
    return dense, dist.get_rank(parallel_state.get_expert_tensor_model_pipeline_parallel_group())


def _chunks(args: argparse.Namespace, remedy: str) -> tuple[Chunk, ...]:
    count = args.virtual_pipeline_model_parallel_size or 1
    try:
        with _no_storage():
            models = [gpt.model(args, stage if count > 1 else None) for stage in range(count)]
            geometry = model_geometry(models)
    except UnsupportedError:
        raise
    except Exception as error:  # this release of Megatron may raise any exception
        raise UnsupportedError(
            "the checkpoint's model cannot be rebuilt from its args with this release of Megatron "
            f"({type(error).__name__}: {error}); {remedy}"
        ) from error
    chunks = tuple(_chunk(number, model, geometry) for number, model in enumerate(models))
    if args.transformer_impl != "local":
        return tuple(te_names.renamed(chunk, bool(args.moe_grouped_gemm)) for chunk in chunks)
    return chunks


@contextlib.contextmanager
def _no_attention_backend() -> Iterator[None]:
    """Clear the variables that select an attention backend, because every model sets them anew."""
    names = [f"NVTE_{kind}_ATTN" for kind in ("FLASH", "FUSED", "UNFUSED")]
    before = {name: os.environ.pop(name, None) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def _no_storage() -> Iterator[None]:
    """Create tensors on the meta device, including those that Megatron creates on the GPU."""
    current_device, to_cuda = torch.cuda.current_device, torch.Tensor.cuda
    torch.cuda.current_device = lambda: "meta"  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.device("meta"):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.cuda.current_device = current_device
        torch.Tensor.cuda = to_cuda  # type: ignore[method-assign]


def _chunk(number: int, model: Any, geometry: ModelGeometry) -> Chunk:
    places = geometry.by_id
    parameters = tuple(
        LocalTensor(
            places[id(parameter)],
            tuple(parameter.shape),
            is_expert(parameter),
            getattr(parameter, "shared_embedding", False),
            getattr(parameter, "is_embedding_or_output_parameter", False),
            parameter.dim() > 1 and not _is_embedding(parameter, places[id(parameter)].name),
        )
        for parameter in model.parameters()
        if parameter.requires_grad
    )
    shapes = {name: tuple(buffer.shape) for name, buffer in model.named_buffers()}
    buffers = tuple(
        LocalTensor(place, shapes[name])
        for chunk, name, place in geometry.buffers
        if chunk == number
    )
    objects = tuple((name, key) for chunk, name, key in geometry.objects if chunk == number)
    return Chunk(parameters, buffers, tuple(model.state_dict()), objects)


def _is_embedding(parameter: torch.nn.Parameter, name: str) -> bool:
    """Return whether Megatron's `get_mup_config_overrides` treats a parameter as an embedding."""
    if getattr(parameter, "shared_embedding", False):
        return True
    return bool(getattr(parameter, "is_embedding_parameter", "embedding" in name.lower()))
