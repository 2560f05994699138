"""Megatron's legacy GPT (`megatron.model`, the default until core 0.7): names and positions only.

Later releases do not have the model classes, so the local models of all ranks are computed from the
args. Parameters are listed in the registration order of the legacy modules, because this order
determines their positions in buckets. A global key is the name in the state dict without the
layer's number; equal layers are stacked along a first axis.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.layout.copies import CopyPlace
from megatron_flashckpt.layout.piece import Shape
from megatron_flashckpt.megatron_lm.rebuild.rank_model import Chunk, LocalTensor, RankModel
from megatron_flashckpt.megatron_lm.tensor_geometry import Geometry, Run

#: The word embeddings, on the first pipeline stage.
WORDS = "language_model.embedding.word_embeddings.weight"
_OUTPUT = "language_model.output_layer.weight"
#: Copy of tied word embeddings on the last pipeline stage.
TIED = "word_embeddings.weight"
#: Tensors whose first axis is padded for the tensor parallel size.
_RESIZABLE = (WORDS, TIED, _OUTPUT)
#: Tensors that, with SwiGLU, hold the gate and then the other half.
_FUSED = (".dense_h_to_4h.weight", ".dense_h_to_4h.bias")
_LAYERS = "language_model.encoder.layers"
_EXTRA = "_extra_state"
#: Name of the module `word_embeddings` in the nested state dict.
_TIED_IN_FILES = "word_embeddings_for_head"
#: Modules of `language_model` whose own state dict is nested once more.
_EMBEDDING = "embedding"


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Sharding of a parameter by tensor parallelism."""

    axis: int
    size: int
    """Number of tensor-parallel ranks."""
    rank: int
    strides: int = 1


@dataclasses.dataclass(frozen=True)
class Layer:
    """Position of a layer in the stack of equal layers."""

    number: int
    """Index from 0, over all pipeline stages."""
    count: int


def is_legacy_gpt(args: Any) -> bool:
    """Return whether the job of `args` trained a model of `megatron.model` (not megatron.core)."""
    if hasattr(args, "use_legacy_models"):  # since core 0.8
        return bool(args.use_legacy_models)
    return getattr(args, "use_mcore_models", True) is False


def geometry(
    name: str,
    shape: Shape,
    *,
    layer: Layer | None,
    sharding: Sharding | None,
    swiglu: bool,
    tensor_rank: tuple[int, int],
    replica: int,
) -> Geometry:
    """Return the geometry of the local tensor `name`.

    Args:
        shape: shape of the local tensor.
        layer: None for a parameter outside the layers.
        sharding: None for a parameter that is equal on all tensor-parallel ranks.
        tensor_rank: this rank, and the number of tensor ranks. Rank 0 has the main copies.

    Raises:
        UnsupportedError: the tensor is sharded in strides along an axis other than the first.
    """
    key = WORDS if name == TIED else name
    if layer is not None:
        _, _, rest = name.removeprefix(f"{_LAYERS}.").partition(".")
        key = f"{_LAYERS}.{rest}"
    if sharding is not None and swiglu and name.endswith(_FUSED):
        sharding = dataclasses.replace(sharding, strides=sharding.strides * 2)
    rank, ranks = tensor_rank
    is_duplicate = sharding is None and rank > 0
    return Geometry(
        name=name,
        runs=tuple(_runs(name, key, shape, layer, sharding)),
        main=not is_duplicate and name != TIED,
        replica=replica,
        resizable=name in _RESIZABLE,
        copy=CopyPlace((0, rank), (1, ranks)) if is_duplicate else None,
    )


def _runs(
    name: str, key: str, shape: Shape, layer: Layer | None, sharding: Sharding | None
) -> Iterator[Run]:
    """Yield one run per stride: local part `i` is global part `i * TP + rank`."""
    sharding = sharding or Sharding(axis=0, size=1, rank=0)
    if sharding.strides > 1 and sharding.axis != 0:
        raise UnsupportedError(
            f"{name}: is sharded along axis {sharding.axis} in {sharding.strides} strides, which "
            "this release does not save; use --use-mcore-models"
        )
    local = list(shape)
    full = [extent * (sharding.size if n == sharding.axis else 1) for n, extent in enumerate(local)]
    local[sharding.axis] //= sharding.strides
    numel = math.prod(local)
    stacked = () if layer is None else ((layer.count, layer.number),)
    for part in range(sharding.strides):
        offset = [0] * len(local)
        offset[sharding.axis] = (part * sharding.size + sharding.rank) * local[sharding.axis]
        yield Run(
            key,
            (*(extent for extent, _ in stacked), *full),
            (*(index for _, index in stacked), *offset),
            (*(1 for _ in stacked), *local),
            0,
            part * numel,
            numel,
        )


# ---------------------------------------------------------------------- the model of args


def rank_models(args: Any) -> list[RankModel]:
    """Return the local models of the layout in `args`, one per model-parallel coordinate.

    Raises:
        UnsupportedError: the model is not a dense GPT of Megatron's local layers.
    """
    _refuse_unknown(args)
    ways, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    chunks = args.virtual_pipeline_model_parallel_size or 1
    return [
        RankModel(
            tp,
            pp,
            0,
            first_replica=True,
            dense_group=pp * ways + tp,
            expert_group=pp * ways + tp,
            chunks=tuple(_chunk(args, tp, pp, number) for number in range(chunks)),
        )
        for tp in range(ways)
        for pp in range(stages)
    ]


def _refuse_unknown(args: Any) -> None:
    unsupported = {
        "--transformer-impl transformer_engine": args.transformer_impl != "local",
        "--num-experts": getattr(args, "num_experts", None),
        "--retro-add-retriever": getattr(args, "retro_add_retriever", False),
        "--standalone-embedding-stage": getattr(args, "standalone_embedding_stage", False),
        f"--position-embedding-type {args.position_embedding_type}": (
            args.position_embedding_type not in ("learned_absolute", "rope")
        ),
    }
    named = [name for name, value in unsupported.items() if value]
    if named:
        raise UnsupportedError(
            f"the checkpoint's legacy model cannot be laid out from its args: {', '.join(named)}; "
            "in the Megatron that wrote it, let a job load it with the code that saved it, and "
            "save it once in the other format"
        )


def _chunk(args: Any, tp: int, pp: int, number: int) -> Chunk:
    parameters: list[LocalTensor] = []
    state_names: list[str] = []
    ways, chunks = args.tensor_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    first = pp == 0 and number == 0
    last = pp == args.pipeline_model_parallel_size - 1 and number == chunks - 1
    hidden, padded = args.hidden_size, args.padded_vocab_size // ways

    def add(name: str, shape: Shape, axis: int | None, layer: Layer | None = None) -> None:
        place = geometry(
            name,
            shape,
            layer=layer,
            sharding=None if axis is None else Sharding(axis, ways, tp),
            swiglu=args.swiglu,
            tensor_rank=(tp, ways),
            replica=0,
        )
        parameters.append(LocalTensor(place, shape))
        state_names.append(name)

    if first:
        add(WORDS, (padded, hidden), 0)
        if args.position_embedding_type == "learned_absolute":
            positions = "language_model.embedding.position_embeddings.weight"
            add(positions, (args.max_position_embeddings, hidden), None)
    for index, layer in enumerate(_layers(args, pp, number)):
        for name, shape, axis in _layer_entries(args):
            if name.endswith(_EXTRA):
                state_names.append(f"{_LAYERS}.{index}.{name}")
            else:
                add(f"{_LAYERS}.{index}.{name}", shape, axis, layer)
    if last:
        for name, shape, axis in _norm(args, "final_norm"):
            add(f"language_model.encoder.{name}", shape, axis)
        if args.untie_embeddings_and_output_weights:
            add(_OUTPUT, (padded, hidden), 0)
            state_names.append(f"language_model.output_layer.{_EXTRA}")
        elif not first:
            add(TIED, (padded, hidden), 0)
    return Chunk(tuple(parameters), (), tuple(state_names), ())


def _layers(args: Any, pp: int, number: int) -> list[Layer]:
    """Return the layers of a chunk in order."""
    chunks = args.virtual_pipeline_model_parallel_size or 1
    share = args.num_layers // args.pipeline_model_parallel_size // chunks
    start = number * (args.num_layers // chunks) + pp * share
    return [Layer(index, args.num_layers) for index in range(start, start + share)]


_Entry = tuple[str, Shape, int | None]
"""Name in the layer, local shape, axis that tensor parallelism shards."""


def _layer_entries(args: Any) -> Iterator[_Entry]:
    hidden, ways = args.hidden_size, args.tensor_model_parallel_size
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    projections = args.kv_channels * (args.num_attention_heads + 2 * groups)
    attention = args.kv_channels * args.num_attention_heads
    inner = args.ffn_hidden_size
    wide = inner * (2 if args.swiglu else 1)
    bias = args.add_bias_linear
    yield from _norm(args, "input_norm")
    yield from _linear("self_attention.query_key_value", (projections, hidden), 0, ways, bias)
    yield from _linear("self_attention.dense", (hidden, attention), 1, ways, bias)
    yield from _norm(args, "post_attention_norm")
    yield from _linear("mlp.dense_h_to_4h", (wide, hidden), 0, ways, bias)
    yield from _linear("mlp.dense_4h_to_h", (hidden, inner), 1, ways, bias)


def _norm(args: Any, name: str) -> Iterator[_Entry]:
    yield f"{name}.weight", (args.hidden_size,), None
    if args.normalization == "LayerNorm":
        yield f"{name}.bias", (args.hidden_size,), None


def _linear(name: str, shape: Shape, axis: int, ways: int, bias: bool) -> Iterator[_Entry]:
    rows, columns = shape
    yield f"{name}.weight", (rows // ways, columns) if axis == 0 else (rows, columns // ways), axis
    if bias:
        # The bias of a row-parallel layer is added after the reduction.
        yield (f"{name}.bias", (rows // ways,), 0) if axis == 0 else (f"{name}.bias", (rows,), None)
    yield f"{name}.{_EXTRA}", (), None


# ---------------------------------------------------------------------- its state dict


def flattened(state: dict[str, Any]) -> dict[str, Any]:
    """Return a model's state dict with full parameter names as keys.

    A legacy model nests the state dicts of its modules; a dict of megatron.core stays unchanged.
    """
    flat: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            module = "word_embeddings" if name == _TIED_IN_FILES else name
            flat |= {f"{module}.{rest}": inner for rest, inner in flattened(value).items()}
        else:
            flat[name] = value
    return flat


def nested(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict nested as in a legacy model; inverse of `flattened`."""
    result: dict[str, Any] = {}
    for name, value in state.items():
        module, *rest = name.split(".")
        if module == "word_embeddings":
            result.setdefault(_TIED_IN_FILES, {})[".".join(rest)] = value
            continue
        part, *rest = rest
        inner = result.setdefault(module, {}).setdefault(part, {})
        if part == _EMBEDDING:
            inner = inner.setdefault(rest.pop(0), {})
        inner[".".join(rest)] = value
    return result
