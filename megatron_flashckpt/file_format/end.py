"""The end of a save: one object, which whoever creates it first decides.

It is a manifest (`manifest.py`), and the save is a checkpoint; or it says why the save failed. The
first bytes tell which, so that a waiting node reads no manifest.
"""

from __future__ import annotations

import enum

import msgspec

from megatron_flashckpt.errors import UNDECODABLE

#: Bytes of an end that tell which end it is.
HEAD_NBYTES = len(b'{"failed"')
#: Bytes to read of the end of a failed save, at most.
FAILED_NBYTES = 2**16
#: Characters of a reason that an end keeps: each takes 6 bytes at most, as an escape of JSON does.
_MAX_REASON = FAILED_NBYTES // 8


class End(enum.Enum):
    """Meaning of the end of a save."""

    COMMITTED = "committed"
    FAILED = "failed"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the end of a failed save."""

    failed: str
    """Reason, with place and remedy."""
    lasts: bool = False
    """True if only a person can remove the cause."""
    is_final: bool = False
    """True if no further attempt can make a checkpoint of the save: a rank has no part in it."""
    was_interrupted: bool = False
    """True if the save was not complete when its job ended or crashed: no node has an error."""
    was_removed: bool = False
    """True if the save was committed, and its checkpoint was removed since: a node that still
    waits for the end may report the save as committed."""


def kind_of(head: bytes) -> End:
    """Return which end begins with `head`, of at least `HEAD_NBYTES`.

    Anything but a failure counts as a manifest: a load reports a damaged one, and nothing is
    removed.
    """
    return End.FAILED if head.startswith(b'{"failed"') else End.COMMITTED


def encode_failure(failure: Failure) -> bytes:
    """Return the end of a failed save; a reason that readers would not read whole is shortened."""
    text = failure.failed.encode(errors="backslashreplace").decode()  # a path may be no text
    return msgspec.json.encode(msgspec.structs.replace(failure, failed=text[:_MAX_REASON]))


_FAILURE = msgspec.json.Decoder(Failure)


def decode_failure(encoded: bytes) -> Failure:
    """Return the failure in the end of a failed save; a damaged one has an unknown reason."""
    try:
        return _FAILURE.decode(encoded)
    except UNDECODABLE:
        return Failure(failed="the save failed; its end is damaged, so the reason is unknown")
