"""The marker of a committed save: what the manifest says of the save as a whole, in 200 bytes.

The agent that commits puts the marker after the manifest. Agents of other nodes read the marker
instead of the manifest, which is megabytes long in a large job. The manifest decides: the marker
repeats the manifest's first bytes, its digest, and counts only while the manifest begins so.
"""

from __future__ import annotations

import msgspec
import xxhash

from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.file_format.manifest import HEAD_NBYTES, CommitFacts
from megatron_flashckpt.layout.save_cost import SaveCost

_DIGEST_NBYTES = 8


class Marker(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Contents of `committed-<id>.msgpack`."""

    manifest_head: bytes
    iteration: int
    save_id: str
    differing: tuple[str, ...]
    compared: bool
    cost: SaveCost | None

    @property
    def facts(self) -> CommitFacts:
        """What the manifest says of the save, as far as waiting nodes need it."""
        return CommitFacts(
            iteration=self.iteration,
            save_id=self.save_id,
            cost=self.cost,
            differing=self.differing,
            compared=self.compared,
        )


def marker_of(facts: CommitFacts, manifest: bytes) -> Marker:
    """Return the marker of the save whose encoded manifest, or the beginning of it, is given."""
    return Marker(
        manifest_head=manifest[:HEAD_NBYTES],
        iteration=facts.iteration,
        save_id=facts.save_id,
        differing=facts.differing,
        compared=facts.compared,
        cost=facts.cost,
    )


def encode_marker(marker: Marker) -> bytes:
    """Return the bytes of a marker: the digest (8 bytes), then what it is the digest of."""
    body = msgspec.msgpack.encode(marker)
    return xxhash.xxh3_64_digest(body) + body


_MARKER = msgspec.msgpack.Decoder(Marker)


def decode_marker(encoded: bytes, place: str) -> Marker:
    """Return what `encode_marker` was given.

    Raises:
        CorruptCheckpointError: it is no such marker, or was changed.
    """
    digest, body = encoded[:_DIGEST_NBYTES], encoded[_DIGEST_NBYTES:]
    try:
        if digest != xxhash.xxh3_64_digest(body):
            raise msgspec.DecodeError("its digest is another")
        return _MARKER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{place}: is not a marker of a committed save ({error}); agents read the manifest "
            "instead"
        ) from error
