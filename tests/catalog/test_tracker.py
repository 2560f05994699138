"""Contents of the tracker: an iteration, `release`, no name, or a tracker that is no file."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flashckpt.catalog.directory import read_facts
from megatron_flashckpt.catalog.tracker import (
    tracked_iteration,
    tracker_text,
)
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.file_format.file_names import TRACKER
from megatron_flashckpt.storage.opening import open_store

NAMED = {
    b"12": 12,
    b" 7\n": 7,
    b"1" * 19: int("1" * 19),
    b"1" * 20: None,
    b"1" * 10**6: None,
    b"release": None,
    b"-1": None,
    b"\xff": None,
    b"": None,
}


@pytest.mark.parametrize(("contents", "iteration"), NAMED.items(), ids=range(len(NAMED)))
def test_a_tracker_names_the_iteration_in_its_text(
    tmp_path: Path, contents: bytes, iteration: int | None
) -> None:
    (tmp_path / TRACKER).write_bytes(contents)
    store = open_store(tmp_path)
    assert tracked_iteration(store) == iteration
    assert len(tracker_text(store) or "") <= 4096


@pytest.mark.parametrize("kind", ["missing", "directory", "link"])
def test_a_tracker_that_is_no_file_names_nothing(tmp_path: Path, kind: str) -> None:
    """A load takes the newest checkpoint then."""
    match kind:
        case "directory":
            (tmp_path / TRACKER).mkdir()
        case "link":
            (tmp_path / "other").write_text("5")
            (tmp_path / TRACKER).symlink_to("other")
    store = open_store(tmp_path)
    assert tracked_iteration(store) is None
    facts = read_facts(store)
    assert (facts.tracker, facts.tracker_is_damaged) == (None, kind != "missing")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_tracker_that_cannot_be_read_now_is_an_error(number: int) -> None:
    def refuse(*_: object) -> bytes:
        raise StorageError(number, "refused")

    store: Any = SimpleNamespace(get=refuse)
    with pytest.raises(StorageError):
        tracked_iteration(store)
