"""Writer of a Hugging Face model: weights by its names, beside the files of a template.

`config.json` and the tokenizer are copied from the template. Every tensor's shape must be the one
that `config.json` describes, and Megatron's arguments must mean the same model.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_flashckpt.convert.common.contents import Contents
from megatron_flashckpt.convert.common.named_regions import NamedRegion, named_regions
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.common.output_dir import new_directory
from megatron_flashckpt.convert.common.safetensors_files import StoredTensor, write_files
from megatron_flashckpt.convert.hugging_face.architectures import Model, model_of
from megatron_flashckpt.convert.hugging_face.hf_config import read_config
from megatron_flashckpt.convert.hugging_face.rows import HfTensor, Match, refuse_differences, taken
from megatron_flashckpt.errors import ConfigError, UnsupportedError

#: Files of a template that are not copied: weights, and lists of them.
_WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf", "*.ckpt", "*.onnx"),
    *("*.ot", "*.index.json", ".*"),
)
#: Arguments that shapes determine, or that no tensor and no computation depends on.
_OF_SHAPES = (
    *("ffn_hidden_size", "hidden_size", "max_position_embeddings", "moe_ffn_hidden_size"),
    *("moe_layer_freq", "moe_shared_expert_intermediate_size", "num_experts", "num_layers"),
    *("vocab_size", "padded_vocab_size"),
)


@dataclasses.dataclass
class _Source:
    """Megatron's tensor for several tensors of the result: it is read once for all of them."""

    region: NamedRegion
    remaining: int
    """Number of tensors that were not written yet."""
    data: torch.Tensor | None = None

    def take(self, part: HfTensor) -> Iterator[torch.Tensor]:
        if self.data is None:
            self.data = self.region.read()
        result = taken(self.data, part)
        self.remaining -= 1
        if not self.remaining:
            self.data = None
        yield result


def write_hf(contents: Contents, directory: Path, options: Options) -> Path:
    """Write a model directory, the template's files first; return it.

    Raises:
        ConfigError: the directory is not empty and may not be replaced, or the template is not
            complete.
        UnsupportedError: the checkpoint is not the model of the template.
    """
    template = options.hf_config
    if template is None:
        raise ConfigError(
            "--to hf copies config.json and the tokenizer from a directory; name it with "
            "--hf-config DIR"
        )
    config = read_config(template)
    model = model_of(config)
    _refuse_other_arguments(contents, model, config.place)
    tensors = list(_tensors(contents, model, config.place))
    with new_directory(directory.resolve(), overwrite=options.overwrite) as fresh:
        for path in sorted(template.iterdir()):
            if path.is_file() and not any(path.match(pattern) for pattern in _WEIGHTS):
                shutil.copyfile(path, fresh / path.name)
        write_files(fresh, tensors, options.shard_nbytes)
    return directory


def _tensors(contents: Contents, model: Model, place: str) -> Iterator[StoredTensor]:
    """Yield the tensors of the result, those of one source one after the other."""
    regions = {region.name: region for region in named_regions(contents.tensors)}
    missing, wrong = [], []
    pairs: list[tuple[NamedRegion, Match]] = []
    for match in model.matches():
        region = next((regions.pop(name) for name in match.names if name in regions), None)
        if region is None:
            missing.append(match.names[0])
        elif not match.fits(region.shape):
            wrong.append(f"{region.name} has {region.shape}, expected {match.shape}")
        else:
            pairs.append((region, match))
    refuse_differences(
        contents.place,
        place,
        "give the template of this model with --hf-config DIR",
        missing=missing,
        extra=sorted(regions),
        wrong=wrong,
    )
    for region, match in pairs:
        (part, *others) = match.parts
        if not others and not part.transposed and len(part.rows) == 1:
            yield region.first_rows(part.shape[0], part.name).stored()
        else:
            source = _Source(region, len(match.parts))
            for part in match.parts:
                take = functools.partial(source.take, part)
                yield StoredTensor(part.name, region.dtype, part.shape, take)


def _refuse_other_arguments(contents: Contents, model: Model, place: str) -> None:
    """Raise if an argument of the job changes what the model computes.

    Arguments that the saving release did not have are not compared.
    """
    saved = _effective(vars(contents.args))
    differing = [
        f"{name} is {saved[name]!r}, expected {expected!r}"
        for name, expected in sorted(_effective(model.args).items())
        if name in saved and name not in _OF_SHAPES and not _equal(saved[name], expected)
    ]
    if differing:
        raise UnsupportedError(
            f"{contents.place}: its training arguments are not those of {place}: "
            f"{'; '.join(differing)}; nothing was written; give the template of this model with "
            "--hf-config DIR, or correct its config.json"
        )


def _effective(args: dict[str, Any]) -> dict[str, Any]:
    """Return arguments without values that other arguments disable."""
    result = dict(args)
    if not args.get("group_query_attention"):
        result["num_query_groups"] = args.get("num_attention_heads")
    result.pop("group_query_attention", None)
    if not args.get("use_rope_scaling"):
        result.pop("rope_scaling_factor", None)
    if "moe_router_topk_scaling_factor" in result:
        result["moe_router_topk_scaling_factor"] = result["moe_router_topk_scaling_factor"] or 1.0
    unused = []
    if args.get("multi_latent_attention"):
        unused += ["num_query_groups", "kv_channels"]
        # YaRN with a factor of 1 is no scaling.
        if (result.pop("rope_type", None) or "yarn") != "yarn":
            result["rotary_scaling_factor"] = 1.0
        if result.get("rotary_scaling_factor", 1.0) == 1.0:
            unused += ["mscale", "mscale_all_dim"]
    if args.get("moe_router_score_function") == "sigmoid":
        unused.append("moe_router_pre_softmax")
    if args.get("swiglu"):
        unused.append("bias_gelu_fusion")
    return {name: value for name, value in result.items() if name not in unused}


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other or (not one and not other))
