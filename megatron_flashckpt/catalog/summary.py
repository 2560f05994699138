"""Contents of one checkpoint from its manifest, as `flashckpt inspect` shows them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint
from megatron_flashckpt.catalog.tracker import tracked_iteration
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.file_format.run_object import Ancestor
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import Shape


class TensorSummary(msgspec.Struct, frozen=True):
    """Global tensor, as recorded in the manifest."""

    key: str
    kind: str
    dtype: str
    global_shape: Shape
    nbytes: int
    """Stored bytes of all ranks."""
    pieces: int


class FileSummary(msgspec.Struct, frozen=True):
    """Shard file, as recorded in the manifest."""

    rank: int
    coordinates: Coordinates
    file: str
    nbytes: int
    pieces: int


class Summary(msgspec.Struct, frozen=True):
    """Contents of one checkpoint, as `flashckpt inspect` shows them."""

    place: str
    iteration: int
    save_id: str
    ancestors: tuple[Ancestor, ...]
    """Runs from which the run of the save descends, the nearest first, and where each was left."""
    version: int
    world_size: int
    tracked: bool
    metrics: dict[str, float]
    """Metrics that training code has reported."""
    nbytes: int
    description: dict[str, Any]
    tensors: tuple[TensorSummary, ...]
    files: tuple[FileSummary, ...]


def summary_of(stored: StoredCheckpoint) -> Summary:
    """Return the contents of a checkpoint, as recorded in its manifest; reads no shard file."""
    manifest = stored.manifest
    nbytes: Counter[tuple[str, str, str, Shape]] = Counter()
    pieces: Counter[tuple[str, str, str, Shape]] = Counter()
    shards_of = Counter(shard.template for shard in manifest.shards)
    # Count by template, because 16,384 ranks share a few templates.
    for fingerprint, items in manifest.templates.items():
        for item in items:
            name = (manifest.keys[item.key], item.kind, item.dtype, item.global_shape)
            nbytes[name] += shards_of[fingerprint] * item.numel * itemsize(item.dtype)
            pieces[name] += shards_of[fingerprint]
    return Summary(
        place=stored.place,
        iteration=manifest.iteration,
        save_id=manifest.save_id,
        ancestors=manifest.ancestors,
        version=manifest.version,
        world_size=manifest.world_size,
        tracked=tracked_iteration(stored.store) == manifest.iteration,
        metrics=manifest.metrics,
        nbytes=sum(shard.nbytes for shard in manifest.shards),
        description=manifest.description,
        tensors=tuple(TensorSummary(*name, nbytes[name], pieces[name]) for name in sorted(pieces)),
        files=tuple(
            FileSummary(
                shard.rank,
                shard.coordinates,
                shard.file,
                shard.nbytes,
                len(manifest.templates[shard.template]),
            )
            for shard in manifest.shards
        ),
    )
