"""Position of each local parameter in its global tensor, as Megatron itself describes it.

`model.sharded_state_dict()` communicates nothing, and the data of its entries *is* the parameter,
so geometry is joined to parameters by identity. `sharded_runs` finds the elements of each box.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.layout.copies import CopyPlace
from megatron_flashckpt.layout.piece import UNUSED
from megatron_flashckpt.megatron_lm import legacy_geometry, parallel
from megatron_flashckpt.megatron_lm.compat import takes
from megatron_flashckpt.megatron_lm.optimizer_state import group_members, is_expert
from megatron_flashckpt.megatron_lm.quantized import is_quantized
from megatron_flashckpt.megatron_lm.sharded_runs import leaves, runs_of
from megatron_flashckpt.megatron_lm.tensor_geometry import Geometry

#: Characters of an error text of Megatron that are quoted; an assertion may list all names.
_LONG = 300
#: Megatron numbers the main copies 0 over pipeline stages, and the copy of a later stage 1.
_STAGES = 2
_form_of = operator.attrgetter("shape", "dtype")


@dataclasses.dataclass
class ModelGeometry:
    """Geometry of all parameters, buffers and objects of this rank's model chunks.

    It holds references to the parameters and modules, so that an `id` cannot be reused.
    """

    signature: tuple[Any, ...]
    parameters: list[tuple[torch.nn.Parameter, Geometry]]
    buffers: list[tuple[int, str, Geometry]]
    """Chunk, name in the chunk, geometry."""
    objects: list[tuple[int, str, str]]
    """Chunk, state-dict name and global name of objects other than tensors (TransformerEngine's
    extra state). The global name is equal under all parallel layouts."""
    quantized: dict[int, Geometry] = dataclasses.field(default_factory=dict)
    """The FP8 and FP4 parameters among `parameters`, by id."""
    modules: list[Any] = dataclasses.field(default_factory=list)
    """The modules that `signature` identifies."""
    keepers: list[tuple[str, Any]] | None = None
    """Cached results of `side_state`: the modules of `objects`, each with the global name."""
    keys_of_groups: weakref.WeakKeyDictionary[Any, tuple[tuple[int, ...], list[list[str]]]] = (
        dataclasses.field(default_factory=weakref.WeakKeyDictionary)
    )
    """Cached results of `held_keys`, by optimizer."""
    repeats: weakref.WeakKeyDictionary[Any, Any] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )
    """Cached enumerations (`repeats.Repeat`) of this geometry, by optimizer."""
    aliases: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    """Other keys of the same tensors, by key. Megatron reads a T5's position embeddings under two.
    A save writes all keys; a load takes the stored ones."""

    def with_alias(self, geometry: Geometry, alias: Geometry) -> Geometry:
        """Return `geometry` with the runs of `alias`, the same local tensor under another key."""
        keys = {run.key for run in (*geometry.runs, *alias.runs)}
        for key in keys:
            self.aliases.setdefault(key, set()).update(keys - {key})
        return dataclasses.replace(geometry, runs=(*geometry.runs, *alias.runs))

    @functools.cached_property
    def by_id(self) -> dict[int, Geometry]:
        """The geometry of each parameter, by its id."""
        return {id(parameter): geo for parameter, geo in self.parameters}

    @functools.cached_property
    def quantized_keys(self) -> frozenset[str]:
        """Keys of the global tensors for which this rank has a quantized parameter."""
        return frozenset(run.key for geo in self.quantized.values() for run in geo.runs)

    @functools.cached_property
    def frozen_keys(self) -> frozenset[str]:
        """Keys of the global tensors for which this rank has a frozen parameter."""
        frozen = (geo for parameter, geo in self.parameters if not parameter.requires_grad)
        return frozenset(run.key for geo in frozen for run in geo.runs)

    def held_keys(self, sub: Any) -> list[list[str]]:
        """Return, by param group, the global keys of the parameters that this rank steps.

        A parameter counts even if this rank steps only a part of it. All layers share a key, so a
        group has few keys, independent of the model's size.

        Args:
            sub: one of `optimizer_state.sub_optimizers`.
        """
        members = list(group_members(sub))
        signature = tuple(map(len, itertools.chain(*members)))
        known = self.keys_of_groups.get(sub)
        if known is None or known[0] != signature:
            stepped = [map(id, itertools.chain(*group)) for group in members]
            held = [
                sorted({self.by_id[key].runs[0].key for key in group if key in self.by_id})
                for group in stepped
            ]
            # A later save walks over all parameters again only if the groups have changed.
            known = self.keys_of_groups[sub] = (signature, held)
        return known[1]

    def buffer_tensors(self, chunks: list[Any]) -> list[tuple[Geometry, torch.Tensor]]:
        """Return the live buffers of `chunks`, each with its geometry.

        Args:
            chunks: the chunks that this geometry describes.

        Raises:
            UnsupportedError: an entry of the sharded state dict is neither parameter nor buffer.
        """
        if not self.buffers:  # skip the walk through all modules
            return []
        named = [dict(chunk.named_buffers(remove_duplicate=False)) for chunk in chunks]
        tensors = []
        for number, name, geo in self.buffers:
            if name not in named[number]:
                raise UnsupportedError(
                    f"{name} is in the sharded state dict but is neither a parameter nor a buffer; "
                    "register it as one, or keep Megatron's own checkpointing for this job"
                )
            tensors.append((geo, named[number][name]))
        return tensors


def signature(chunks: list[Any]) -> tuple[Any, ...]:
    """Return a value that changes when a cached geometry of `chunks` becomes invalid.

    It identifies all modules, by the names and numbers of their children, and all tensors, by the
    numbers of them in each module.
    """
    modules, names, counts, tensors = _listed(chunks)
    return (
        list(map(id, modules)),
        names,
        counts,
        list(map(id, tensors)),
        list(map(_form_of, tensors)),
    )


def _listed(chunks: list[Any]) -> tuple[list[Any], list[str], list[int], list[torch.Tensor]]:
    """Return modules, names of their children, counts up to each module, and tensors."""
    # `Module.parameters` also builds all names: for 20,000 tensors a quarter of the time that a
    # save blocked training. Shared modules are visited several times here.
    slots: list[torch.Tensor | None] = []
    modules: list[Any] = list(chunks)
    names: list[str] = []
    counts: list[int] = []
    for module in modules:  # grows meanwhile; most modules have no children or no tensors
        if module is None:  # a child that was set to None
            continue
        if parameters := module._parameters:
            slots += parameters.values()
        if buffers := module._buffers:
            slots += buffers.values()
        if children := module._modules:
            modules += children.values()
            names += children
        counts += len(names), len(slots)
    return modules, names, counts, [tensor for tensor in slots if tensor is not None]


def model_geometry(chunks: list[Any]) -> ModelGeometry:
    """Return the geometry of the unwrapped model `chunks`. No communication.

    Raises:
        UnsupportedError: parameters are in no sharded state dict; names all of them.
    """
    result = ModelGeometry(signature(chunks), [], [], [], modules=_listed(chunks)[0])
    missing = []
    for number, chunk in enumerate(chunks):
        if not hasattr(chunk, "sharded_state_dict"):
            result.parameters += legacy_geometry.parameters(chunk)
            continue
        parameters = {id(p): p for p in chunk.parameters()}
        copies_experts = _copies_experts(chunk)
        described = set()
        for name, entry, others in _entries(chunk):
            if isinstance(entry, ShardedObject):
                result.objects.append((number, name, entry.unique_key))
                continue
            owner = parameters.get(id(entry.data))
            geometry = _geometry(name, entry)
            for other in others:
                geometry = result.with_alias(geometry, _geometry(name, other))
            if owner is not None:
                described.add(id(owner))
                if copies_experts and not is_expert(owner):
                    geometry = _reduced_as_dense(geometry)
                result.parameters.append((owner, geometry))
            else:
                result.buffers.append((number, name, geometry))
        missing += [n for n, p in chunk.named_parameters() if id(p) not in described]
    if missing:
        raise UnsupportedError(
            f"{len(missing)} parameters are in no sharded state dict of the model, so their place "
            f"in the global tensors is unknown: {', '.join(missing)}; give their modules a "
            "sharded_state_dict"
        )
    result.quantized = {id(p): geo for p, geo in result.parameters if is_quantized(p)}
    return result


def _entries(chunk: Any) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield state-dict name and entry of every tensor and object, and further entries of a tensor.

    Megatron lists a tensor again if its module is an attribute of two modules. Entries under a key
    that was listed before are left out.
    """
    keywords = {}
    if takes(chunk.sharded_state_dict, "metadata"):
        keywords["metadata"] = {
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
            # One key for both halves of SwiGLU, as in global tensors.
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }
    unused = _unused_outputs(chunk)
    try:
        with _untied(unused):
            listed = chunk.sharded_state_dict(**keywords)
    except Exception as error:  # an assertion of Megatron or of the model
        message = str(error)
        raise UnsupportedError(
            f"{type(chunk).__name__}.sharded_state_dict() fails, so the place of this model's "
            f"parameters in the global tensors is unknown: {type(error).__name__}: "
            f"{message if len(message) <= _LONG else message[:_LONG] + ' ...'}"
        ) from error
    weights = {id(module.output_layer.weight) for module in unused}
    tensors: dict[int, list[tuple[str, Any]]] = defaultdict(list)
    for name, entry in leaves(listed):
        if id(getattr(entry, "data", None)) in weights:
            entry.key += UNUSED
        if isinstance(entry, ShardedObject):
            yield str(name), entry, []
        elif isinstance(entry, ShardedTensor | ShardedTensorFactory) and entry.data is not None:
            tensors[id(entry.data)].append((str(name), entry))
    for (name, entry), *others in tensors.values():
        by_key = {other.key: other for _, other in others if _is_alias(entry, other)}
        yield name, entry, list(by_key.values())


def _is_alias(entry: Any, other: Any) -> bool:
    """Return whether `other` is the same copy of the tensor as `entry`, under another key."""
    return bool(other.key != entry.key and other.replica_id == entry.replica_id)


def _unused_outputs(chunk: Any) -> list[Any]:
    """Return the models of this stage whose output layer has a weight that no forward pass uses.

    With multi-token prediction the last stage has a copy of the word embeddings. If embeddings are
    tied, the output layer of that stage computes with this copy. Megatron (seen in core 0.17.1)
    still makes a weight for the output layer, and its optimizer steps this weight.
    """
    return [
        module
        for module in chunk.modules()
        if getattr(module, "mtp_process", False)
        and getattr(module, "share_embeddings_and_output_weights", False)
        and getattr(module, "post_process", False)
        and not getattr(module, "pre_process", True)
        and getattr(getattr(module, "output_layer", None), "weight", None) is not None
    ]


@contextlib.contextmanager
def _untied(models: list[Any]) -> Iterator[None]:
    """Make `sharded_state_dict` of `models` list the weights of their output layers.

    With tied embeddings, `sharded_state_dict` asserts that the output layer has no weight.
    """
    for model in models:
        model.share_embeddings_and_output_weights = False
    try:
        yield
    finally:
        for model in models:
            model.share_embeddings_and_output_weights = True


def _geometry(name: str, entry: ShardedTensor | ShardedTensorFactory) -> Geometry:
    replica_id = entry.replica_id
    if isinstance(replica_id, int):
        replica_id = (0, 0, replica_id)
    main = not any(replica_id[:-1])
    return Geometry(
        name=name,
        runs=runs_of(entry),
        main=main,
        replica=replica_id[-1],
        resizable=isinstance(entry, ShardedTensor) and entry.allow_shape_mismatch,
        copy=None if main else _copy(name, replica_id),
    )


def _copies_experts(chunk: Any) -> bool:
    """Return whether several tensor ranks may hold the same part of an expert.

    With expert parallelism Megatron marks experts (`is_expert`) and reduces their gradients apart.
    """
    config: Any = getattr(chunk, "config", None)
    ways = getattr(config, "expert_tensor_parallel_size", None)
    if ways is None or getattr(config, "expert_model_parallel_size", 1) > 1:
        return False
    return bool(ways < config.tensor_model_parallel_size)


def _reduced_as_dense(geometry: Geometry) -> Geometry:
    """Return the geometry of a parameter whose replicas are those of dense parameters.

    Without expert parallelism Megatron reduces the gradients of experts over the dense replicas,
    but numbers the experts' replicas over the expert-data-parallel group. If the expert tensor
    parallel size is smaller than the tensor parallel size, that group also has other tensor ranks.
    These hold copies, which drift apart because nothing reduces their gradients.
    """
    count, index = parallel.data_parallel()
    expert_count, expert_index = parallel.expert_data_parallel()
    if geometry.replica != expert_index or not geometry.main:
        return geometry  # of a dense parameter, or of a duplicate by its own numbers
    number = expert_index % (expert_count // count)
    copy = None if number == 0 else _copy(geometry.name, (0, number, index))
    return dataclasses.replace(geometry, main=number == 0, replica=index, copy=copy)


def _copy(name: str, replica_id: tuple[int, ...]) -> CopyPlace | None:
    """Return the place of a copy; None if Megatron keeps the copy equal to the main one.

    On later stages these are word embeddings. Megatron adds up their gradients over its embedding
    group. The stage of multi-token prediction has such a copy and may be outside of that group.

    Args:
        replica_id: numbers of the copy over stages, tensor ranks and data-parallel replicas.
    """
    numbers, counts = replica_id[:-1], (_STAGES, parallel.tensor_ranks())
    if len(numbers) != len(counts) or any(map(operator.ge, numbers, counts)):
        raise UnsupportedError(
            f"{name}: its replica_id {replica_id} in the sharded state dict is not (stage, tensor "
            f"rank, replica) with numbers below {counts}; give it one, or keep Megatron's own "
            "checkpointing for this job"
        )
    if numbers[0] and parallel.is_in_embedding_group():
        return None
    return CopyPlace(numbers, counts)
