"""The header of a shard file: plain safetensors, so that any tool opens it.

    8 bytes   little-endian length N of the header
    N bytes   JSON: `__metadata__` and one entry per tensor; padded with spaces so that the data
              section starts at a multiple of 4096
    rest      the data section: the slot's bytes as they lie

`__metadata__["flashckpt"]` is a JSON string (`ShardMetadata`): the save and the rank, the geometry
of every piece, and the xxh3-64 digest of each 4 MiB chunk of the data section.
"""

from __future__ import annotations

import struct

import msgspec
import xxhash

from megatron_flashckpt import FORMAT_VERSION
from megatron_flashckpt.errors import (
    OLDER,
    UNDECODABLE,
    CorruptCheckpointError,
    FormatVersionError,
    LayoutError,
)
from megatron_flashckpt.file_format.file_names import LAST_OF_FORMAT_1
from megatron_flashckpt.layout.dtypes import ITEMSIZE
from megatron_flashckpt.layout.template import Placement, Template, pieces_of

#: Bytes of the data section that one digest covers.
CHUNK_NBYTES = 4 * 1024 * 1024
#: The data section starts at a multiple of this, for O_DIRECT and mmap. If the writing machine has
#: larger pages, it starts at a multiple of their size.
ALIGNMENT = 4096
#: Larger headers are refused; safetensors itself stops at 100 MB.
MAX_HEADER_NBYTES = 100_000_000

_LENGTH = struct.Struct("<Q")
_NO_DIGEST = 16 * "0"
#: Digests in the header: JSON within JSON.
_DIGESTS = rb"\"digests\":\"%s\""


class ShardMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `__metadata__["flashckpt"]`."""

    version: int
    iteration: int
    save_id: str
    rank: int
    world_size: int
    chunk_nbytes: int
    digests: str
    """16 hexadecimal digits per chunk, in order."""
    pieces: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int], ...]
    """`(global_shape, offset, shape, start)` per tensor, in file order."""


def chunk_count(nbytes: int) -> int:
    """Return the number of digests of a data section of `nbytes`."""
    return -(-nbytes // CHUNK_NBYTES)


def chunk_digest(chunk: bytes | bytearray | memoryview) -> str:
    """Return the digest of `chunk`, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(chunk)


def new_chunk_digest() -> xxhash.xxh3_64:
    """Return a digest object for a chunk that arrives in parts."""
    return xxhash.xxh3_64()


def encode_header(
    template: Template,
    placement: Placement,
    *,
    iteration: int,
    save_id: str,
    rank: int,
    world_size: int,
    alignment: int = ALIGNMENT,
) -> bytes:
    """Return the header with its length prefix and padding; the digests are zeros (`fill_in`).

    The header's size does not depend on the digests, so the data can be written first.

    Args:
        alignment: the size is a multiple of this number, itself a multiple of `ALIGNMENT`.
    """
    metadata = ShardMetadata(
        version=FORMAT_VERSION,
        iteration=iteration,
        save_id=save_id,
        rank=rank,
        world_size=world_size,
        chunk_nbytes=CHUNK_NBYTES,
        digests=chunk_count(template.nbytes) * _NO_DIGEST,
        pieces=tuple(
            (piece.global_shape, piece.offset, piece.shape, piece.start)
            for piece in pieces_of(template, placement)
        ),
    )
    encoded = msgspec.json.encode({"flashckpt": msgspec.json.encode(metadata).decode()})
    body = b'{"__metadata__":' + encoded
    # The template's entries are encoded once and shared; only their opening brace is replaced.
    body += b"}" if not template.items else b"," + template.header_entries[1:]
    padding = -(_LENGTH.size + len(body)) % alignment
    return _LENGTH.pack(len(body) + padding) + body + b" " * padding


def fill_in(header: bytes, digests: list[str]) -> bytes:
    """Return a header that `encode_header` made, with the digests of all chunks."""
    zeros = _DIGESTS % (len(digests) * _NO_DIGEST).encode()
    # The first match is the right one: only numbers and the save id stand before it.
    place = header.find(zeros)
    if place < 0:
        raise LayoutError(f"{len(digests)} digests for a file of another number of chunks")
    filled = _DIGESTS % "".join(digests).encode()
    return header[:place] + filled + header[place + len(zeros) :]


def header_nbytes(prefix: bytes, place: str) -> int:
    """Return the bytes before the data section, from the first 8 bytes of a file."""
    if len(prefix) < _LENGTH.size:
        raise CorruptCheckpointError(
            f"{place}: {len(prefix)} bytes long, too short for a header; {OLDER}"
        )
    (length,) = _LENGTH.unpack(prefix[: _LENGTH.size])
    if not 2 <= length <= MAX_HEADER_NBYTES:
        raise CorruptCheckpointError(
            f"{place}: header claims {length} bytes, so this is not a shard file; {OLDER}"
        )
    return int(_LENGTH.size + length)


class _Entry(msgspec.Struct, frozen=True):
    """Tensor of the header. `__metadata__` decodes as an impossible tensor."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


class Shard(msgspec.Struct, frozen=True):
    """A decoded header."""

    metadata: ShardMetadata
    digests: tuple[str, ...]
    data_offset: int
    nbytes: int
    """Bytes of the data section."""


_METADATA = msgspec.json.Decoder(ShardMetadata)


_ENTRIES = msgspec.json.Decoder(dict[str, _Entry])


def decode_header(
    header: bytes, place: str, expected: tuple[Template, Placement] | None = None
) -> Shard:
    """Return the contents of the header.

    Args:
        header: length prefix and JSON, `header_nbytes` bytes.
        place: file name for messages.
        expected: the tensors that the manifest says the file has. None: the header is not compared,
            because only the save or the digests are wanted.

    Raises:
        CorruptCheckpointError: not JSON, not a flashckpt shard, contradicting itself, or not the
            expected tensors.
        FormatVersionError: written by a newer release.
    """
    try:
        body = memoryview(header)[_LENGTH.size :]
        entries = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        outer = msgspec.json.decode(entries.pop("__metadata__"), type=dict[str, str])
        version = msgspec.json.decode(outer["flashckpt"], type=dict[str, msgspec.Raw])["version"]
        refuse_other_version(msgspec.json.decode(version, type=int), place)
        metadata = _METADATA.decode(outer["flashckpt"])
        tensors = _ENTRIES.decode(body)
        del tensors["__metadata__"]
    except (KeyError, *UNDECODABLE) as error:
        raise CorruptCheckpointError(
            f"{place}: header is not that of a flashckpt shard ({error}); {OLDER}"
        ) from error
    nbytes = _contiguous_nbytes(tensors, metadata, place)
    if expected is not None and not _matches(tensors, metadata, *expected):
        raise CorruptCheckpointError(
            f"{place}: its pieces differ from those in the manifest; {OLDER}"
        )
    digests = tuple(metadata.digests[i : i + 16] for i in range(0, len(metadata.digests), 16))
    if metadata.chunk_nbytes != CHUNK_NBYTES or len(digests) != chunk_count(nbytes):
        raise CorruptCheckpointError(
            f"{place}: {len(digests)} digests of {metadata.chunk_nbytes} bytes do not match "
            f"{nbytes} bytes of data; {OLDER}"
        )
    return Shard(metadata, digests, len(header), nbytes)


def _contiguous_nbytes(tensors: dict[str, _Entry], metadata: ShardMetadata, place: str) -> int:
    """Return the bytes of the tensors.

    Raises:
        CorruptCheckpointError: they do not lie one behind the other, or lack a geometry.
    """
    position = 0
    is_sound = len(tensors) == len(metadata.pieces)
    for entry in tensors.values():
        start, end = entry.data_offsets
        is_sound &= start == position <= end
        position = end
    if not is_sound:
        raise CorruptCheckpointError(
            f"{place}: header is not that of a flashckpt shard (it contradicts itself); {OLDER}"
        )
    return position


def _matches(
    tensors: dict[str, _Entry], metadata: ShardMetadata, template: Template, placement: Placement
) -> bool:
    """Return whether a header describes exactly the tensors of `template` and `placement`."""
    if not len(tensors) == len(metadata.pieces) == len(template.items):
        return False
    for (name, entry), geometry, item in zip(
        tensors.items(), metadata.pieces, template.items, strict=True
    ):
        *offset, start = placement[item.place]
        end = item.byte_offset + item.numel * ITEMSIZE[item.dtype]
        if (
            geometry != (item.global_shape, tuple(offset), item.shape, start)
            or entry.data_offsets != (item.byte_offset, end)
            or entry.shape != (item.numel,)
            or entry.dtype != item.dtype
            or name.rpartition("#")[0] != f"{item.kind}/{item.key}"
        ):
            return False
    return True


def refuse_other_version(version: int, place: str) -> None:
    """Raise FormatVersionError if `version` is not the format that this release reads."""
    if version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{place}: format version {version}; this release reads version {FORMAT_VERSION}: "
            f"upgrade megatron_flashckpt, or {OLDER}"
        )
    if version < FORMAT_VERSION:
        raise older_version(place)


def older_version(place: str) -> FormatVersionError:
    """Return the error for a checkpoint of format 1, which this release does not read."""
    return FormatVersionError(
        f"{place}: format version 1; this release reads version {FORMAT_VERSION}: convert the "
        f"checkpoint with the last commit that reads format 1 ({LAST_OF_FORMAT_1}), by 'flashckpt "
        f"convert --to torch_dist', or {OLDER}"
    )
