"""Remarks on checkpoints that other programs wrote."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from megatron_flashckpt.catalog.foreign import dlrover_remark
from megatron_flashckpt.storage.posix import PosixStorage


@pytest.mark.parametrize(
    ("names", "remark"),
    [
        (["rank_00000", "rank_00001", "mp_rank_00"], "'flashckpt convert' reads it"),
        (["rank_00001", "mp_rank_00"], "no rank_00000: committed incomplete"),
        (["rank_00000", "rank_00003"], "no rank_00001, no mp_rank_*: committed incomplete"),
    ],
)
def test_the_first_missing_rank_of_a_dlrover_checkpoint_is_named(
    tmp_path: Path, names: list[str], remark: str
) -> None:
    for name in names:
        (tmp_path / "iter_0000010" / name).mkdir(parents=True)
    assert dlrover_remark(PosixStorage(tmp_path), "iter_0000010") == remark


def test_a_directory_with_the_name_of_a_far_rank_needs_no_memory(tmp_path: Path) -> None:
    (tmp_path / "iter_0000010/rank_01000000").mkdir(parents=True)
    tracemalloc.start()
    try:
        dlrover_remark(PosixStorage(tmp_path), "iter_0000010")
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 2**20
