"""Shard files: the real safetensors library opens them, and forged headers are refused.

A hostile header raises `CorruptCheckpointError`, a newer one `FormatVersionError`, and no header
raises another exception.
"""

from __future__ import annotations

import contextlib
import json
import struct

import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flashckpt import FORMAT_VERSION
from megatron_flashckpt.errors import CorruptCheckpointError, FormatVersionError, LayoutError
from megatron_flashckpt.file_format.file_names import LAST_OF_FORMAT_1
from megatron_flashckpt.file_format.shard_file import (
    ALIGNMENT,
    CHUNK_NBYTES,
    MAX_HEADER_NBYTES,
    Shard,
    chunk_count,
    chunk_digest,
    decode_header,
    encode_header,
    fill_in,
    header_nbytes,
)
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.template import tensor_names
from tests.support.strategies import layout_of, piece_lists

PLACE = "iter_0000007/rank_00003.safetensors"
SAVE = {"iteration": 7, "save_id": "000008-3fa9.00003.1", "rank": 3, "world_size": 16}
PIECES = [
    Piece("layer.w", "master", "F32", (8, 4), (4, 0), (4, 4), 2, 14),
    Piece("layer.w", "weight", "BF16", (8, 4), (4, 0), (4, 4), 0, 16),
    Piece("layer.w", "weight", "BF16", (8, 4), (0, 0), (4, 4), 3, 3),
]


def header_of(pieces: list[Piece], digests: list[str] | None = None) -> bytes:
    layout = layout_of(pieces)
    if digests is None:
        digests = ["0123456789abcdef"] * chunk_count(layout.nbytes)
    return fill_in(encode_header(layout.template, layout.placement, **SAVE), digests)


def decoded(header: bytes, pieces: list[Piece] = PIECES) -> Shard:
    """Return the contents of a header that should describe `pieces`."""
    layout = layout_of(pieces)
    return decode_header(header, PLACE, (layout.template, layout.placement))


def data_for(pieces: list[Piece]) -> bytes:
    return bytes(i * 37 % 251 for i in range(sum(piece.nbytes for piece in pieces)))


def framed(body: bytes) -> bytes:
    return struct.pack("<Q", len(body)) + body


class ForgedHeader:
    """A valid header, in which a test forges a field before it is encoded again."""

    def __init__(self) -> None:
        self.entries = json.loads(header_of(PIECES)[8:])
        self.metadata = json.loads(self.entries["__metadata__"]["flashckpt"])
        self.names = [name for name in self.entries if name != "__metadata__"]

    def encode(self) -> bytes:
        self.entries["__metadata__"] = {"flashckpt": json.dumps(self.metadata)}
        return framed(json.dumps(self.entries).encode())

    def tensor(self, position: int) -> dict:
        return self.entries[self.names[position]]


@settings(max_examples=50)
@given(piece_lists)
def test_the_real_safetensors_library_reads_every_tensor(pieces):
    data = data_for(pieces)
    read = dict(safetensors.deserialize(header_of(pieces) + data))
    names = tensor_names([(piece.kind, piece.key) for piece in pieces])
    assert set(read) == set(names)
    position = 0
    for name, piece in zip(names, pieces, strict=True):
        assert read[name]["dtype"] == piece.dtype
        assert read[name]["shape"] == [piece.numel]
        assert bytes(read[name]["data"]) == data[position : position + piece.nbytes]
        position += piece.nbytes


def test_safe_open_shows_the_save_and_the_pieces(tmp_path):
    path = tmp_path / "shard.safetensors"
    path.write_bytes(header_of(PIECES) + data_for(PIECES))
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = json.loads(file.metadata()["flashckpt"])
    assert {name: metadata[name] for name in SAVE} == SAVE
    assert metadata["pieces"][0] == [[8, 4], [4, 0], [4, 4], 2]


@settings(max_examples=50)
@given(piece_lists)
def test_a_decoded_header_equals_the_encoded_one(pieces):
    header = header_of(pieces)
    shard = decoded(header, pieces)
    assert shard == decode_header(header, PLACE)
    assert shard.nbytes == sum(piece.nbytes for piece in pieces)
    assert shard.digests == ("0123456789abcdef",) * chunk_count(shard.nbytes)
    assert {name: getattr(shard.metadata, name) for name in SAVE} == SAVE
    assert shard.data_offset == len(header) == header_nbytes(header[:8], PLACE)
    assert len(header) % ALIGNMENT == 0


@given(st.lists(st.binary(min_size=8, max_size=8), min_size=3, max_size=3))
def test_the_size_of_a_header_does_not_depend_on_its_digests(raw):
    numel = 2 * CHUNK_NBYTES + 1
    pieces = [Piece("w", "weight", "U8", (numel,), (0,), (numel,), 0, numel)]
    digests = [part.hex() for part in raw]
    header = header_of(pieces, digests)
    assert len(header) == len(header_of(pieces, ["0" * 16] * 3))
    assert decode_header(header, PLACE).digests == tuple(digests)


def test_every_started_chunk_has_a_digest():
    counts = [(0, 0), (1, 1), (CHUNK_NBYTES, 1), (CHUNK_NBYTES + 1, 2), (2 * CHUNK_NBYTES, 2)]
    assert [(nbytes, chunk_count(nbytes)) for nbytes, _ in counts] == counts
    for digests in ([], ["0" * 16] * 2):
        with pytest.raises(LayoutError, match=f"{len(digests)} digests for a file of another"):
            header_of(PIECES, digests)


@given(st.binary(min_size=1, max_size=64), st.data())
def test_a_flipped_bit_changes_the_digest(chunk, data):
    digest = chunk_digest(chunk)
    assert len(digest) == 16
    assert int(digest, 16) >= 0
    flipped = bytearray(chunk)
    flipped[data.draw(st.integers(0, len(chunk) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert chunk_digest(flipped) != digest
    assert chunk_digest(memoryview(chunk)) == digest


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        *((prefix, f"{len(prefix)} bytes long, too short") for prefix in (b"", b"1234567")),
        *(
            (struct.pack("<Q", length), f"header claims {length} bytes")
            for length in (0, 1, MAX_HEADER_NBYTES + 1, 2**63, 2**64 - 1)
        ),
    ],
)
def test_an_impossible_length_is_refused_before_the_header_is_read(prefix, reason):
    with pytest.raises(CorruptCheckpointError, match=f"{PLACE}: .*{reason}"):
        header_nbytes(prefix, PLACE)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"not json", b"\xff\xfe\x00", b"[]", b"null", b"{}", b'{"__metadata__":null}'),
        *(b'{"__metadata__":[]}', b'{"__metadata__":{}}', b'{"__metadata__":{"format":"pt"}}'),
        *(b'{"__metadata__":{"flashckpt":7}}', b'{"__metadata__":{"flashckpt":"not json"}}'),
        b'{"__metadata__":{"flashckpt":"{}"}}',
        b'{"__metadata__":{"flashckpt":"{\\"version\\":\\"1\\"}"}}',
        b'{"__metadata__":{"flashckpt":"{\\"version\\":1.5}"}}',
        b'{"__metadata__":{"flashckpt":"{\\"version\\":2}"}}',
        b'{"__metadata__":{"flashckpt":"\\ud800"}}',
        b'{"\xff":{}}',
        header_of(PIECES)[8:-1].rstrip()[:-1],
    ],
)
def test_a_header_that_is_not_ours_is_corrupt(body):
    with pytest.raises(CorruptCheckpointError, match=PLACE):
        decode_header(framed(body), PLACE)


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_deep_nesting_is_corrupt_not_a_crash(depth):
    nested = "[" * depth + "]" * depth
    inside = {"__metadata__": {"flashckpt": f'{{"version":2,"pieces":{nested}}}'}}
    outside = [f'{{"{name}":{nested}}}' for name in ("__metadata__", "weight/w#0")]
    for body in (*outside, json.dumps(inside)):
        with pytest.raises(CorruptCheckpointError, match=PLACE):
            decode_header(framed(body.encode()), PLACE)


#: Values of fields in our part of the header.
FORGED_FIELDS = [
    *(("iteration", "7"), ("save_id", 7), ("rank", None), ("world_size", 1.5)),
    *(("chunk_nbytes", 4096), ("chunk_nbytes", 0), ("digests", ""), ("digests", ["0" * 19])),
    *(("digests", "0" * 38), ("pieces", None), ("pieces", [])),
    ("pieces", [[[8, 4], [4, 0], [4, 4], "2"]] * 3),
    ("pieces", [[[8, 4], [4, 0], [4, 4]]] * 3),
    ("pieces", [[[8, 4], [4, 0], [4, 4], 9]] * 3),
    ("pieces", [[[8, 4], [5, 0], [4, 4], 0]] * 3),
    ("pieces", [[[8, 4], [-4, 0], [4, 4], 0]] * 3),
    ("pieces", [[[8], [4, 0], [4, 4], 0]] * 3),
]
#: Numbers of tensors, and entries of the safetensors header about them.
FORGED_TENSORS = [
    *((0, {"data_offsets": offsets}) for offsets in ([0, 47], [0, 49], [0, 2**60], [-48, 0], [0])),
    *((1, {"data_offsets": offsets}) for offsets in ([0, 32], [40, 80], [48, 16])),
    (2, {"data_offsets": [0, 0]}),
    *((0, {"shape": shape}) for shape in ([12, 1], [], [-12], [13], [12.5])),
    *((0, {"dtype": dtype}) for dtype in ("F12", "F64", None)),
    (0, {"shape": [11], "data_offsets": [0, 44]}),
    (1, {"shape": [17], "data_offsets": [48, 82]}),
]


@pytest.mark.parametrize(("field", "value"), [(None, None), *FORGED_FIELDS, *FORGED_TENSORS])
def test_a_forged_header_is_corrupt(field, value):
    forged = ForgedHeader()
    if field is None:
        assert decoded(forged.encode()).nbytes == 80, "the header is valid before the forgery"
        return
    if isinstance(field, str):
        forged.metadata[field] = value
    else:
        forged.tensor(field).update(value)
    with pytest.raises(CorruptCheckpointError, match=PLACE):
        decoded(forged.encode())


@pytest.mark.parametrize("change", ["one more", "one less", "another name"])
def test_other_tensors_than_those_of_the_manifest_are_corrupt(change):
    forged = ForgedHeader()
    if change != "one less":
        forged.entries["weight/x#0"] = {"dtype": "BF16", "shape": [0], "data_offsets": [80, 80]}
    if change != "one more":
        del forged.entries[forged.names[-1]]
    with pytest.raises(CorruptCheckpointError, match=PLACE):
        decoded(forged.encode())


@given(st.data())
def test_a_header_with_changed_bytes_is_refused_or_describes_the_tensors(data):
    header = bytearray(header_of(PIECES).rstrip(b" "))
    for _ in range(data.draw(st.integers(1, 3))):
        header[data.draw(st.integers(8, len(header) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptCheckpointError, FormatVersionError):  # no other exception
        shard = decoded(bytes(header))
        assert (shard.nbytes, len(shard.digests)) == (80, 1)


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        (FORMAT_VERSION + 1, f"reads version {FORMAT_VERSION}: upgrade"),
        (10**30, "upgrade"),
        (FORMAT_VERSION - 1, f"last commit .*{LAST_OF_FORMAT_1}"),
    ],
)
def test_a_header_of_another_version_is_not_reported_as_damaged(version, remedy):
    forged = ForgedHeader()
    # A newer release may change everything except the place of the version.
    forged.metadata = {"version": version, "pieces": "of another type"}
    with pytest.raises(FormatVersionError, match=f"format version {version}; .*{remedy}"):
        decode_header(forged.encode(), PLACE)
