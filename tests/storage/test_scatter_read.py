"""Reads of a file into memory parts of any length, in blocks, even if calls read less."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from megatron_flashckpt.storage import scatter_read
from megatron_flashckpt.storage.scatter_read import read_parts


@pytest.mark.parametrize("seed", range(12))
def test_parts_of_any_length_are_filled_and_reported_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Short reads and low limits make block borders and part borders differ in many ways."""
    dice = random.Random(seed)
    data = dice.randbytes(dice.randrange(1, 900))
    (tmp_path / "f").write_bytes(data)
    monkeypatch.setattr(scatter_read, "BLOCK_NBYTES", 64)
    monkeypatch.setattr(scatter_read, "_MAX_PARTS", 4)
    preadv = os.preadv

    def short(fd: int, parts: list[memoryview], offset: int) -> int:
        assert len(parts) <= 4
        assert 0 < sum(part.nbytes for part in parts) <= 64
        room = dice.randrange(1, 80)
        cut = []
        for part in parts:
            cut.append(part[:room])
            room -= cut[-1].nbytes
        return preadv(fd, cut, offset)

    monkeypatch.setattr(scatter_read.os, "preadv", short)
    start = dice.randrange(len(data))
    parts = [bytearray(b"?" * dice.choice((0, 1, 7, 64, 200))) for _ in range(9)]
    seen: list[bytes] = []
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    try:
        views = [memoryview(part) for part in parts]
        filled = read_parts(fd, start, views, lambda part: seen.append(bytes(part)))
    finally:
        os.close(fd)
    wanted = sum(map(len, parts))
    assert filled == min(wanted, len(data) - start)
    assert b"".join(parts) == data[start : start + filled] + b"?" * (wanted - filled)
    assert b"".join(seen) == data[start : start + filled]
