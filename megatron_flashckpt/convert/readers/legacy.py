"""Reader of Megatron's legacy format (`--ckpt-format torch`): a directory per model-parallel rank.

`mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` holds the rank's state dicts, `distrib_optim.pt` the
gathered state of the distributed optimizer. Neither file states the position of a local tensor in
the global one, so the model is rebuilt from the checkpoint's args.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_flashckpt.convert.common import ddp_buckets, safe_pickle
from megatron_flashckpt.convert.common.contents import Contents, rounded
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.common.tensor_parts import Part, global_tensors, part_of
from megatron_flashckpt.convert.readers import legacy_optimizer
from megatron_flashckpt.errors import (
    CorruptCheckpointError,
    NotCommittedError,
    UnsupportedError,
    first_few,
)
from megatron_flashckpt.file_format.file_names import parse_iteration_dir
from megatron_flashckpt.layout.piece import BUFFER, MASTER, WEIGHT
from megatron_flashckpt.megatron_lm import hyper_parameters
from megatron_flashckpt.megatron_lm.rebuild import legacy_gpt
from megatron_flashckpt.megatron_lm.rebuild.rank_model import RankModel
from megatron_flashckpt.megatron_lm.rebuild.rank_models import rank_models

MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
_COMMON = (
    "args",
    "checkpoint_version",
    "num_floating_point_operations_so_far",
    "opt_param_scheduler",
)
#: Values of common state that files lack, with --no-save-optim or of old releases.
_DEFAULTS = {"num_floating_point_operations_so_far": 0, "opt_param_scheduler": None}


@dataclasses.dataclass(frozen=True)
class RankFiles:
    """Contents of one rank's directory; tensors are read from the files when they are used."""

    directory: Path
    model: RankModel
    state: dict[str, Any]

    def chunk(self, number: int) -> dict[str, Any]:
        """Return the state dict of a model chunk."""
        state_dict: dict[str, Any] = self.state[chunk_key(self.model, number)]
        return state_dict

    @property
    def weights(self) -> dict[tuple[int, str], torch.Tensor]:
        """Parameters by chunk and name."""
        return {
            (number, parameter.name): self.chunk(number)[parameter.name]
            for number, chunk in enumerate(self.model.chunks)
            for parameter in chunk.parameters
        }


def remedy_for(directory: Path) -> str:
    """Return the remedy for a checkpoint that cannot be converted."""
    if has_ranks(directory):
        return (
            "load it with DLRover in a job of the Megatron that wrote it, and save it once with "
            "that Megatron's own save_checkpoint (import it from Megatron again)"
        )
    return (
        "load it with megatron_flashckpt in a job of the Megatron that wrote it: Megatron's own "
        "loader reads it, and the job's next save is in the format flashckpt"
    )


def has_ranks(directory: Path) -> bool:
    """Return whether `directory` holds optimizer state by rank, in DLRover's format."""
    return any(path.is_dir() for path in directory.glob("rank_*"))


def is_legacy(directory: Path) -> bool:
    """Return whether the iteration directory `directory` is in this format."""
    return next(directory.glob(f"mp_rank_*/{MODEL_FILE}"), None) is not None


def open_legacy(directory: Path, iteration: int, options: Options) -> Contents:
    """Return the checkpoint in `directory` (`iter_0000100`, or `release`: iteration 0).

    Raises:
        NotCommittedError: the directory is not in this format.
        UnsupportedError: the model cannot be rebuilt, or differs from the one in the files.
        CorruptCheckpointError: a rank's file is missing or damaged, or optimizer and weights
            contradict each other.
    """
    ranks = open_ranks(directory)
    parts = [part for rank in ranks for part in model_parts(rank)]
    accept = accepts(ranks[0], options)
    optimizer = None
    if not options.weights_only and _has_optimizer(ranks[0]):
        experts = ddp_buckets.has_experts([rank.model for rank in ranks])
        for rank in ranks:
            parts += _optimizer_parts(rank, experts=experts, accept=accept)
        optimizer = merged_groups(ranks)
    return contents_of(directory, iteration, ranks, parts, optimizer, accept=accept)


def accepts(rank: RankFiles, options: Options) -> bool:
    """Return whether weights may differ from their masters because they are one step older."""
    return options.accept_damage and ddp_buckets.gathers_late(rank.state["args"])


def _with_weights_of_masters(contents: Contents) -> Contents:
    """Return `contents` with weights that are rounded from their masters."""
    masters = {tensor.key: tensor for tensor in contents.tensors if tensor.kind == MASTER}
    tensors = [
        rounded(masters[tensor.key], contents.args, tensor)
        if tensor.kind == WEIGHT and tensor.key in masters
        else tensor
        for tensor in contents.tensors
    ]
    warning = (
        "the weights are rounded from the optimizer's masters, because of the job's "
        "--overlap-param-gather and --accept-damage"
    )
    return dataclasses.replace(contents, tensors=tensors, warnings=(*contents.warnings, warning))


def contents_of(
    directory: Path,
    iteration: int,
    ranks: list[RankFiles],
    parts: list[Part],
    optimizer: list[dict[str, Any]] | None,
    *,
    accept: bool = False,
) -> Contents:
    """Return contents with the tensors of `parts` and the side state of `ranks`.

    Args:
        accept: the weights may be older than their masters, so they are rounded from these.
    """
    first = ranks[0].state
    contents = Contents(
        place=str(directory),
        iteration=iteration,
        common={
            **_DEFAULTS,
            # The state dict of a release may have the last iteration of its training.
            **{name: first[name] for name in _COMMON if name in first},
            "iteration": iteration,
        },
        tensors=global_tensors(parts),
        optimizer=optimizer,
        rng=_random_states(ranks),
        objects=_objects(ranks),
        warnings=(
            *_differing_embeddings(ranks),
            *(() if optimizer is not None else _doubt(first["args"])),
        ),
    )
    return _with_weights_of_masters(contents) if accept and optimizer is not None else contents


def _differing_embeddings(ranks: list[RankFiles]) -> tuple[str, ...]:
    """Return a warning if the copies of tied embeddings differ; the first one is converted."""
    stages = {(rank.model.tp, rank.model.pp): rank.weights for rank in ranks}
    last = max(pp for _, pp in stages)
    names = (legacy_gpt.WORDS, legacy_gpt.TIED)
    for tp in {tp for tp, _ in stages}:
        copies = [
            [weight for (_, name), weight in stages[tp, pp].items() if name == wanted_name]
            for pp, wanted_name in zip((0, last), names, strict=True)
        ]
        if all(copies) and not torch.equal(copies[0][0], copies[1][0]):
            return (
                "the tied embeddings of the first and the last pipeline stage differ (a defect of "
                "Megatron before February 2024 with the distributed optimizer); the first "
                "stage's are converted, so losses will differ from those of the job that saved",
            )
    return ()


def _doubt(args: Any) -> tuple[str, ...]:
    """Return a warning on weights that cannot be compared with masters."""
    if not (ddp_buckets.is_early(args) and ddp_buckets.gathers_late(args)):
        return ()
    return (
        "with the job's --overlap-param-gather its Megatron may have saved the weights before the "
        "last step; a conversion of weights alone cannot detect that",
    )


def open_ranks(directory: Path) -> list[RankFiles]:
    """Return the files of all ranks, after a comparison with the model of their args."""
    first = next(iter(sorted(directory.glob(f"mp_rank_*/{MODEL_FILE}"))), None)
    if first is None:
        raise NotCommittedError(
            f"{directory}: no mp_rank_*/{MODEL_FILE}; give an iteration directory that Megatron "
            "saved with --ckpt-format torch"
        )
    state = safe_pickle.load(first, str(first), mmap=True)
    if not isinstance(state, dict) or "args" not in state:
        raise CorruptCheckpointError(f"{first}: holds no args; convert another iteration")
    models = rank_models(state["args"])
    places = {model: directory / rank_directory(model, state["args"]) for model in models}
    missing = [str(place) for place in places.values() if not (place / MODEL_FILE).is_file()]
    if missing:
        raise CorruptCheckpointError(
            f"{directory}: no {MODEL_FILE} in {', '.join(missing)}; convert another iteration"
        )
    ranks = [
        RankFiles(place, model, _load(place / MODEL_FILE, model)) for model, place in places.items()
    ]
    _refuse_another_save(directory, ranks)
    _refuse_another_model(directory, ranks)
    return ranks


def rank_directory(model: RankModel, args: Any) -> str:
    """Return Megatron's name of a rank's directory."""
    name = f"mp_rank_{model.tp:02d}"
    if args.pipeline_model_parallel_size > 1:
        name += f"_{model.pp:03d}"
    if getattr(args, "expert_model_parallel_size", 1) > 1:
        name += f"_{model.ep:03d}"
    return name


def chunk_key(model: RankModel, number: int) -> str:
    """Return the name of a chunk's state dict."""
    return "model" if len(model.chunks) == 1 else f"model{number}"


def _load(path: Path, model: RankModel) -> dict[str, Any]:
    state = safe_pickle.load(path, str(path), mmap=True)
    if not isinstance(state, dict):
        raise CorruptCheckpointError(f"{path}: is not a state dict; convert another iteration")
    chunks = [chunk_key(model, number) for number in range(len(model.chunks))]
    named = {key: legacy_gpt.flattened(state[key]) for key in chunks if key in state}
    return {**state, **named}


def _refuse_another_save(directory: Path, ranks: list[RankFiles]) -> None:
    """Raise if files and their directory have different iterations; a release may."""
    expected = parse_iteration_dir(directory.name)
    foreign_files = [
        f"{rank.directory.name} of iteration {rank.state['iteration']}"
        for rank in ranks
        if expected is not None and rank.state.get("iteration", expected) != expected
    ]
    if foreign_files:
        raise CorruptCheckpointError(
            f"{directory}: holds files of another save: {first_few(foreign_files)}; "
            "convert another iteration"
        )


def _refuse_another_model(directory: Path, ranks: list[RankFiles]) -> None:
    problems = []
    for rank in ranks:
        for number, chunk in enumerate(rank.model.chunks):
            key = chunk_key(rank.model, number)
            stored = {
                name: tuple(value.shape)
                for name, value in rank.state.get(key, {}).items()
                if isinstance(value, torch.Tensor) and not name.endswith("_extra_state")
            }
            expected = {tensor.name: tensor.shape for tensor in (*chunk.parameters, *chunk.buffers)}
            problems += [
                f"{rank.directory.name}/{key} {name} is {stored.get(name, 'missing')}, "
                f"expected {expected.get(name, 'none')} by the args"
                for name in sorted(stored.keys() | expected.keys())
                if stored.get(name) != expected.get(name)
            ]
    if problems:
        raise UnsupportedError(
            f"{directory}: its model differs from the GPT that its args describe: "
            f"{first_few(problems, '; ', most=4)}; {remedy_for(directory)}"
        )


def model_parts(rank: RankFiles) -> Iterator[Part]:
    """Yield the parameters and buffers of a rank."""
    for number, chunk in enumerate(rank.model.chunks):
        state = rank.chunk(number)
        for parameter in chunk.parameters:
            yield part_of(parameter.geometry, WEIGHT, state[parameter.name])
        for buffer in chunk.buffers:
            yield part_of(buffer.geometry, BUFFER, state[buffer.name])


def _has_optimizer(rank: RankFiles) -> bool:
    args = rank.state["args"]
    released = rank.directory.parent.name == "release"
    return "optimizer" in rank.state or not (released or getattr(args, "no_save_optim", None))


def merged_groups(ranks: list[RankFiles]) -> list[dict[str, Any]]:
    """Return the param groups, steps and scalers of all ranks, each once.

    Raises:
        CorruptCheckpointError: an optimizer has no param groups.
    """
    for rank in ranks:
        states = legacy_optimizer.listed(rank.state["optimizer"])
        if not all("param_groups" in state.get("optimizer", state) for state in states):
            raise CorruptCheckpointError(
                f"{rank.directory / MODEL_FILE}: its optimizer has no param groups; "
                f"{remedy_for(rank.directory)}"
            )
    return hyper_parameters.merge(
        [legacy_optimizer.hyper_parameters(rank.state["optimizer"]) for rank in ranks]
    )


def _optimizer_parts(rank: RankFiles, *, experts: bool, accept: bool) -> list[Part]:
    args = rank.state["args"]
    distributed = getattr(args, "use_distributed_optimizer", False)
    file = rank.directory / (OPTIMIZER_FILE if distributed else MODEL_FILE)
    if not file.is_file() or "optimizer" not in rank.state:
        raise CorruptCheckpointError(
            f"{file}: holds no optimizer state, although the run saved it (rank_*/{OPTIMIZER_FILE} "
            f"of DLRover is missing too); {ddp_buckets.REMEDY}"
        )
    model = (rank.model, rank.weights, args)
    if not distributed:
        return legacy_optimizer.plain(*model, rank.state["optimizer"], str(file), experts=experts)
    stored = safe_pickle.load(file, str(file), mmap=True)
    return legacy_optimizer.distributed(*model, stored, str(file), experts=experts, accept=accept)


def _random_states(ranks: list[RankFiles]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    result: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for rank in ranks:
        states = rank.state.get("rng_state")
        if isinstance(states, list):
            result.setdefault((rank.model.pp, rank.model.tp), states)
    return result


def _objects(ranks: list[RankFiles]) -> dict[str, Any]:
    """Return the extra states of modules by Megatron's global key."""
    return {
        key: value
        for rank in ranks
        for number, chunk in enumerate(rank.model.chunks)
        for name, key in chunk.objects
        if (value := rank.chunk(number).get(name)) is not None
    }
