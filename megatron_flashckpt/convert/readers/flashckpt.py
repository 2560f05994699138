"""Reader of our own format; it verifies every chunk before use."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from megatron_flashckpt.catalog.stored_checkpoint import (
    StoredCheckpoint,
    ends_of,
    open_checkpoint,
)
from megatron_flashckpt.convert.common.contents import Contents, GlobalTensor, of_boxes, rounded
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.layout.copies import is_copy
from megatron_flashckpt.layout.piece import MASTER, RANK_STATE, UNUSED, WEIGHT
from megatron_flashckpt.layout.reshard import Box
from megatron_flashckpt.layout.template import pieces_of
from megatron_flashckpt.megatron_lm import side_state
from megatron_flashckpt.megatron_lm.hyper_parameters import merge, without_held
from megatron_flashckpt.megatron_lm.torch_dtypes import SIXTEEN_BIT, torch_dtype
from megatron_flashckpt.storage.parallel import for_all
from megatron_flashckpt.storage.store import Store

#: Headers of shard files in the cache, at most.
_KEPT_HEADERS = 256


class _Run(NamedTuple):
    """Elements `[start, end)` of a box, at `byte_offset` of the data section of a rank's file."""

    start: int
    end: int
    rank: int
    byte_offset: int


_Name = tuple[str, str, tuple[int, ...]]
"""Kind, key, global shape."""


def is_ours(store: Store, iteration: int) -> bool:
    """Return whether an iteration has a committed save of ours, of any format."""
    entries = store.list(file_names.iteration_dir(iteration), sizes=False)
    names = {entry.name for entry in entries}
    ends = ends_of(store, iteration, names)
    return file_names.MANIFEST_OF_FORMAT_1 in names or None in ends.values()


def open_ours(store: Store, iteration: int, options: Options) -> Contents:
    """Return the committed checkpoint of `iteration`, or of `file_names.RELEASE`.

    Raises:
        NotCommittedError: no such checkpoint.
        CorruptCheckpointError: an element is missing or stored twice, or bytes were changed.
    """
    stored = open_checkpoint(store, iteration)
    stored.check_whole()
    chunks = _Chunks(stored, options.memory_nbytes)
    tensors: dict[_Name, dict[Box, list[_Run]]] = defaultdict(lambda: defaultdict(list))
    dtypes: dict[_Name, dict[Box, torch.dtype]] = defaultdict(dict)
    unused: dict[str, None] = {}
    rank_states: dict[int, _Run] = {}
    for source in stored.sources():
        pieces = pieces_of(source.template, source.placement)
        for piece, item in zip(pieces, source.template.items, strict=True):
            run = _Run(piece.start, piece.end, source.rank, item.byte_offset)
            if piece.kind == RANK_STATE:
                rank_states[source.rank] = run
            elif not is_copy(piece.kind):
                if piece.key.endswith(UNUSED):
                    unused[piece.key] = None
                    continue
                name = (piece.kind, piece.key, piece.global_shape)
                box = piece.offset, piece.shape
                tensors[name][box].append(run)
                dtypes[name][box] = torch_dtype(piece.dtype)
    place = f"{stored.place}/{file_names.common_name(stored.manifest.save_id)}"
    common = side_state.decode_common(stored.common(), place, side_state.MEGATRON_STATE)
    all_replicas = bool(getattr(common["args"], "data_parallel_random_init", False))
    states = _side_states(stored, chunks, rank_states, all_replicas=all_replicas)
    optimizer = without_held(merge([state["optimizer"] for _, state in states]))
    return Contents(
        place=stored.place,
        iteration=stored.manifest.iteration,
        common=common,
        tensors=sorted(
            _with_weights(
                [
                    _global_tensor(name, boxes, dtypes[name], chunks)
                    for name, boxes in tensors.items()
                ],
                common["args"],
            ),
            key=lambda tensor: (tensor.key, tensor.kind),
        ),
        optimizer=optimizer or None,
        rng=_random_states(states, all_replicas=all_replicas),
        objects={name: value for _, state in states for name, value in state["objects"].items()},
        warnings=tuple(
            f"{key} is not converted: no forward uses it, and other parallel layouts do not have it"
            for key in unused
        ),
    )


def _side_states(
    stored: StoredCheckpoint, chunks: _Chunks, runs: dict[int, _Run], *, all_replicas: bool
) -> list[tuple[Coordinates, dict[str, Any]]]:
    """Return coordinates and side state, once per distinct state, by data-parallel rank.

    Replicas have the same param groups, and the same random state unless
    `--data-parallel-random-init`.
    """
    result = {}
    shards = sorted(stored.manifest.shards, key=lambda shard: (shard.coordinates.dp, shard.rank))
    for shard in shards:
        coordinates = shard.coordinates
        part = (
            coordinates.pp,
            coordinates.tp,
            coordinates.ep,
            coordinates.dp if all_replicas else 0,
        )
        if part not in result and shard.rank in runs:
            run = runs[shard.rank]
            framed = chunks.read(run.rank, run.byte_offset, run.end - run.start)
            result[part] = (
                coordinates,
                side_state.unframe(bytes(framed), f"{stored.place}/{shard.file}"),
            )
    return list(result.values())


def _random_states(
    states: list[tuple[Coordinates, dict[str, Any]]], *, all_replicas: bool
) -> dict[tuple[int, int], list[dict[str, Any]]]:
    rng: dict[tuple[int, int], dict[int, dict[str, Any]]] = defaultdict(dict)
    for coordinates, state in states:
        if state["rng"] is not None:
            replica = coordinates.dp if all_replicas else 0
            rng[coordinates.pp, coordinates.tp].setdefault(replica, state["rng"])
    return {place: list(replicas.values()) for place, replicas in rng.items()}


def _global_tensor(
    name: _Name,
    boxes: dict[Box, list[_Run]],
    dtypes: dict[Box, torch.dtype],
    chunks: _Chunks,
) -> GlobalTensor:
    kind, key, global_shape = name

    def read_box(box: Box) -> torch.Tensor:
        dtype = dtypes[box]
        box_bytes = bytearray(math.prod(box[1]) * dtype.itemsize)
        ranges = [(run, run.start * dtype.itemsize, run.end * dtype.itemsize) for run in boxes[box]]
        chunks.fetch([(run.rank, run.byte_offset, high - low) for run, low, high in ranges])
        for run, low, high in ranges:
            box_bytes[low:high] = chunks.read(run.rank, run.byte_offset, high - low)
        if not box_bytes:
            return torch.empty(box[1], dtype=dtype)
        return torch.frombuffer(box_bytes, dtype=dtype).view(box[1])

    return of_boxes(key, kind, dtypes[min(dtypes)], global_shape, dtypes, read_box)


def _with_weights(tensors: list[GlobalTensor], args: Any) -> list[GlobalTensor]:
    """Add the weights that were not stored because masters determine them (`weights: derive`).

    Layers with other types under the same key were stored as weights.
    """
    weights = {tensor.key: tensor for tensor in tensors if tensor.kind == WEIGHT}
    derived = {}
    for master in tensors:
        if master.kind != MASTER:
            continue
        weight = weights.get(master.key)
        if weight is None or (
            set(master.boxes).isdisjoint(weight.boxes) and weight.dtypes.isdisjoint(SIXTEEN_BIT)
        ):
            derived[master.key] = rounded(master, args, weight)
    kept = [tensor for tensor in tensors if tensor.kind != WEIGHT or tensor.key not in derived]
    return kept + list(derived.values())


class _Chunks:
    """Cache of verified chunks of all shard files; keeps the most recently used ones.

    Replicas divide a box by bytes, so neighbouring boxes use the same chunks.
    """

    def __init__(self, stored: StoredCheckpoint, budget_nbytes: int) -> None:
        shard = functools.lru_cache(_KEPT_HEADERS)(stored.shard)
        #: Chunks that fit into the cache at a time.
        self._fitting = max(1, budget_nbytes // CHUNK_NBYTES)

        @functools.lru_cache(self._fitting)
        def chunk(name: tuple[int, int]) -> memoryview:
            """Return a chunk of a rank's file. Called by several threads."""
            rank, index = name
            return stored.chunk(shard(rank), index)

        self._chunk = chunk

    def fetch(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        """Read the chunks of a box, given as arguments of `read`, as far as they fit.

        A bucket answers each request late, so several are under way there at a time.

        Raises:
            CorruptCheckpointError: as `read`.
        """
        names = dict.fromkeys(
            (rank, index) for rank, start, nbytes in ranges for index in _indices(start, nbytes)
        )
        for_all(self._chunk, list(names)[: self._fitting])

    def read(self, rank: int, start: int, nbytes: int) -> bytearray:
        """Return `nbytes` bytes at `start` of the data section of `rank`'s file.

        Raises:
            CorruptCheckpointError: the message names file, chunk, bytes and both digests.
        """
        result = bytearray()
        for index in _indices(start, nbytes):
            base = index * CHUNK_NBYTES
            chunk = self._chunk((rank, index))
            result += chunk[max(start - base, 0) : start + nbytes - base]
        return result


def _indices(start: int, nbytes: int) -> range:
    """Return the chunks of a data section that hold `nbytes` bytes from `start` on."""
    return range(start // CHUNK_NBYTES, -(-(start + nbytes) // CHUNK_NBYTES))
