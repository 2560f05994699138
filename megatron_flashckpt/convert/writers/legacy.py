"""Writer of Megatron's legacy format, for the parallel layout in the checkpoint's args."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from megatron_flashckpt.convert.common import ddp_buckets
from megatron_flashckpt.convert.common.contents import Contents
from megatron_flashckpt.convert.common.frozen import refuse_partial_state
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.common.output_dir import (
    megatrons_directory,
    move_tracker,
    new_directory,
    save,
)
from megatron_flashckpt.convert.common.tensor_parts import ByKey, by_kind, local_tensor
from megatron_flashckpt.convert.readers.legacy import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    chunk_key,
    rank_directory,
)
from megatron_flashckpt.convert.writers import legacy_optimizer
from megatron_flashckpt.errors import MissingStateError
from megatron_flashckpt.layout.piece import BUFFER, WEIGHT
from megatron_flashckpt.megatron_lm.rebuild import legacy_gpt
from megatron_flashckpt.megatron_lm.rebuild.rank_model import Chunk, RankModel
from megatron_flashckpt.megatron_lm.rebuild.rank_models import rank_models

#: Remedy for a model that cannot be rebuilt.
_ANOTHER_FORMAT = "convert with --to torch_dist, which does not depend on the model"


def write_legacy(contents: Contents, root: Path, options: Options) -> Path:
    """Write `contents` as an iteration of `root`; return its directory.

    The function needs memory for the files of one model-parallel rank.

    Raises:
        ConfigError: a checkpoint of that iteration exists and may not be replaced.
        UnsupportedError: the model cannot be rebuilt from the args, or masters are split between
            weights and optimizer, or only some layers that share a key were frozen.
        MissingStateError: the tensors of the args' model differ from those of `contents`.
    """
    refuse_partial_state(contents)
    models = rank_models(contents.args, _ANOTHER_FORMAT)
    tensors = by_kind(contents.tensors)
    _refuse_another_model(contents, models, tensors)
    experts = ddp_buckets.has_experts(models)
    legacy = legacy_gpt.is_legacy_gpt(contents.args)
    args = copy.copy(contents.args)
    changes = {"ckpt_format": "torch", "use_dist_ckpt": False}
    vars(args).update({name: value for name, value in changes.items() if hasattr(args, name)})
    # A reader of weights alone does not take missing state for damage.
    if contents.optimizer is None:
        args.no_save_optim = True
    if not contents.rng:
        args.no_save_rng = True
    directory = megatrons_directory(root, contents.iteration)
    with new_directory(directory, overwrite=options.overwrite) as fresh:
        for model in models:
            place = fresh / rank_directory(model, contents.args)
            place.mkdir()
            state = {
                **contents.common,
                "args": args,
                "iteration": contents.iteration,
                **{
                    chunk_key(model, number): _chunk_state(
                        chunk, tensors, contents.objects, legacy=legacy
                    )
                    for number, chunk in enumerate(model.chunks)
                },
            }
            rng = contents.rng.get((model.pp, model.tp))
            if rng:
                state["rng_state"] = rng
            if contents.optimizer is not None:
                state["optimizer"], buffers = legacy_optimizer.of_rank(
                    model, contents, tensors, experts=experts
                )
                if buffers is not None:
                    save(buffers, place / OPTIMIZER_FILE)
            save(state, place / MODEL_FILE)
    move_tracker(root, contents.iteration)
    return directory


def _chunk_state(
    chunk: Chunk, tensors: dict[str, ByKey], objects: dict[str, Any], *, legacy: bool
) -> dict[str, Any]:
    held = {
        tensor.name: local_tensor(tensor.geometry, tensor.numel, tensors[kind]).view(tensor.shape)
        for kind, of_kind in ((WEIGHT, chunk.parameters), (BUFFER, chunk.buffers))
        for tensor in of_kind
    }
    keys = dict(chunk.objects)
    state = {
        name: held[name] if name in held else objects.get(keys.get(name, ""))
        for name in chunk.state_names
    }
    return legacy_gpt.nested(state) if legacy else state


def _refuse_another_model(
    contents: Contents, models: list[RankModel], tensors: dict[str, ByKey]
) -> None:
    known = {
        key: tensor.shape
        for kind in (WEIGHT, BUFFER)
        for key, tensor in tensors.get(kind, {}).items()
    }
    wanted: dict[str, tuple[int, ...]] = {}
    resizable = set()
    for model in models:
        for chunk in model.chunks:
            for tensor in (*chunk.parameters, *chunk.buffers):
                wanted |= {run.key: run.global_shape for run in tensor.geometry.runs}
                resizable |= {run.key for run in tensor.geometry.runs if tensor.geometry.resizable}
    problems = [
        f"{key} is {known.get(key, 'missing')}, expected {wanted.get(key, 'none')} by the args"
        for key in sorted(known.keys() | wanted.keys())
        if known.get(key) != wanted.get(key)
        and not (key in resizable and key in known and known[key][1:] == wanted[key][1:])
    ]
    if problems:
        raise MissingStateError(
            f"{contents.place}: its model differs from the GPT that its args describe: "
            f"{'; '.join(problems)}; {_ANOTHER_FORMAT}"
        )
