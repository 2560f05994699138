"""The commit record: what one rank's agent leaves beside a shard that is durable.

The agent that commits merges the records of all ranks into the manifest (`manifest.py`).
"""

from __future__ import annotations

import msgspec
import xxhash

from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.layout.copies import CopySum
from megatron_flashckpt.layout.save_cost import RankCost
from megatron_flashckpt.layout.template import Placement, TemplateItem

_DIGEST_NBYTES = 8


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
    differing: tuple[str, ...] = ()
    """Keys of which the rank has a copy that was known to differ."""
    sums: tuple[CopySum, ...] | None = None
    """Of what the rank has of tensors with copies. None: copies are not compared in this save."""


def encode_items(items: tuple[TemplateItem, ...]) -> msgspec.Raw:
    """Return a template's items as a commit record has them."""
    return msgspec.Raw(msgspec.msgpack.encode(items))


#: Stands in a record for items that another record has: thousands of copies would fill the memory.
KNOWN_ITEMS = msgspec.Raw()


def decode_items(record: CommitRecord) -> tuple[TemplateItem, ...]:
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
