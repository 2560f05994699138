"""The checkpoint that messages call the newest durable one is there, and none is newer."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flashckpt.catalog.listing import newest_durable
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.posix import PosixStorage


@pytest.mark.parametrize(
    ("committed", "foreign", "tracked", "newest"),
    [
        ((), (), None, None),
        ((2, 4), (), "4", 4),
        ((2, 4), (), "2", 4),
        ((2,), (), "4", 2),
        ((2,), (4,), "2", 2),
        ((2,), (4,), "4", 4),
        ((2,), (4,), "release", 2),
        ((), (), "4", None),
    ],
    ids=[
        "nothing",
        "tracked",
        "not tracked yet",
        "the tracked one is not there",
        "a torn one is newer",
        "Megatron's own format",
        "a release is tracked",
        "only a tracker",
    ],
)
def test_the_newest_durable_checkpoint(
    tmp_path: Path,
    committed: tuple[int, ...],
    foreign: tuple[int, ...],
    tracked: str | None,
    newest: int | None,
) -> None:
    for iteration in (*committed, *foreign):
        (tmp_path / file_names.iteration_dir(iteration)).mkdir()
    for iteration in committed:
        (tmp_path / file_names.iteration_dir(iteration) / file_names.MANIFEST).touch()
    if tracked is not None:
        (tmp_path / file_names.TRACKER).write_text(tracked)
    assert newest_durable(PosixStorage(tmp_path)) == newest
