"""The marker of a committed save: the manifest's facts about the save, in 200 bytes.

The committing agent writes the marker after the manifest. Agents of other nodes read the marker
instead of the manifest, which has megabytes in a large job. The manifest decides: the marker
repeats the manifest's first bytes, which contain its digest, and counts only while they match.
"""

from __future__ import annotations

import msgspec
import xxhash

from megatron_flashckpt.errors import UNDECODABLE, CorruptCheckpointError
from megatron_flashckpt.file_format.manifest import HEAD_NBYTES, CommitFacts
from megatron_flashckpt.layout.save_cost import SaveCost

_DIGEST_NBYTES = 8


class Marker(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Contents of `committed-<id>.msgpack`."""

    manifest_head: bytes
    iteration: int
    save_id: str
    cost: SaveCost | None

    @property
    def facts(self) -> CommitFacts:
        """The manifest's facts about the save that waiting nodes need."""
        return CommitFacts(
            iteration=self.iteration,
            save_id=self.save_id,
            cost=self.cost,
        )


def marker_of(facts: CommitFacts, manifest: bytes) -> Marker:
    """Return the marker of a save, from its facts and its encoded manifest (or the head of it)."""
    return Marker(
        manifest_head=manifest[:HEAD_NBYTES],
        iteration=facts.iteration,
        save_id=facts.save_id,
        cost=facts.cost,
    )


def encode_marker(marker: Marker) -> bytes:
    """Return the bytes of a marker: the digest (8 bytes), then the digested body."""
    body = msgspec.msgpack.encode(marker)
    return xxhash.xxh3_64_digest(body) + body


_MARKER = msgspec.msgpack.Decoder(Marker)


def decode_marker(encoded: bytes, place: str) -> Marker:
    """Return the marker that `encode_marker` encoded.

    Raises:
        CorruptCheckpointError: `encoded` is no marker, or was changed.
    """
    digest, body = encoded[:_DIGEST_NBYTES], encoded[_DIGEST_NBYTES:]
    try:
        if digest != xxhash.xxh3_64_digest(body):
            raise msgspec.DecodeError("its digest does not match")
        return _MARKER.decode(body)
    except UNDECODABLE as error:
        raise CorruptCheckpointError(
            f"{place}: is not a marker of a committed save ({error}); agents read the manifest "
            "instead"
        ) from error
