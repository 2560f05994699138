"""Seal: the digest of a JSON object, which is the object's own first field.

No flipped bit of a sealed object is obeyed: not of a manifest, of a run, or of the tracker's twin.
"""

from __future__ import annotations

import xxhash


def seal(body: bytes) -> bytes:
    """Return JSON object `body` with the digest of its own bytes as its first field."""
    return _seal_of(body) + body[1:]


def broken_seal(encoded: bytes) -> str | None:
    """Return what shows that `seal`, of any release, did not make `encoded`; None: it did."""
    length = len(_seal_of(b""))
    body = b"{" + encoded[length:]
    if encoded.startswith(_seal_of(body)):
        return None
    stored_digest = encoded[length - 18 : length - 2].decode(errors="replace")
    digest = xxhash.xxh3_64_hexdigest(body)
    return f"digest {digest}, expected {stored_digest!r}: the file was changed"


def _seal_of(body: bytes) -> bytes:
    return b'{"digest":"%s",' % xxhash.xxh3_64_hexdigest(body).encode()
