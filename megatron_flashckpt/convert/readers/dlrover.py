"""Reader of DLRover's Megatron flash checkpoint (`megatron_dist_ckpt`).

Weights are in Megatron's legacy files, in later releases with the param groups. Each rank's own
shards of the distributed optimizer are in `rank_RRRRR/distrib_optim.pt`, by bucket, param group and
position in the group: `{bucket: {group: {position: {param, exp_avg, exp_avg_sq[, step]}}}}`. The
shards have no names of parameters, so the reader computes Megatron's bucket layout, and proves it
by a comparison of masters with weights.

DLRover counts the ranks that have finished, not their files, so it can commit a directory that
lacks files, or holds files of two saves.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from megatron_flashckpt.convert.common import ddp_buckets, safe_pickle
from megatron_flashckpt.convert.common.contents import Contents
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.common.tensor_parts import Part
from megatron_flashckpt.convert.readers import legacy_optimizer
from megatron_flashckpt.convert.readers.legacy import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    RankFiles,
    accepts,
    contents_of,
    is_legacy,
    merged_groups,
    model_parts,
    open_ranks,
)
from megatron_flashckpt.convert.readers.legacy_optimizer import GroupClass, class_of, group_classes
from megatron_flashckpt.errors import CorruptCheckpointError, UnsupportedError, first_few

#: Cause of shards that do not match the weights.
MIXED = "DLRover committed files of two saves in one directory"

_Shards = dict[int, dict[int, dict[int, dict[str, Any]]]]
"""Tensors of one rank by bucket, group and position."""


def open_dlrover(directory: Path, iteration: int, options: Options) -> Contents:
    """Return the checkpoint in `directory`.

    Raises:
        UnsupportedError: the model cannot be rebuilt, or has experts.
        CorruptCheckpointError: a rank's files are missing, or belong to another save or model.
    """
    if not is_legacy(directory):
        raise CorruptCheckpointError(
            f"{directory}: holds optimizer state by rank, but no mp_rank_*/{MODEL_FILE}: DLRover "
            "committed it without the weights; convert another iteration"
        )
    ranks = open_ranks(directory)
    parts = [part for rank in ranks for part in model_parts(rank)]
    if options.weights_only:
        return contents_of(directory, iteration, ranks, parts, None)
    args = ranks[0].state["args"]
    accept = accepts(ranks[0], options)
    shards = _load_shards(directory, args)
    if ddp_buckets.has_experts([rank.model for rank in ranks]):
        raise UnsupportedError(
            f"{directory}: DLRover's names for the optimizer state of experts are ambiguous; "
            "convert the weights alone with --weights-only"
        )
    for rank in ranks:
        parts += _optimizer_parts(rank, shards, accept=accept)
    if "optimizer" in ranks[0].state:
        groups = merged_groups(ranks)
        return contents_of(directory, iteration, ranks, parts, groups, accept=accept)
    if getattr(args, "decoupled_lr", None) is not None or getattr(args, "use_mup", False):
        raise UnsupportedError(
            f"{directory}: this DLRover did not save the optimizer's param groups, which cannot be "
            "derived from the args with --decoupled-lr or --use-mup; convert the weights alone "
            "with --weights-only"
        )
    steps = _steps(shards)
    groups = [_hyper_parameters(args, max(steps, default=float(iteration)))]
    contents = contents_of(directory, iteration, ranks, parts, groups, accept=accept)
    if steps:
        return contents
    warning = (
        f"this DLRover did not save the optimizer's step count, so the iteration, {iteration}, is "
        "used instead; that is too high by skipped iterations, and wrong if the run began with "
        "--finetune"
    )
    return dataclasses.replace(contents, warnings=(*contents.warnings, warning))


def _load_shards(directory: Path, args: Any) -> list[_Shards]:
    """Return the shards of every rank of the saving job, in rank order."""
    names = [f"rank_{rank:05d}" for rank in range(int(args.world_size))]
    present = {path.name for path in directory.iterdir() if path.name.startswith("rank_")}
    if extra := sorted(present - set(names)):
        raise CorruptCheckpointError(
            f"{directory}: the job had {len(names)} ranks, but the checkpoint also has "
            f"{first_few(extra)}: {MIXED}; {ddp_buckets.REMEDY}"
        )
    files = [directory / name / OPTIMIZER_FILE for name in names]
    of_ranks = [_of_file(file) if file.is_file() else {} for file in files]
    empty_files = [str(file) for file, shards in zip(files, of_ranks, strict=True) if not shards]
    if empty_files:
        reason = (
            "DLRover writes none where Megatron chains optimizers"
            if len(empty_files) == len(files)
            else "DLRover committed it without them"
        )
        raise CorruptCheckpointError(
            f"{directory}: {len(empty_files)} of {len(files)} ranks have no optimizer tensors "
            f"({first_few(empty_files, most=4)}), so the optimizer state is not in this checkpoint "
            f"({reason}); {ddp_buckets.REMEDY}"
        )
    return of_ranks


def _of_file(file: Path) -> _Shards:
    """Return the shards of one rank; empty if the file has none."""
    stored = safe_pickle.load(file, str(file), mmap=True)
    # A list has the sub-optimizers of a chained optimizer, with None for missing state.
    states = [state for state in (stored if isinstance(stored, list) else [stored]) if state]
    return states[0] if states else {}


def _optimizer_parts(rank: RankFiles, shards: list[_Shards], *, accept: bool) -> list[Part]:
    """Return the optimizer state of one model-parallel rank.

    Args:
        accept: accept shards of the right sizes without a comparison with the weights.
    """
    args = rank.state["args"]
    model = rank.model
    where = f"{rank.directory.parent}: optimizer of (tp {model.tp}, pp {model.pp})"
    stage = len(shards) // args.pipeline_model_parallel_size
    first = model.pp * stage + model.tp
    numbers = range(first, first + stage, args.tensor_model_parallel_size)
    replicas = [shards[number] for number in numbers]
    (chunks,) = ddp_buckets.sub_optimizers(model, args, experts=False)
    dtypes = {name: weight.dtype for name, weight in rank.weights.items()}
    orders = _orders(
        rank, {class_of(parameter, args) for _, of_chunk in chunks for parameter in of_chunk}
    )
    layouts: list[tuple[list[ddp_buckets.Buffer], list[list[_OwnedRange]]]] = []
    differing_replicas: list[list[int]] = []
    for rules in ddp_buckets.RULES:
        layout = ddp_buckets.buffers(model, args, chunks, dtypes, rules)
        multiple = math.lcm(len(replicas), rules.end_multiple)
        owned = _owned(layout, len(replicas), multiple)
        if (layout, owned) in layouts:
            continue
        layouts.append((layout, owned))
        for order in orders:
            held = _held(owned, replicas, order, args)
            if held is None:
                continue
            differing = [] if accept else _contradicting_replicas(held, rank)
            if not differing:
                return _parts(layout, held, rank, where)
            differing_replicas.append(differing)
    if not differing_replicas:
        raise CorruptCheckpointError(
            f"{where}: the sizes of its shards do not follow from the args; {ddp_buckets.REMEDY}"
        )
    # A layout in which the shards of some replicas match the weights is right.
    differing = min(differing_replicas, key=len)
    files = first_few([f"rank_{numbers[replica]:05d}" for replica in differing])
    raise CorruptCheckpointError(
        f"{where}: the masters in {files} do not round to the weights in {rank.directory.name}: "
        f"{MIXED}; {ddp_buckets.remedy(args)}"
    )


def _orders(rank: RankFiles, classes: set[GroupClass]) -> list[tuple[GroupClass, ...]]:
    """Return the possible orders of the param groups.

    Args:
        classes: classes of this rank's parameters.
    """
    if "optimizer" not in rank.state:
        return list(itertools.permutations(sorted(classes)))
    (saved,) = legacy_optimizer.hyper_parameters(rank.state["optimizer"])
    order = tuple(group_classes(saved["param_groups"], rank.state["args"]))
    return [order] if classes <= set(order) else []


_OwnedRange = tuple[ddp_buckets.Place, int, int]
"""Range of one parameter that one replica owns: start and end in the flattened parameter."""


def _owned(
    layout: list[ddp_buckets.Buffer], replicas: int, multiple: int
) -> list[list[_OwnedRange]]:
    """Return the ranges that each replica owns, in the order of its buckets."""
    result: list[list[_OwnedRange]] = [[] for _ in range(replicas)]
    for buffer in layout:
        for place in buffer.places:
            padded = -(-buffer.bucket_numels[place.bucket] // multiple) * multiple
            share = padded // replicas
            for replica, own_ranges in enumerate(result):
                start = max(share * replica - place.start, 0)
                end = min(share * (replica + 1) - place.start, place.parameter.numel)
                if start < end:
                    own_ranges.append((place, start, end))
    return result


_Held = dict[ddp_buckets.Place, list[tuple[int, int, dict[str, torch.Tensor]]]]
"""Shards of each parameter: start, owning replica and tensors."""


def _held(
    owned: list[list[_OwnedRange]],
    replicas: list[_Shards],
    order: tuple[GroupClass, ...],
    args: Any,
) -> _Held | None:
    """Return the shards by parameter; None if this order of groups contradicts their sizes."""
    result: _Held = defaultdict(list)
    for replica, (own_ranges, shards) in enumerate(zip(owned, replicas, strict=True)):
        positions = dict.fromkeys(order, 0)
        for place, start, end in own_ranges:
            kind = class_of(place.parameter, args)
            of_bucket = shards.get(place.bucket, {})
            tensors = of_bucket.get(order.index(kind), {}).get(positions[kind])
            if tensors is None or tensors[ddp_buckets.MAIN].numel() != end - start:
                return None
            positions[kind] += 1
            result[place].append((start, replica, tensors))
    return result


def _contradicting_replicas(held: _Held, rank: RankFiles) -> list[int]:
    """Return the replicas with a shard that does not round to the weights of `rank`."""
    replicas = set()
    for place, shards in held.items():
        weight = rank.weights[place.chunk, place.parameter.name].reshape(-1)
        for start, replica, tensors in shards:
            master = tensors[ddp_buckets.MAIN].reshape(-1)
            if not ddp_buckets.is_rounded(weight[start : start + master.numel()], master):
                replicas.add(replica)
    return sorted(replicas)


def _parts(
    layout: list[ddp_buckets.Buffer], held: _Held, rank: RankFiles, where: str
) -> list[Part]:
    def weight(place: ddp_buckets.Place) -> torch.Tensor:
        return rank.weights[place.chunk, place.parameter.name]

    parts = []
    for buffer in layout:
        _, _, tensors = held[buffer.places[0]][0]
        states = {name: value.dtype for name, value in tensors.items() if name != "step"}
        read = functools.partial(_read, held)
        # All masters were compared already, or their differences are accepted.
        parts += ddp_buckets.buffer_parts(buffer, states, weight, read, where, remedy=None)
    return parts


def _read(held: _Held, state: str, at: ddp_buckets.Place, start: int, end: int) -> torch.Tensor:
    shards = [(low, tensors[state].reshape(-1)) for low, _, tensors in held[at]]
    return torch.cat([shard[max(start - low, 0) : max(end - low, 0)] for low, shard in shards])


def _steps(shards: list[_Shards]) -> set[float]:
    return {
        float(tensors["step"])
        for of_rank in shards
        for of_bucket in of_rank.values()
        for of_group in of_bucket.values()
        for tensors in of_group.values()
        if "step" in tensors
    }


def _hyper_parameters(args: Any, step: float) -> dict[str, Any]:
    """Return the param groups that the args describe, if none were saved.

    When the job resumes, the saved scheduler sets learning rate and weight decay.
    """
    group = {
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": True,
        "lr": args.lr,
        "max_lr": args.lr,
        "min_lr": args.min_lr,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_eps,
        "weight_decay": args.weight_decay,
        "bias_correction": True,
    }
    groups = [{**group, "wd_mult": 1.0}, {**group, "wd_mult": 0.0, "weight_decay": 0.0}]
    return {"param_groups": groups, "step": step, "grad_scaler": None}
