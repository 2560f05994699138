"""Read Megatron's legacy format (`--ckpt-format torch`): one directory per model-parallel rank.

`mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` holds the rank's state dicts, `distrib_optim.pt` the
gathered state of the distributed optimizer. Neither says where a local tensor lies in the global
one: the model is rebuilt from the checkpoint's args for that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_flashckpt.convert.common import ddp_buckets, safe_pickle
from megatron_flashckpt.convert.common.contents import Contents, GlobalTensor, read_region
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.common.tensor_parts import Part, global_tensors, part_of
from megatron_flashckpt.convert.readers import legacy_optimizer
from megatron_flashckpt.errors import CorruptCheckpointError, NotCommittedError, UnsupportedError
from megatron_flashckpt.file_format.file_names import parse_iteration_dir
from megatron_flashckpt.layout.piece import BUFFER, MASTER, WEIGHT
from megatron_flashckpt.layout.reshard import Box
from megatron_flashckpt.megatron_lm import hyper_parameters
from megatron_flashckpt.megatron_lm.rebuild import legacy_gpt
from megatron_flashckpt.megatron_lm.rebuild.rank_model import RankModel
from megatron_flashckpt.megatron_lm.rebuild.rank_models import rank_models

#: Problems of one kind that a message names.
_SHOWN = 4
MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
_COMMON = (
    "args",
    "checkpoint_version",
    "num_floating_point_operations_so_far",
    "opt_param_scheduler",
)


@dataclasses.dataclass(frozen=True)
class RankFiles:
    """What one rank's directory holds; tensors are read from the files when they are used."""

    directory: Path
    model: RankModel
    state: dict[str, Any]

    def chunk(self, number: int) -> dict[str, Any]:
        """Return the state dict of a model chunk."""
        found: dict[str, Any] = self.state[chunk_key(self.model, number)]
        return found

    @property
    def weights(self) -> dict[tuple[int, str], torch.Tensor]:
        """Parameters by chunk and name."""
        return {
            (number, parameter.name): self.chunk(number)[parameter.name]
            for number, chunk in enumerate(self.model.chunks)
            for parameter in chunk.parameters
        }


def some(problems: list[str], separator: str = ", ") -> str:
    """Return the first few of `problems`, for a message."""
    more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return separator.join(problems[:_SHOWN]) + more


def way_out(directory: Path) -> str:
    """Return how to move a checkpoint that cannot be converted."""
    if has_ranks(directory):
        return (
            "load it with DLRover in a job of the Megatron that wrote it, and save it once with "
            "that Megatron's own save_checkpoint (swap this import back)"
        )
    return (
        "load it in a job of the Megatron that wrote it, through megatron_flashckpt, which leaves "
        "it to Megatron's own loader; the job's next save is in the format flashckpt"
    )


def has_ranks(directory: Path) -> bool:
    """Return whether `directory` holds optimizer state by rank, as DLRover writes it."""
    return any(path.is_dir() for path in directory.glob("rank_*"))


def is_legacy(directory: Path) -> bool:
    """Return whether `directory`, of one iteration, is in this format."""
    return next(directory.glob(f"mp_rank_*/{MODEL_FILE}"), None) is not None


def open_legacy(directory: Path, iteration: int, options: Options) -> Contents:
    """Return the checkpoint in `directory` (`iter_0000100`, or `release`: iteration 0).

    Raises:
        NotCommittedError: it is not in this format.
        UnsupportedError: the model cannot be rebuilt, or is another one than the files hold.
        CorruptCheckpointError: a rank's file is missing or damaged, or optimizer and weights
            contradict each other.
    """
    ranks = open_ranks(directory)
    parts = [part for rank in ranks for part in model_parts(rank)]
    optimizer = None
    if not options.weights_only and _has_optimizer(ranks[0]):
        experts = ddp_buckets.has_experts([rank.model for rank in ranks])
        saved = []
        for rank in ranks:
            found = _optimizer(rank, experts=experts, accept=accepts(rank, options))
            parts += found.parts
            saved.append(found.hyper_parameters)
        optimizer = hyper_parameters.merge(saved)
    contents = contents_of(directory, iteration, ranks, parts, optimizer)
    return with_weights_of_masters(contents) if accepts(ranks[0], options) else contents


def accepts(rank: RankFiles, options: Options) -> bool:
    """Return whether weights that contradict their masters are accepted as those of before."""
    return options.accept_damage and ddp_buckets.gathers_late(rank.state["args"])


def with_weights_of_masters(contents: Contents) -> Contents:
    """Return `contents` with the weights that their masters round to."""
    masters = {it.key: it for it in contents.tensors if it.kind == MASTER}
    tensors = [
        _of_master(it, masters[it.key]) if it.kind == WEIGHT and it.key in masters else it
        for it in contents.tensors
    ]
    warning = (
        "the weights are what the optimizer's masters round to, because of the job's "
        "--overlap-param-gather and --accept-damage"
    )
    return dataclasses.replace(contents, tensors=tensors, warnings=(*contents.warnings, warning))


def _of_master(weight: GlobalTensor, master: GlobalTensor) -> GlobalTensor:
    """Return `weight` as `master` says it; layers of it in fp32 have no master."""

    def read_box(box: Box) -> torch.Tensor:
        if box not in master.boxes:
            return weight.read(box)
        return master.read(box).to(weight.dtype_of(box))

    def read(region: Box) -> torch.Tensor:
        if region in weight.boxes:
            return read_box(region)
        return read_region(region, weight.boxes, read_box, weight.dtype, weight.name)

    return dataclasses.replace(weight, read=read)


def contents_of(
    directory: Path,
    iteration: int,
    ranks: list[RankFiles],
    parts: list[Part],
    optimizer: list[dict[str, Any]] | None,
) -> Contents:
    """Return the contents whose tensors are `parts` and whose side state is that of `ranks`."""
    first = ranks[0].state
    return Contents(
        place=str(directory),
        iteration=iteration,
        common={
            # Not the state dict's own iteration: a release may say what it was trained to.
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


def _differing_embeddings(ranks: list[RankFiles]) -> tuple[str, ...]:
    """Return whether the copies of tied embeddings are no copies, of which one is converted."""
    stages = {(rank.model.tp, rank.model.pp): rank.weights for rank in ranks}
    last = max(pp for _, pp in stages)
    names = (legacy_gpt.WORDS, legacy_gpt.TIED)
    for tp in {tp for tp, _ in stages}:
        held = [
            [weight for (_, name), weight in stages[tp, pp].items() if name == wanted]
            for pp, wanted in zip((0, last), names, strict=True)
        ]
        if all(held) and not torch.equal(held[0][0], held[1][0]):
            return (
                "the tied embeddings of the first and the last pipeline stage differ (a defect of "
                "Megatron before February 2024 under the distributed optimizer); the first "
                "stage's are taken, so losses will not be those of the job that saved",
            )
    return ()


def _doubt(args: Any) -> tuple[str, ...]:
    """Return what weights without masters cannot prove."""
    if not (ddp_buckets.is_early(args) and ddp_buckets.gathers_late(args)):
        return ()
    return (
        "under the job's --overlap-param-gather its Megatron may have saved weights of before the "
        "last step; nothing is compared when weights are converted alone",
    )


def open_ranks(directory: Path) -> list[RankFiles]:
    """Return the files of all ranks, checked against the model that their args describe."""
    first = next(iter(sorted(directory.glob(f"mp_rank_*/{MODEL_FILE}"))), None)
    if first is None:
        raise NotCommittedError(
            f"{directory}: no mp_rank_*/{MODEL_FILE}; name a directory of one iteration that "
            "Megatron saved with --ckpt-format torch"
        )
    state = safe_pickle.load(first, str(first), mmap=True)
    if not isinstance(state, dict) or "args" not in state:
        raise CorruptCheckpointError(f"{first}: holds no args; convert another iteration")
    models = rank_models(state["args"])
    places = {model: directory / rank_directory(model, state["args"]) for model in models}
    lost = [str(place) for place in places.values() if not (place / MODEL_FILE).is_file()]
    if lost:
        raise CorruptCheckpointError(
            f"{directory}: no {MODEL_FILE} in {', '.join(lost)}; convert another iteration"
        )
    ranks = [
        RankFiles(place, model, _load(place / MODEL_FILE, model)) for model, place in places.items()
    ]
    _refuse_another_save(directory, ranks)
    _refuse_another_model(directory, ranks)
    return ranks


def rank_directory(model: RankModel, args: Any) -> str:
    """Return Megatron's name of the directory of a rank."""
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
    """Raise if files are of another iteration than their directory, which a release may be."""
    expected = parse_iteration_dir(directory.name)
    wrong = [
        f"{rank.directory.name} of iteration {rank.state['iteration']}"
        for rank in ranks
        if expected is not None and rank.state.get("iteration", expected) != expected
    ]
    if wrong:
        raise CorruptCheckpointError(
            f"{directory}: holds files of another save: {some(wrong)}; convert another iteration"
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
            expected = {it.name: it.shape for it in (*chunk.parameters, *chunk.buffers)}
            problems += [
                f"{rank.directory.name}/{key} {name} is {stored.get(name, 'not there')}, by the "
                f"args {expected.get(name, 'not there')}"
                for name in sorted(stored.keys() | expected.keys())
                if stored.get(name) != expected.get(name)
            ]
    if problems:
        raise UnsupportedError(
            f"{directory}: holds another model than the GPT that its args describe: "
            f"{some(problems, '; ')}; {way_out(directory)}"
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


def _optimizer(rank: RankFiles, *, experts: bool, accept: bool) -> legacy_optimizer.Found:
    args = rank.state["args"]
    distributed = getattr(args, "use_distributed_optimizer", False)
    file = rank.directory / (OPTIMIZER_FILE if distributed else MODEL_FILE)
    if not file.is_file() or "optimizer" not in rank.state:
        raise CorruptCheckpointError(
            f"{file}: holds no optimizer state, although the run saved it (DLRover keeps it in "
            f"rank_*/{OPTIMIZER_FILE}, and these are not there either); {ddp_buckets.REMEDY}"
        )
    held = (rank.model, rank.weights, args, rank.state["optimizer"])
    if not distributed:
        return legacy_optimizer.plain(*held, str(file), experts=experts)
    stored = safe_pickle.load(file, str(file), mmap=True)
    return legacy_optimizer.distributed(*held, stored, str(file), experts=experts, accept=accept)


def _random_states(ranks: list[RankFiles]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for rank in ranks:
        states = rank.state.get("rng_state")
        if isinstance(states, list):
            found.setdefault((rank.model.pp, rank.model.tp), states)
    return found


def _objects(ranks: list[RankFiles]) -> dict[str, Any]:
    """Return the extra states of modules by Megatron's global key."""
    return {
        key: value
        for rank in ranks
        for number, chunk in enumerate(rank.model.chunks)
        for name, key in chunk.objects
        if (value := rank.chunk(number).get(name)) is not None
    }
