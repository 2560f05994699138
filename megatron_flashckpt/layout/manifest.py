"""The table of contents of a committed checkpoint, and the per-rank records that it merges.

A checkpoint exists from the moment its `manifest.json` does. The manifest holds everything that a
rank needs to plan its reads, so that loading never opens files just to see what is in them: keys
once, each template once, and per shard file the placement and the digest of the header.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
import xxhash

from megatron_flashckpt import FORMAT_VERSION
from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.layout.cost import RankCost, SaveCost, combine
from megatron_flashckpt.layout.dtypes import ITEMSIZE, itemsize
from megatron_flashckpt.layout.plan import (
    Placement,
    Template,
    TemplateItem,
    placement_length,
)
from megatron_flashckpt.layout.shard_file import refuse_newer

_T = TypeVar("_T")

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
#: What became of the last saves, for people; no load reads it.
HISTORY = "flashckpt-history.jsonl"
#: A manifest that claims to be longer is none; the largest job's has a few hundred megabytes.
MAX_MANIFEST_NBYTES = 2**30
_DIGEST_NBYTES = 8

_NAME = re.compile(r"rank_\d{5,}-[0-9a-f]{8,32}\.safetensors")
_OF_A_SAVE = re.compile(
    r"rank_\d{5,}-(?P<shard>[0-9a-f]{8,32})\.(safetensors|commit|failed)"
    r"|common-(?P<common>[0-9a-f]{8,32})\.pt"
)
_REMOVAL = re.compile(r"\.iter_(\d{7,})-([0-9a-f]{8,32})\.removed")


def iteration_dir(iteration: int) -> str:
    """Return Megatron's name of the directory of `iteration`."""
    return f"iter_{iteration:07d}"


def parse_iteration_dir(name: str) -> int | None:
    """Return the iteration of a directory name, or None if it is not one of Megatron's."""
    match = re.fullmatch(r"iter_(\d{7,})", name)
    return int(match[1]) if match else None


def shard_name(rank: int, save_id: str) -> str:
    """Return the file name of a shard.

    It carries the save's id, so that saving the same iteration again never touches the bytes of
    the committed one.
    """
    return f"rank_{rank:05d}-{save_id}.safetensors"


def common_name(save_id: str) -> str:
    """Return the name of the stand-alone file with args, scheduler and counters."""
    return f"common-{save_id}.pt"


def record_name(rank: int, save_id: str) -> str:
    """Return the name of a rank's commit record: its presence means that the shard is durable."""
    return f"rank_{rank:05d}-{save_id}.commit"


def failure_name(rank: int, save_id: str) -> str:
    """Return the name of the note by which an agent tells the others that a shard failed."""
    return f"rank_{rank:05d}-{save_id}.failed"


def save_id_of(name: str) -> str | None:
    """Return the id of the save that a file in an iteration directory belongs to.

    None for the manifest, whose name says nothing, and for what is not ours.
    """
    match = _OF_A_SAVE.fullmatch(name)
    return match and (match["shard"] or match["common"])


def removal_name(iteration: int, save_id: str) -> str:
    """Return the name, beside the tracker, that the manifest of a checkpoint being removed has."""
    return f".{iteration_dir(iteration)}-{save_id}.removed"


def parse_removal_name(name: str) -> tuple[int, str] | None:
    """Return the iteration and the save that `removal_name` made `name` of; None if of none."""
    match = _REMOVAL.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


class Coordinates(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank stood in the parallel layout (each value is the rank within that group)."""

    tp: int = 0
    pp: int = 0
    dp: int = 0
    cp: int = 0
    ep: int = 0
    edp: int = 0


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank's agent says once the shard is durable."""

    iteration: int
    save_id: str
    rank: int
    coordinates: Coordinates
    file: str
    nbytes: int
    header_digest: str
    template_fingerprint: str
    template: msgspec.Raw
    """Encoded (`encode_items`), because ranks share templates: of thousands few are decoded."""
    template_nbytes: int
    placement: Placement
    metrics: dict[str, float] = {}
    """What training code on this rank has reported of the model."""
    cost: RankCost | None = None
    """None: its trainer did not live to say."""


def encode_items(items: tuple[TemplateItem, ...]) -> msgspec.Raw:
    """Return a template's items as a commit record has them."""
    return msgspec.Raw(msgspec.msgpack.encode(items))


#: Stands in a record for items that another record has: thousands of copies would fill the memory.
KNOWN_ITEMS = msgspec.Raw()


def _decode_items(record: CommitRecord) -> tuple[TemplateItem, ...]:
    try:
        return msgspec.msgpack.decode(record.template, type=tuple[TemplateItem, ...])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"the commit record of rank {record.rank}: its template cannot be decoded ({error})"
        ) from error


def encode_record(record: CommitRecord) -> bytes:
    """Return the bytes of a commit record: the digest (8 bytes), then what it is the digest of."""
    body = msgspec.msgpack.encode(record)
    return xxhash.xxh3_64_digest(body) + body


def decode_record(encoded: bytes, place: str) -> CommitRecord:
    """Return what `encode_record` was given.

    Raises:
        CorruptCheckpointError: it is not such a record, or was changed.
    """
    digest, body = encoded[:_DIGEST_NBYTES], encoded[_DIGEST_NBYTES:]
    try:
        if digest != xxhash.xxh3_64_digest(body):
            raise msgspec.DecodeError("its digest is another")
        return msgspec.msgpack.decode(body, type=CommitRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{place}: is not a commit record ({error}); the next save writes new ones"
        ) from error


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the checkpoint."""

    rank: int
    coordinates: Coordinates
    file: str
    nbytes: int
    header_digest: str
    template: str
    placement: Placement


class ManifestItem(msgspec.Struct, frozen=True, array_like=True):
    """`TemplateItem` with its key as an index into `Manifest.keys`."""

    key: int
    kind: str
    dtype: str
    global_shape: tuple[int, ...]
    shape: tuple[int, ...]
    numel: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `manifest.json`."""

    version: int
    iteration: int
    save_id: str
    world_size: int
    description: dict[str, Any]
    """For people and tools: parallel sizes, versions. Nothing is read back from it."""
    committed_at: float | None = None
    """Seconds since 1970. None: written by a release that did not say."""
    metrics: dict[str, float] = {}
    """What training code has reported of the model, e.g. its validation loss."""
    cost: SaveCost | None = None
    common_digest: str
    keys: tuple[str, ...]
    templates: dict[str, tuple[ManifestItem, ...]]
    shards: tuple[ShardEntry, ...]

    def template(self, fingerprint: str) -> Template:
        """Return the template that shards refer to as `fingerprint`."""
        items, position = [], 0
        for it in self.templates[fingerprint]:
            items.append(
                TemplateItem(
                    self.keys[it.key],
                    it.kind,
                    it.dtype,
                    it.global_shape,
                    it.shape,
                    it.numel,
                    position,
                )
            )
            position += it.numel * itemsize(it.dtype)
        return Template(tuple(items), position, b"")


def merge(
    records: list[CommitRecord],
    *,
    world_size: int,
    description: dict[str, Any],
    common_digest: str,
    committed_at: float | None = None,
) -> Manifest:
    """Return the manifest of the save that `records` belong to, one record per rank.

    One record of each template has its items, the others may have `KNOWN_ITEMS` in their place.
    Of a metric that several ranks report, the lowest rank's value counts.

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
                    keys.setdefault(it.key, len(keys)),
                    it.kind,
                    it.dtype,
                    it.global_shape,
                    it.shape,
                    it.numel,
                )
                for it in _decode_items(record)
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
        world_size=world_size,
        description=description,
        committed_at=committed_at,
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
    """Return the bytes of `manifest.json`."""
    return seal(msgspec.json.encode(manifest))


def seal(body: bytes) -> bytes:
    """Return JSON object `body` with the digest of its own bytes as its first field."""
    return _seal_of(body) + body[1:]


def _seal_of(body: bytes) -> bytes:
    return b'{"digest":"%s",' % xxhash.xxh3_64_hexdigest(body).encode()


def _check_seal(encoded: bytes, place: str) -> None:
    """Raise CorruptCheckpointError unless `seal` made `encoded`, whatever release that was."""
    length = len(_seal_of(b""))
    body = b"{" + encoded[length:]
    if not encoded.startswith(_seal_of(body)):
        said = encoded[length - 18 : length - 2].decode(errors="replace")
        raise CorruptCheckpointError(
            f"{place}: digest {xxhash.xxh3_64_hexdigest(body)}, expected {said!r}: the file was "
            "changed; load an older iteration with --ckpt-step"
        )


class CommitFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest says of its checkpoint as a whole. Decoded without the table of contents."""

    iteration: int
    save_id: str
    committed_at: float | None = None
    metrics: dict[str, float] = {}
    cost: SaveCost | None = None


def decode_facts(encoded: bytes, place: str) -> CommitFacts:
    """Return what a manifest says of its checkpoint; it is known to be as it was written.

    Raises:
        CorruptCheckpointError: not JSON, or not a manifest, or changed after it was written.
        FormatVersionError: written by a newer release.
    """
    return _unsealed(encoded, place, CommitFacts)


def _unsealed(encoded: bytes, place: str, wanted: type[_T]) -> _T:
    """Return what of a manifest `wanted` takes, once its version and its digest are right."""
    try:
        head = msgspec.json.decode(encoded, type=dict[str, msgspec.Raw])
        version = msgspec.json.decode(head["version"], type=int)
        if version > FORMAT_VERSION:
            # First of all: a flipped bit must not make a damaged file look like one of the future.
            _check_seal(encoded, place)
            refuse_newer(version, place)
        manifest = msgspec.json.decode(encoded, type=wanted)
    except (msgspec.DecodeError, KeyError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{place}: is not a manifest ({error}); load an older iteration with --ckpt-step"
        ) from error
    _check_seal(encoded, place)
    return manifest


def decode_manifest(encoded: bytes, place: str) -> Manifest:
    """Return the manifest, checked for consistency with itself.

    Raises:
        CorruptCheckpointError: not JSON, or not a manifest, or changed after it was written, or
            naming files outside its directory.
        FormatVersionError: written by a newer release.
    """
    manifest = _unsealed(encoded, place, Manifest)
    check(manifest, place)
    return manifest


def check(manifest: Manifest, place: str) -> None:
    """Raise CorruptCheckpointError if `manifest` contradicts itself or names other files."""
    problems = []
    ranks = [shard.rank for shard in manifest.shards]
    # Not range(world_size): that number is as big as whoever wrote the file wants it to be.
    if not ranks or len(ranks) != manifest.world_size or ranks != list(range(len(ranks))):
        problems.append(f"shards are not those of ranks 0 to {manifest.world_size - 1}")
    lengths = {name: placement_length(items) for name, items in manifest.templates.items()}
    for shard in manifest.shards:
        if not _NAME.fullmatch(shard.file):
            problems.append(f"{shard.file!r} is not a shard's name")
        items = manifest.templates.get(shard.template)
        if items is None:
            problems.append(f"{shard.file}: unknown template {shard.template!r}")
        elif len(shard.placement) != lengths[shard.template]:
            problems.append(
                f"{shard.file}: a placement of {len(shard.placement)} numbers for a template that "
                f"takes {lengths[shard.template]}"
            )
    if any(
        not 0 <= item.key < len(manifest.keys)
        for items in manifest.templates.values()
        for item in items
    ):
        problems.append("a template names a key that is not in the table")
    problems += sorted(
        {
            f"{item.numel} elements of type {item.dtype!r} cannot be"
            for items in manifest.templates.values()
            for item in items
            if item.dtype not in ITEMSIZE or item.numel < 0
        }
    )
    for name, items in manifest.templates.items():
        widths = [ITEMSIZE[item.dtype] for item in items if item.dtype in ITEMSIZE]
        # Or some tensor would not lie at a multiple of its element.
        if widths != sorted(widths, reverse=True):
            problems.append(f"template {name!r} does not begin with its widest elements")
    if problems:
        raise CorruptCheckpointError(
            f"{place}: {'; '.join(problems)}; load an older iteration with --ckpt-step"
        )
