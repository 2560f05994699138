"""Messages between agents of different nodes: msgpack, never pickle; bytes travel separately.

One side sends requests; the other side answers each request once, in order.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from megatron_flashckpt.agent.peers.topology import ParityGroup, Part
from megatron_flashckpt.agent.slot_bytes import SlotDescriptor

#: Payload bytes of one message.
CHUNK_NBYTES = 4 * 1024 * 1024
#: Larger frames are rejected.
MAX_FRAME_NBYTES = 64 * 1024 * 1024


def steps(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield `(start, nbytes)` of the messages in which a range is sent."""
    for position in range(start, end, CHUNK_NBYTES):
        yield position, min(CHUNK_NBYTES, end - position)


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Announces a part of a staged checkpoint. Reply: Taken, or Declined."""

    part: Part
    label: SlotDescriptor


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """Carries bytes of a part from `start` on, in order. Reply: Taken, or Declined."""

    lane: ParityGroup
    rank: int
    save_id: str
    start: int


class End(msgspec.Struct, frozen=True, tag=True):
    """All bytes were sent. Reply: Taken, or Declined."""

    lane: ParityGroup
    rank: int
    save_id: str


class SendAgain(msgspec.Struct, frozen=True, tag=True):
    """The sender has lost the parts that it held for the receiver. Reply: Taken."""

    node: int
    successor: bool
    """The agent that the parts were sent to is gone, and the sender has replaced it."""


class Find(msgspec.Struct, frozen=True, tag=True):
    """Asks for everything from which checkpoints of `rank` can be rebuilt. Reply: Found."""

    rank: int


class Held(msgspec.Struct, frozen=True):
    """A holder's part of one rank's checkpoint, combined with parts of other ranks."""

    part: Part
    label: SlotDescriptor
    others: tuple[tuple[int, int, int], ...]
    """Rank, start and end of the ranges of other ranks' checkpoints in the combination."""


class Found(msgspec.Struct, frozen=True, tag=True):
    labels: tuple[SlotDescriptor, ...]
    """Checkpoints of that rank in this node's own slots."""
    slots: tuple[tuple[int, str], ...]
    """Rank and save of all checkpoints in this node's own slots."""
    held: tuple[Held, ...]


class ReadSlot(msgspec.Struct, frozen=True, tag=True):
    """Asks for bytes of a slot. Reply: Taken, with the bytes; or Declined."""

    rank: int
    save_id: str
    start: int
    nbytes: int


class ReadHeld(msgspec.Struct, frozen=True, tag=True):
    """Asks for bytes of a held save. Reply: Taken, with the bytes; or Declined."""

    lane: ParityGroup
    save_id: str
    start: int
    nbytes: int


class Taken(msgspec.Struct, frozen=True, tag=True):
    already: bool = False
    """Reply to Begin: the part is held already and must not be sent."""


class Declined(msgspec.Struct, frozen=True, tag=True):
    reason: str


Request = Begin | Chunk | End | SendAgain | Find | ReadSlot | ReadHeld
Reply = Taken | Declined | Found

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
