"""Remarks on checkpoints that other programs wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flashckpt.catalog.foreign import dlrover_empty, dlrover_remark, megatron_format
from megatron_flashckpt.catalog.listing import (
    COMMITTED,
    MEGATRON,
    checkpoints,
    loadable_iterations,
)
from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.errors import NotCommittedError
from megatron_flashckpt.file_format.file_names import TRACKER
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.checkpoints import make


@pytest.mark.parametrize(
    ("names", "remark"),
    [
        (["rank_00000", "rank_00001", "mp_rank_00"], "'flashckpt convert' reads it"),
        (["rank_00001", "mp_rank_00"], "no rank_00000: committed incomplete"),
        (["rank_00000", "rank_00003"], "no rank_00001, no mp_rank_*: committed incomplete"),
        # A list of all ranks below this one would fill the memory.
        (["rank_00000", "rank_99999999999"], "no rank_00001, no mp_rank_*: committed incomplete"),
    ],
)
def test_the_first_missing_rank_of_a_dlrover_checkpoint_is_named(
    tmp_path: Path, names: list[str], remark: str
) -> None:
    for name in names:
        (tmp_path / "iter_0000010" / name).mkdir(parents=True)
    assert dlrover_remark(PosixStore(tmp_path), "iter_0000010") == remark


@pytest.mark.parametrize(
    "contents",
    [b'{"sharded_backend":"torch_d\xffst"}', b'{"sharded_backend":', b"[" * 60000, b"[]", None],
    ids=["no UTF-8", "cut off", "nested", "a list", "a directory"],
)
def test_a_damaged_file_of_another_program_ends_no_command(
    tmp_path: Path, contents: bytes | None
) -> None:
    """Other checkpoints in the directory are intact, and the listing names the format as `?`."""
    committed = make(tmp_path, iteration=8).iteration
    for name in ("iter_0000005/metadata.json", "dlrover_latest.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if contents is None:
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_bytes(contents)
    (tmp_path / TRACKER).write_text("5")
    store = PosixStore(tmp_path)
    assert megatron_format(store, "iter_0000005") == "?"
    assert dlrover_empty(store, 5) is None
    states = [(entry.iteration, entry.state) for entry in checkpoints(store)]
    assert states == [(5, MEGATRON), (8, COMMITTED)]
    assert loadable_iterations(store) == [committed]
    with pytest.raises(NotCommittedError, match="Megatron's own format"):
        open_checkpoint(store, 5)
