"""What agents of different nodes say to each other: msgpack, never pickle; bytes travel beside.

One asks, the other answers each request once, in order.
"""

from __future__ import annotations

import msgspec

from megatron_flashckpt.agent.peers.topology import Lane, Part
from megatron_flashckpt.memory.slot import SlabGeometry

#: Bytes that travel in one message.
CHUNK_NBYTES = 4 * 1024 * 1024
#: A frame that is larger than this is not of this protocol.
MAX_FRAME_NBYTES = 64 * 1024 * 1024


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """All that is needed to make a slot again from its bytes, and to know that they are right."""

    rank: int
    iteration: int
    save_id: str
    geometry: SlabGeometry
    meta_nbytes: int
    data_nbytes: int
    meta_digest: str
    digests: tuple[str, ...]
    """Of the data, one per 4 MiB, as in a shard file."""
    memory_only: bool
    """It is not meant for storage."""

    @property
    def nbytes(self) -> int:
        return self.meta_nbytes + self.data_nbytes


class Begin(msgspec.Struct, frozen=True, tag=True):
    """A part of a staged checkpoint is about to come. Reply: Taken, or Declined."""

    part: Part
    label: Label


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """Comes with bytes: those of the part from `start` on, in order. Reply: Taken, or Declined."""

    lane: Lane
    rank: int
    save_id: str
    start: int


class End(msgspec.Struct, frozen=True, tag=True):
    """All bytes were sent. Reply: Taken, or Declined."""

    lane: Lane
    rank: int
    save_id: str


class SendAgain(msgspec.Struct, frozen=True, tag=True):
    """I have lost what I held for you. Reply: Taken."""

    node: int
    successor: bool
    """The agent that you sent it to is gone, and I have its place."""


class Find(msgspec.Struct, frozen=True, tag=True):
    """What do you have that could bring back the checkpoints of `rank`? Reply: Found."""

    rank: int


class Held(msgspec.Struct, frozen=True):
    """What a holder has of one rank's checkpoint, combined with the parts of other ranks."""

    part: Part
    label: Label
    others: tuple[tuple[int, int, int], ...]
    """Rank, start and end of the ranges of the others' checkpoints that it is combined with."""


class Found(msgspec.Struct, frozen=True, tag=True):
    labels: tuple[Label, ...]
    """Checkpoints of that rank that lie in this node's own slots."""
    slots: tuple[tuple[int, str], ...]
    """All that lies in this node's own slots: rank and save."""
    held: tuple[Held, ...]


class ReadSlot(msgspec.Struct, frozen=True, tag=True):
    """Reply: Taken, with the bytes; or Declined."""

    rank: int
    save_id: str
    start: int
    nbytes: int


class ReadHeld(msgspec.Struct, frozen=True, tag=True):
    """Reply: Taken, with the bytes; or Declined."""

    lane: Lane
    save_id: str
    start: int
    nbytes: int


class Taken(msgspec.Struct, frozen=True, tag=True):
    already: bool = False
    """To Begin: it was here before, do not send it."""


class Declined(msgspec.Struct, frozen=True, tag=True):
    reason: str


Request = Begin | Chunk | End | SendAgain | Find | ReadSlot | ReadHeld
Reply = Taken | Declined | Found

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
