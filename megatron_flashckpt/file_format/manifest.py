"""The table of contents of a committed checkpoint, and its merge from per-rank records.

The manifest is the end of a save that succeeded (`end.py`): a checkpoint exists from the moment its
end does. The manifest holds everything that a rank needs to plan its reads, so a load opens no file
only to inspect it. Keys are stored once, each template once, and per shard file the placement and
the digest of the header.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from megatron_flashckpt import FORMAT_VERSION
from megatron_flashckpt.errors import OLDER, UNDECODABLE, CorruptCheckpointError
from megatron_flashckpt.file_format.commit_record import (
    KNOWN_ITEMS,
    CommitRecord,
    Coordinates,
    decode_items,
)
from megatron_flashckpt.file_format.file_names import parse_save, shard_name
from megatron_flashckpt.file_format.run_object import Ancestors
from megatron_flashckpt.file_format.seal import broken_seal, seal
from megatron_flashckpt.file_format.shard_file import refuse_other_version
from megatron_flashckpt.layout.dtypes import ITEMSIZE, itemsize
from megatron_flashckpt.layout.save_cost import SaveCost, combine
from megatron_flashckpt.layout.template import Placement, Template, TemplateItem, placement_length

_T = TypeVar("_T")

#: Longer manifests are refused; that of the largest job has a few hundred megabytes.
MAX_MANIFEST_NBYTES = 2**30


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Shard file of the checkpoint."""

    rank: int
    coordinates: Coordinates
    file: str
    nbytes: int
    header_digest: str
    template: str
    placement: Placement


class ManifestItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`TemplateItem` with its key as an index into `Manifest.keys`."""

    key: int
    kind: str
    dtype: str
    global_shape: tuple[int, ...]
    shape: tuple[int, ...]
    numel: int
    placed_at: int


class CommitFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a manifest that retention and the history need: no table of contents."""

    iteration: int
    save_id: str
    ancestors: Ancestors = ()
    """Those of the run that made the save, so that no other object is needed to judge it."""
    committed_at: float | None = None
    """Seconds since 1970. None: the release that wrote the manifest did not record the time."""
    trained_s: float | None = None
    """Seconds from the start of the run to the commit, on a clock that nobody sets. None: unknown,
    or no job has made the checkpoint."""
    metrics: dict[str, float] = {}
    """Metrics of the model that training code has reported, e.g. its validation loss."""
    cost: SaveCost | None = None


class Manifest(CommitFacts, frozen=True, kw_only=True):
    """Contents of the end of a committed save."""

    version: int
    world_size: int
    description: dict[str, Any]
    """For people and tools: parallel sizes, versions. No load reads it."""
    common_digest: str
    keys: tuple[str, ...]
    templates: dict[str, tuple[ManifestItem, ...]]
    shards: tuple[ShardEntry, ...]

    def template(self, fingerprint: str) -> Template:
        """Return the template with the given fingerprint."""
        items, position = [], 0
        for item in self.templates[fingerprint]:
            items.append(
                TemplateItem(
                    self.keys[item.key],
                    item.kind,
                    item.dtype,
                    item.global_shape,
                    item.shape,
                    item.numel,
                    position,
                    item.placed_at,
                )
            )
            position += item.numel * itemsize(item.dtype)
        return Template(tuple(items), position, b"")


def merge(
    records: list[CommitRecord],
    *,
    world_size: int,
    description: dict[str, Any],
    common_digest: str,
    ancestors: Ancestors = (),
    committed_at: float | None = None,
    trained_s: float | None = None,
) -> Manifest:
    """Return the manifest of the save that `records` belong to, one record per rank.

    The first record of each template has its items, the others may have `KNOWN_ITEMS`. If several
    ranks report a metric, the manifest gets the lowest rank's value.

    Raises:
        CorruptCheckpointError: a rank is missing or doubled, or records of two saves are mixed.
    """
    ranks = sorted(record.rank for record in records)
    if ranks != list(range(world_size)):
        missing = sorted(set(range(world_size)) - set(ranks))
        raise CorruptCheckpointError(
            f"commit records of ranks {ranks} for a world of {world_size}; missing: {missing}"
        )
    saves = {(record.iteration, record.save_id) for record in records}
    if len(saves) != 1:
        raise CorruptCheckpointError(f"commit records of different saves: {sorted(saves)}")
    ((iteration, save_id),) = saves
    keys: dict[str, int] = {}
    templates: dict[str, tuple[ManifestItem, ...]] = {}
    for record in records:
        if record.template_fingerprint not in templates and record.template is not KNOWN_ITEMS:
            templates[record.template_fingerprint] = tuple(
                ManifestItem(
                    keys.setdefault(item.key, len(keys)),
                    item.kind,
                    item.dtype,
                    item.global_shape,
                    item.shape,
                    item.numel,
                    item.placed_at,
                )
                for item in decode_items(record)
            )
    ordered = sorted(records, key=lambda record: record.rank)
    metrics: dict[str, float] = {}
    for record in reversed(ordered):
        metrics |= record.metrics
    shards = tuple(
        ShardEntry(
            rank=record.rank,
            coordinates=record.coordinates,
            file=record.file,
            nbytes=record.nbytes,
            header_digest=record.header_digest,
            template=record.template_fingerprint,
            placement=record.placement,
        )
        for record in ordered
    )
    return Manifest(
        version=FORMAT_VERSION,
        iteration=iteration,
        save_id=save_id,
        ancestors=ancestors,
        world_size=world_size,
        description=description,
        committed_at=committed_at,
        trained_s=trained_s,
        metrics=metrics,
        cost=combine(
            {record.rank: record.cost for record in ordered if record.cost is not None},
            sum(record.nbytes for record in ordered),
            committed_at or 0.0,
        ),
        common_digest=common_digest,
        keys=tuple(keys),
        templates=templates,
        shards=shards,
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of the end of a committed save."""
    return seal(msgspec.json.encode(manifest))


def _check_seal(encoded: bytes, place: str) -> None:
    """Raise CorruptCheckpointError if `seal`, of any release, did not make `encoded`."""
    if (problem := broken_seal(encoded)) is not None:
        raise CorruptCheckpointError(f"{place}: {problem}; {OLDER}")


_FACTS = msgspec.json.Decoder(CommitFacts)
_MANIFEST = msgspec.json.Decoder(Manifest)


def decode_facts(encoded: bytes, place: str) -> CommitFacts:
    """Return the facts of a manifest, after checking its digest.

    Raises:
        CorruptCheckpointError: not JSON, or not a manifest, or changed after it was written.
        FormatVersionError: written by a newer release, or in format 1.
    """
    return _unsealed(encoded, place, _FACTS)


def _unsealed(encoded: bytes, place: str, decoder: msgspec.json.Decoder[_T]) -> _T:
    """Return the result of `decoder` for a manifest whose version and digest are right."""
    try:
        head = msgspec.json.decode(encoded, type=dict[str, msgspec.Raw])
        version = msgspec.json.decode(head["version"], type=int)
        if version != FORMAT_VERSION:
            # Check the digest first: a flipped bit must not make a damaged file pass for another
            # format.
            _check_seal(encoded, place)
            refuse_other_version(version, place)
        manifest = decoder.decode(encoded)
    except (KeyError, *UNDECODABLE) as error:
        raise CorruptCheckpointError(f"{place}: is not a manifest ({error}); {OLDER}") from error
    _check_seal(encoded, place)
    return manifest


def decode_manifest(encoded: bytes, place: str) -> Manifest:
    """Return the manifest, checked for consistency.

    Raises:
        CorruptCheckpointError: not JSON, not a manifest, changed after it was written, or naming
            files outside its directory.
        FormatVersionError: written by a newer release, or in format 1.
    """
    manifest = _unsealed(encoded, place, _MANIFEST)
    check(manifest, place)
    return manifest


def check(manifest: Manifest, place: str) -> None:
    """Raise CorruptCheckpointError if `manifest` contradicts itself or names foreign files."""
    problems = []
    ranks = [shard.rank for shard in manifest.shards]
    # Not range(world_size): a hostile file may state a number of any size.
    if not ranks or len(ranks) != manifest.world_size or ranks != list(range(len(ranks))):
        problems.append(f"shards are not those of ranks 0 to {manifest.world_size - 1}")
    lengths = {name: placement_length(items) for name, items in manifest.templates.items()}
    if parse_save(manifest.save_id) is None:
        problems.append(f"{manifest.save_id!r} is not the name of a save")
    for shard in manifest.shards:
        if shard.file != shard_name(shard.rank, manifest.save_id):
            problems.append(f"{shard.file!r} is not the shard of rank {shard.rank} of this save")
        items = manifest.templates.get(shard.template)
        if items is None:
            problems.append(f"{shard.file}: unknown template {shard.template!r}")
        elif len(shard.placement) != lengths[shard.template]:
            problems.append(
                f"{shard.file}: a placement of {len(shard.placement)} numbers for a template that "
                f"takes {lengths[shard.template]}"
            )
    all_items = [item for items in manifest.templates.values() for item in items]
    if any(item.placed_at < 0 for item in all_items):
        problems.append("a template's numbers begin before its placement")
    if any(not 0 <= item.key < len(manifest.keys) for item in all_items):
        problems.append("a template names a key that is not in the table")
    problems += sorted(
        {
            f"a template has {item.numel} elements of type {item.dtype!r}"
            for item in all_items
            if item.dtype not in ITEMSIZE or item.numel < 0
        }
    )
    problems += [
        f"template {name!r} has tensors that are not aligned to their elements"
        for name, items in manifest.templates.items()
        if not _are_aligned(items)
    ]
    if problems:
        raise CorruptCheckpointError(f"{place}: {'; '.join(problems)}; {OLDER}")


def _are_aligned(items: tuple[ManifestItem, ...]) -> bool:
    """Return whether every tensor of a known type starts at a multiple of its element size."""
    position = 0
    for item in items:
        width = ITEMSIZE.get(item.dtype, 1)
        if position % width:
            return False
        position += item.numel * width
    return True
