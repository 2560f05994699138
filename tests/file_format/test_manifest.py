"""The manifest: it merges one record per rank, and forged or damaged manifests are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_flashckpt import FORMAT_VERSION
from megatron_flashckpt.errors import CorruptCheckpointError, FormatVersionError
from megatron_flashckpt.file_format.commit_record import CommitRecord, Coordinates, encode_items
from megatron_flashckpt.file_format.end import HEAD_NBYTES, End, kind_of
from megatron_flashckpt.file_format.file_names import (
    LAST_OF_FORMAT_1,
    record_name,
    shard_name,
)
from megatron_flashckpt.file_format.manifest import (
    Manifest,
    decode_facts,
    decode_manifest,
    encode_manifest,
    merge,
)
from megatron_flashckpt.file_format.run_object import FOREIGN, Ancestor
from megatron_flashckpt.file_format.seal import seal
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.template import pieces_of, placement_length
from tests.support.strategies import layout_of, moved, piece_lists

SAVE_ID = "000008-3fa9.00003.1"
PLACE = f"iter_0000007/{SAVE_ID}.end"
ANCESTORS = (Ancestor("000005-00ab", 4), Ancestor(FOREIGN, 2))
PIECES = [
    Piece("layer.w", "master", "F32", (9, 4), (0, 0), (4, 4), 2, 14),
    Piece("layer.w", "weight", "BF16", (9, 4), (0, 0), (4, 4), 0, 15),
]


def record(rank: int, pieces: list[Piece], **changes: object) -> CommitRecord:
    layout = layout_of(pieces)
    made = CommitRecord(
        iteration=7,
        save_id=SAVE_ID,
        rank=rank,
        coordinates=Coordinates(tp=rank),
        file=shard_name(rank, SAVE_ID),
        nbytes=4096 + layout.nbytes,
        header_digest=f"{rank:016x}",
        template_fingerprint=layout.template_fingerprint,
        template=encode_items(layout.template.items),
        template_nbytes=layout.nbytes,
        placement=layout.placement,
    )
    return msgspec.structs.replace(made, **changes)


def merged(records: list[CommitRecord], world_size: int | None = None) -> Manifest:
    return merge(
        records,
        world_size=len(records) if world_size is None else world_size,
        description={"tp": 2, "note": "für Menschen"},
        common_digest="00ff",
        ancestors=ANCESTORS,
    )


def two_stages() -> Manifest:
    return merged([record(0, PIECES), record(1, [moved(piece, 4) for piece in PIECES])])


class ForgedManifest:
    """A valid manifest as JSON, in which a test forges a field."""

    def __init__(self) -> None:
        self.tree = json.loads(encode_manifest(two_stages()))

    @property
    def shard(self) -> dict:
        return self.tree["shards"][1]

    @property
    def items(self) -> list:
        (items,) = self.tree["templates"].values()
        return items

    def encode(self) -> bytes:
        """Return the forged manifest with a valid digest, so that only its content is wrong."""
        return seal(json.dumps({k: v for k, v in self.tree.items() if k != "digest"}).encode())


@settings(max_examples=50)
@given(st.lists(piece_lists, min_size=1, max_size=4), st.randoms())
def test_a_decoded_manifest_holds_every_rank_with_its_pieces(ranks, random):
    records = [record(rank, pieces) for rank, pieces in enumerate(ranks)]
    random.shuffle(records)
    encoded = encode_manifest(merged(records))
    manifest = decode_manifest(encoded, PLACE)
    assert manifest == merged(records)
    assert [shard.rank for shard in manifest.shards] == list(range(len(ranks)))
    for shard, pieces in zip(manifest.shards, ranks, strict=True):
        layout = layout_of(pieces)
        template = manifest.template(shard.template)
        assert pieces_of(template, shard.placement) == pieces
        assert template.items == layout.template.items
        assert template.nbytes == layout.nbytes
        assert shard.file == shard_name(shard.rank, SAVE_ID)
    assert kind_of(encoded[:HEAD_NBYTES]) is End.COMMITTED
    facts = decode_facts(encoded, PLACE)
    assert (facts.save_id, facts.iteration, facts.ancestors) == (SAVE_ID, 7, ANCESTORS)


def test_equal_stages_store_their_template_and_keys_once():
    manifest = two_stages()
    assert len(manifest.templates) == 1
    assert manifest.keys == ("layer.w",)
    assert manifest.shards[0].placement != manifest.shards[1].placement


@pytest.mark.parametrize(
    ("ranks", "world_size", "missing"),
    [([0, 2], 3, "[1]"), ([], 2, "[0, 1]"), ([0, 0], 2, "[1]"), ([0, 1], 1, "[]")],
)
def test_merge_refuses_a_missing_or_doubled_rank(ranks, world_size, missing):
    with pytest.raises(CorruptCheckpointError) as caught:
        merged([record(rank, PIECES) for rank in ranks], world_size)
    assert f"ranks {ranks} for a world of {world_size}; missing: {missing}" in str(caught.value)


@pytest.mark.parametrize("changes", [{"save_id": "000008-3fa9.00003.2"}, {"iteration": 8}])
def test_merge_refuses_records_of_two_saves(changes):
    with pytest.raises(CorruptCheckpointError, match="commit records of different saves") as caught:
        merged([record(0, PIECES), record(1, PIECES, **changes)])
    assert SAVE_ID in str(caught.value)
    assert str(next(iter(changes.values()))) in str(caught.value)


@pytest.mark.parametrize(
    "encoded",
    [
        *(b"", b"not json", b"\xff\xfe", b"[]", b"null", b"{}", b'{"version":null}'),
        *(b'{"version":"1"}', b'{"version":1.5}', b'{"version":2}', b'{"version":2,"\xff":2}'),
        b'{"version":2,"save_id":"\\ud800"}',
        encode_manifest(two_stages())[:-1],
        encode_manifest(two_stages()) + b"}",
    ],
)
def test_a_file_that_is_no_manifest_is_corrupt(encoded):
    with pytest.raises(CorruptCheckpointError, match=f"{PLACE}: is not a manifest .*--ckpt-step"):
        decode_manifest(encoded, PLACE)


@pytest.mark.parametrize("field", ["description", "unknown", "templates"])
def test_deep_nesting_is_corrupt_not_a_crash(field):
    for depth in (1_000, 100_000):
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        encoded = b'{"version":2,"' + field.encode() + b'":' + nested + b"}"
        with pytest.raises(CorruptCheckpointError, match=PLACE):
            decode_manifest(encoded, PLACE)


@pytest.mark.parametrize(
    ("version", "remedy"),
    [(FORMAT_VERSION + 1, "upgrade"), (10**30, "upgrade"), (1, LAST_OF_FORMAT_1)],
)
def test_a_manifest_of_another_version_is_not_reported_as_damaged(version, remedy):
    body = json.dumps({"version": version, "shards": "of another type"}).encode()
    with pytest.raises(FormatVersionError, match=f"{PLACE}: format version {version}; .*{remedy}"):
        decode_manifest(seal(body), PLACE)
    # A newer release also seals its manifest: a flipped bit must not look like a newer version.
    with pytest.raises(CorruptCheckpointError, match="the file was changed"):
        decode_manifest(seal(body).replace(b"another", b"Another"), PLACE)


def shard_file(name: str) -> tuple[Callable[[ForgedManifest], object], str]:
    message = f"{re.escape(repr(name))} is not the shard of rank 1 of this save"
    return lambda forged: forged.shard.update(file=name), message


def placement_of(length: int) -> tuple[Callable[[ForgedManifest], object], str]:
    message = f"a placement of {length} numbers for a template that takes 6"
    return lambda forged: forged.shard.update(placement=[0] * length), message


def position_of(position: int, message: str) -> tuple[Callable[[ForgedManifest], object], str]:
    return lambda forged: forged.items[1].__setitem__(6, position), message


def key_index(index: int) -> tuple[Callable[[ForgedManifest], object], str]:
    message = "names a key that is not in the table"
    return lambda forged: forged.items[1].__setitem__(0, index), message


def shards_of(*ranks: int) -> tuple[Callable[[ForgedManifest], object], str]:
    def forge(forged: ForgedManifest) -> None:
        forged.tree["shards"] = [{**forged.shard, "rank": rank} for rank in ranks]

    return forge, "shards are not those of ranks 0 to 1"


def field_of(name: str, value: object) -> tuple[Callable[[ForgedManifest], object], str]:
    return lambda forged: forged.tree.update({name: value}), "is not a manifest"


#: Forgeries that carry a right digest, and the defects that the error names.
FORGERIES = [
    *map(shard_file, ("", "..", "/etc/passwd", f"../{shard_name(1, SAVE_ID)}")),
    *map(shard_file, (f"{shard_name(1, SAVE_ID)}/../../x", f"{shard_name(1, SAVE_ID)}\n")),
    *map(shard_file, (record_name(range(1, 2), SAVE_ID), shard_name(0, SAVE_ID))),
    shard_file(shard_name(1, "000008-3fa9.00003.2")),
    (lambda forged: forged.tree.update(save_id="x"), "'x' is not the name of a save"),
    (lambda forged: forged.shard.update(template="feed"), "unknown template 'feed'"),
    *map(placement_of, (0, 5, 7)),
    position_of(-1, "begin before"),
    position_of(2**40, "a placement of 6"),
    *map(key_index, (-1, 1, 2**40)),
    (lambda forged: forged.items.reverse(), "has tensors that are not aligned to"),
    *(shards_of(*ranks) for ranks in ([0], [1, 0], [0, 0], [0, 2], [0, 1, 2])),
    *(field_of("iteration", "7"), field_of("save_id", None), field_of("world_size", 2.5)),
    *(field_of("description", []), field_of("common_digest", 0), field_of("keys", [1])),
    *(field_of("templates", []), field_of("shards", {}), field_of("shards", [None, None])),
]


@pytest.mark.parametrize(("forge", "message"), FORGERIES)
def test_a_forged_manifest_is_corrupt(forge, message):
    forged = ForgedManifest()
    forge(forged)
    with pytest.raises(CorruptCheckpointError, match=f"(?s){PLACE}.*{message}"):
        decode_manifest(forged.encode(), PLACE)


def test_one_error_names_all_forged_fields():
    forged = ForgedManifest()
    forged.tree["shards"][0]["file"] = "../a"
    forged.shard.update(file="../b", template="feed")
    forged.items[0][0] = 5
    with pytest.raises(CorruptCheckpointError) as caught:
        decode_manifest(forged.encode(), PLACE)
    for offender in (PLACE, "'../a'", "'../b'", "'feed'", "names a key"):
        assert offender in str(caught.value)


@given(st.data())
def test_a_manifest_with_changed_bytes_is_refused(data):
    original = encode_manifest(two_stages())
    encoded = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    assume(bytes(encoded) != original)
    with pytest.raises((CorruptCheckpointError, FormatVersionError)):
        decode_manifest(bytes(encoded), PLACE)


@given(st.data())
def test_a_forged_manifest_can_name_only_shard_files(data):
    body = bytearray(ForgedManifest().encode())
    start = body.index(b",") + 1
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(start, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        manifest = decode_manifest(seal(b"{" + bytes(body[start:])), PLACE)
    except (CorruptCheckpointError, FormatVersionError):
        return  # any other exception fails the test
    for shard in manifest.shards:
        assert "/" not in shard.file
        assert placement_length(manifest.templates[shard.template]) == len(shard.placement)
