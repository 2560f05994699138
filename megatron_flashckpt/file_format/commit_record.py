"""The commit record: a node's agent writes it when shards are durable.

A file holds the records of the ranks that became durable together, mostly all ranks of a node. The
agent that commits merges the records of all ranks into the manifest (`manifest.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import xxhash

from megatron_flashckpt.errors import UNDECODABLE, CorruptCheckpointError
from megatron_flashckpt.layout.save_cost import RankCost
from megatron_flashckpt.layout.template import Placement, TemplateItem

_DIGEST_NBYTES = 8


class Coordinates(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a rank in the parallel layout (each value is the rank within that group)."""

    tp: int = 0
    pp: int = 0
    dp: int = 0
    cp: int = 0
    ep: int = 0
    edp: int = 0


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the agent of one rank reports once the shard is durable."""

    iteration: int
    save_id: str
    rank: int
    coordinates: Coordinates
    file: str
    nbytes: int
    header_digest: str
    template_fingerprint: str
    template: msgspec.Raw
    """Encoded (`encode_items`), because ranks share templates: few of thousands are decoded."""
    template_nbytes: int
    placement: Placement
    metrics: dict[str, float] = {}
    """Metrics of the model that training code on this rank has reported."""
    cost: RankCost | None = None
    """Timings of the save; None if the trainer died before it reported them."""


def encode_items(items: tuple[TemplateItem, ...]) -> msgspec.Raw:
    """Return a template's items as stored in a commit record."""
    return msgspec.Raw(msgspec.msgpack.encode(items))


#: Replaces items that another record has, because thousands of copies would fill the memory. In a
#: file the value is MessagePack's nil.
KNOWN_ITEMS = msgspec.Raw(b"\xc0")


_ITEMS = msgspec.msgpack.Decoder(tuple[TemplateItem, ...])


def decode_items(record: CommitRecord) -> tuple[TemplateItem, ...]:
    try:
        return _ITEMS.decode(record.template)
    except UNDECODABLE as error:
        raise CorruptCheckpointError(
            f"the commit record of rank {record.rank}: its template cannot be decoded ({error})"
        ) from error


def encode_records(records: Iterable[CommitRecord]) -> bytes:
    """Return the bytes of a record file: the body, then its digest (8 bytes).

    The digest comes last, because an object that `Store.create` makes must not begin with 0xFF.

    The first record of each template has its items, the others have `KNOWN_ITEMS` instead.
    """
    known: set[str] = set()
    body = []
    for record in records:
        is_known = record.template_fingerprint in known
        known.add(record.template_fingerprint)
        body.append(msgspec.structs.replace(record, template=KNOWN_ITEMS) if is_known else record)
    encoded = msgspec.msgpack.encode(body)
    return encoded + xxhash.xxh3_64_digest(encoded)


_RECORDS = msgspec.msgpack.Decoder(list[CommitRecord])


def decode_records(encoded: bytes, place: str) -> list[CommitRecord]:
    """Return the records that `encode_records` encoded.

    Raises:
        CorruptCheckpointError: `encoded` is not such a file, or was changed.
    """
    body, digest = encoded[:-_DIGEST_NBYTES], encoded[-_DIGEST_NBYTES:]
    try:
        if digest != xxhash.xxh3_64_digest(body):
            raise msgspec.DecodeError("its digest does not match")
        records = _RECORDS.decode(body)
    except UNDECODABLE as error:
        raise CorruptCheckpointError(
            f"{place}: is not a commit record ({error}); the next save writes new ones"
        ) from error
    return [
        msgspec.structs.replace(record, template=KNOWN_ITEMS)
        if record.template == KNOWN_ITEMS
        else record
        for record in records
    ]
