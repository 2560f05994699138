"""Reads of a committed checkpoint: exactly the staged bytes, or an error."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.catalog.stored_checkpoint import (
    StoredCheckpoint,
    open_checkpoint,
    read_manifest,
)
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.errors import (
    CorruptCheckpointError,
    NotCommittedError,
    RenamedCheckpointError,
)
from megatron_flashckpt.file_format.end import Failure, encode_failure
from megatron_flashckpt.file_format.file_names import next_attempt, save_name
from megatron_flashckpt.file_format.run_object import Ancestor
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import read_plan
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.checkpoints import (
    SAVE_ID,
    TP,
    WORLD,
    MadeSave,
    expected,
    fail,
    make,
    read,
    read_all,
    snapshot,
    whole_boxes,
)

A = 3 * CHUNK_NBYTES // 8 - 5
B = CHUNK_NBYTES // 12 + 1000
#: Two tensors that fill a little more than two chunks; the first ends in the second chunk.
LARGE = [
    Piece("large.a", "master", "F32", (A,), (0,), (A,), 0, A),
    Piece("large.b", "weight", "BF16", (3, B), (0, 0), (3, B), 0, 3 * B),
]


def equal(tensors: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(tensors) == len(wanted) and all(map(torch.equal, tensors, wanted))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeSave:
    return make(tmp_path_factory.mktemp("small") / "save")


# ---------------------------------------------------------------------- reads


@pytest.mark.parametrize("threads", [1, 8])
def test_every_piece_is_read_back_bit_for_bit(made: MadeSave, threads: int) -> None:
    pieces = [piece for held in made.pieces for piece in held]
    assert len({piece.kind for piece in pieces}) == 5
    assert equal(read_all(made, threads), expected(pieces))


@pytest.mark.parametrize("tp", range(TP))
def test_a_rank_reads_whole_boxes_that_several_replicas_saved(made: MadeSave, tp: int) -> None:
    boxes = whole_boxes(tp)
    plan = read_plan(boxes, made.stored().sources(), "it")
    assert len(plan.reads) > 1, "several replicas have saved the boxes"
    assert equal(read(made.stored(), boxes), expected(boxes))


def test_an_iteration_without_a_checkpoint_is_refused_with_the_reason(tmp_path: Path) -> None:
    """One that was removed since it was chosen is not damaged: a load chooses anew."""
    made, store = make(tmp_path, 10), PosixStore(tmp_path)
    fail(tmp_path, 20, SAVE_ID, "the disk is full")
    for iteration, reason in (
        (20, "iteration 20 was not committed: the disk is full"),
        (30, "iteration 30 was not committed, or was removed since; choose another"),
    ):
        with pytest.raises(NotCommittedError, match=reason):
            open_checkpoint(store, iteration)
    gone = Failure(failed="no rule of 'retention' keeps it", was_removed=True)
    made.manifest.write_bytes(encode_failure(gone))
    with pytest.raises(NotCommittedError, match="no rule of 'retention' keeps it; choose another"):
        read_manifest(store, Save(made.iteration, made.save_id))


def test_the_manifest_of_another_save_or_iteration_is_refused(made: MadeSave) -> None:
    encoded, store = made.manifest.read_bytes(), PosixStore(made.root)
    with pytest.raises(CorruptCheckpointError, match=f"is the end of {made.save_id}"):
        StoredCheckpoint(store, Save(made.iteration, next_attempt(made.save_id)), encoded)
    renamed = r"iter_0000011: holds iteration 10, .*rename it to iter_0000010"
    with pytest.raises(RenamedCheckpointError, match=renamed):
        StoredCheckpoint(store, Save(11, made.save_id), encoded)


def test_of_several_saves_the_one_of_the_newest_history_is_opened(tmp_path: Path) -> None:
    """The run that was set back is the second one; a third run then continues the first."""
    first, second, third = "000001-aaaa", "000002-bbbb", "000003-cccc"
    make(tmp_path, 10, save_name(first, 1))
    make(tmp_path, 10, save_name(second, 1))
    store = PosixStore(tmp_path)
    assert open_checkpoint(store, 10).save.run == second, "the highest, of unrelated runs"
    make(tmp_path, 20, save_name(third, 1), ancestors=(Ancestor(first, 10),))
    assert open_checkpoint(store, 10).save.run == first


# ---------------------------------------------------------------------- flipped bits


def regions(file: Path) -> dict[str, tuple[int, int]]:
    """Return the byte ranges of a shard file's parts."""
    content = file.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    body = len(content[:data].rstrip(b" "))
    return {
        "length": (0, 8),
        "header": (8, body),
        "padding": (body, data),
        "data": (data, len(content)),
    }


@pytest.mark.parametrize("region", ["length", "header", "padding", "data"])
def test_verify_and_a_full_read_find_any_flipped_bit(tmp_path: Path, region: str) -> None:
    made, chosen = make(tmp_path / "save"), random.Random(region)
    for _ in range(30):
        file = made.shard(chosen.randrange(WORLD))
        intact = file.read_bytes()
        position = chosen.randrange(*regions(file)[region])
        flipped = bytearray(intact)
        flipped[position] ^= 1 << chosen.randrange(8)
        file.write_bytes(flipped)
        before = snapshot(made.root)
        (damage,) = verify(made.stored())
        assert isinstance(damage, CorruptCheckpointError)
        assert f"{file}" in str(damage)
        assert str(damage).endswith("; load an older iteration with --ckpt-step")
        with pytest.raises(CorruptCheckpointError) as caught:
            read_all(made)
        assert str(caught.value) == str(damage)
        assert snapshot(made.root) == before
        file.write_bytes(intact)
    assert verify(made.stored()) == []


def test_a_damaged_chunk_is_named_and_other_chunks_stay_readable(tmp_path: Path) -> None:
    made = make(tmp_path / "save", ranks=[LARGE])
    with open(made.shard(0), "r+b") as file:
        file.seek(-1000, 2)
        (byte,) = file.read(1)
        file.seek(-1000, 2)
        file.write(bytes([byte ^ 4]))
    stored = made.stored()
    (damage,) = verify(stored)
    where = f"chunk 2 (bytes {2 * CHUNK_NBYTES}-{stored.shard(0).nbytes - 1} of the data)"
    assert re.search(rf"{re.escape(where)}: digest \w{{16}}, expected \w{{16}};", str(damage))
    assert stored.shard(0).digests[2] in str(damage)
    assert equal(read(stored, LARGE[:1]), expected(LARGE[:1]))


def test_a_shard_removed_during_a_read_is_reported_as_missing(tmp_path: Path) -> None:
    made = make(tmp_path / "save")
    stored = made.stored()
    shard = stored.shard(1)
    made.shard(1).unlink()
    with pytest.raises(CorruptCheckpointError, match=r"rank_00001\.safetensors: is missing; "):
        stored.chunk(shard, 0)
