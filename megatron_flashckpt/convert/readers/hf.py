"""Reader of a Hugging Face model: weights by Megatron's keys, from which a training starts."""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from megatron_flashckpt.convert.common.contents import Contents, GlobalTensor, of_boxes
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.common.safetensors_files import StoredInFile, tensors_in
from megatron_flashckpt.convert.hugging_face.architectures import Model, model_of
from megatron_flashckpt.convert.hugging_face.hf_config import CONFIG, read_config
from megatron_flashckpt.convert.hugging_face.rows import Match, refuse_differences
from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.file_format.file_names import TRACKER
from megatron_flashckpt.layout.piece import BUFFER, WEIGHT
from megatron_flashckpt.layout.reshard import Box

#: Megatron pads the vocabulary to a multiple of this by default, on one tensor parallel rank.
_PADDING = 128
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
#: Tensors that old files have and models compute: masks, frequencies.
_COMPUTED = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
#: Tensors of Megatron that are no parameters.
_BUFFERS = re.compile(r"\.router\.expert_bias$")


def is_hf(directory: Path) -> bool:
    """Return whether `directory` is a Hugging Face model and not a save directory."""
    return (directory / CONFIG).is_file() and not (directory / TRACKER).exists()


def open_hf(directory: Path, iteration: int, options: Options) -> Contents:
    """Return the weights of a model as `iteration`, 0, of a job without parallelism.

    Raises:
        ConfigError: `config.json` is missing or not complete.
        CorruptCheckpointError: a file of weights is damaged.
        UnsupportedError: the architecture is unknown, or the tensors are not those that
            `config.json` describes.
    """
    config = read_config(options.hf_config or directory)
    model = model_of(config)
    matches = list(model.matches())
    stored = _with_prefix(tensors_in(directory), model)
    _refuse_others(stored, matches, directory, config.place)
    by_key: dict[str, dict[tuple[int, ...], Match]] = defaultdict(dict)
    for match in matches:
        key, place = _place(match.names[0], numbered=model.numbered_layers)
        by_key[key][place] = match
    tensors = [_global_tensor(key, of_key, stored) for key, of_key in sorted(by_key.items())]
    return Contents(
        place=str(directory),
        iteration=iteration,
        common={
            "args": _args(model, tensors),
            "checkpoint_version": 3.0,
            "iteration": iteration,
            "num_floating_point_operations_so_far": 0.0,
            "opt_param_scheduler": None,
        },
        tensors=tensors,
        optimizer=None,
    )


def _with_prefix(stored: dict[str, StoredInFile], model: Model) -> dict[str, StoredInFile]:
    """Return the tensors by their names in a model with a head; GPT-2 was published without."""
    prefix = model.layer_prefix.partition(".")[0] + "."
    if any(name.startswith(prefix) for name in stored):
        return stored
    return {prefix + name: tensor for name, tensor in stored.items()}


def _refuse_others(
    stored: dict[str, StoredInFile], matches: list[Match], directory: Path, place: str
) -> None:
    """Raise if the tensors of the model are not those of `matches`."""
    expected = {part.name: part.shape for match in matches for part in match.parts}
    # Some files hold tied embeddings twice, and transformers ignores the second.
    computed = {"lm_head.weight"} | {name for name in stored if _COMPUTED.search(name)}
    missing = sorted(expected.keys() - stored.keys())
    extra = sorted(stored.keys() - expected.keys() - computed)
    wrong = [
        f"{name} has {stored[name].shape}, expected {shape}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    refuse_differences(
        str(directory),
        place,
        "give the weights and the config.json of one model",
        missing=missing,
        extra=extra,
        wrong=wrong,
    )
    for match in matches:
        names = [part.name for part in match.parts]
        if len({stored[name].dtype for name in names}) > 1:
            raise UnsupportedError(
                f"{directory}: {', '.join(names)} have different types, and are one tensor in "
                "Megatron; save the model in one type with transformers"
            )


def _place(name: str, *, numbered: bool) -> tuple[str, tuple[int, ...]]:
    """Return the key of a tensor in Megatron's sharded state dict, and its stacked numbers."""
    place = []
    if not numbered and (layer := _LAYER.match(name)):
        place.append(int(layer[1]))
        name = _LAYER.sub("decoder.layers.", name)
    if expert := _EXPERT.search(name):
        place.append(int(expert[1]))
        name = _EXPERT.sub(".experts.experts.", name)
    return name, tuple(place)


def _global_tensor(
    key: str, matches: dict[tuple[int, ...], Match], stored: dict[str, StoredInFile]
) -> GlobalTensor:
    """Return the tensor that stacks `matches`, by the numbers of their layer and expert."""
    first = matches[min(matches)]
    rows, *inner = first.shape
    shape = (-(-rows // _PADDING) * _PADDING if first.padded else rows, *inner)
    counts = tuple(max(numbers) + 1 for numbers in zip(*matches, strict=True))
    boxes = {
        ((*place, *(0 for _ in shape)), (*(1 for _ in place), *shape)): match
        for place, match in matches.items()
    }
    dtypes = {box: stored[match.parts[0].name].dtype for box, match in boxes.items()}

    def read_box(box: Box) -> torch.Tensor:
        tensors = (stored[part.name].read() for part in boxes[box].parts)
        return boxes[box].assemble(shape, tensors, dtypes[box]).view(box[1])

    kind = BUFFER if _BUFFERS.search(key) else WEIGHT
    return of_boxes(key, kind, dtypes[min(dtypes)], (*counts, *shape), dtypes, read_box)


def _args(model: Model, tensors: list[GlobalTensor]) -> argparse.Namespace:
    """Return the arguments of a job that would have saved the model."""
    embedding = next(t for t in tensors if t.key == "embedding.word_embeddings.weight")
    layout: dict[str, Any] = {
        "bf16": embedding.dtype == torch.bfloat16,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "data_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "fp16": embedding.dtype == torch.float16,
        "make_vocab_size_divisible_by": _PADDING,
        "padded_vocab_size": embedding.shape[0],
        "params_dtype": embedding.dtype,
        "pipeline_model_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "transformer_impl": "transformer_engine",
        "virtual_pipeline_model_parallel_size": None,
        "world_size": 1,
    }
    return argparse.Namespace(**model.args, **layout)
