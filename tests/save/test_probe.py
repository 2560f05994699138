"""Probe of the save directory before the first step; two gloo ranks represent two nodes."""

from __future__ import annotations

import datetime
import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from megatron_flashckpt.agent.cleanup import Sweeper
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.file_format.file_names import CLAIM
from megatron_flashckpt.save import probe
from megatron_flashckpt.storage.base import Writer, probe_name, temporary_name
from megatron_flashckpt.storage.posix import PosixStorage
from tests.support.trainer import eventually


class _RefusingStorage(PosixStorage):
    """Real storage on which one operation fails, as on some mounts of object stores."""

    def __init__(self, root: Path, refused: str, number: int = errno.EPERM) -> None:
        super().__init__(root)
        self.refused, self.number = refused, number

    def _maybe(self, operation: str) -> None:
        if operation == self.refused:
            raise StorageError(self.number, os.strerror(self.number))

    def create(self, name: str, nbytes: int) -> Writer:  # type: ignore[override]
        writer = super().create(name, nbytes)
        write_at = writer.write_at

        def at(offset: int, chunk: bytes | memoryview) -> None:
            if offset:
                self._maybe("write")
            write_at(offset, chunk)

        writer.write_at = at  # type: ignore[method-assign]
        return writer

    def move(self, name: str, to: str) -> None:
        self._maybe("rename")
        super().move(name, to)

    def list(self, directory: str) -> list[str]:
        return [] if self.refused == "list" else super().list(directory)

    def present(self, directory: str, names: Iterable[str]) -> set[str]:
        if self.refused == "see":
            return {name for name in super().present(directory, names) if "00000" in name}
        return super().present(directory, names)


def check(storage: PosixStorage, wait_s: float = 60.0) -> None:
    probe.check(storage, 0, is_first_of_node=True, wait_s=wait_s)


def left(root: Path) -> list[str]:
    return sorted(os.listdir(root)) if root.exists() else []


def test_a_usable_directory_passes_and_stays_empty(tmp_path: Path) -> None:
    root = tmp_path / "save"
    check(PosixStorage(root))
    eventually("nothing is left", lambda: not left(root))


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ("write", "cannot write at any position of a file"),
        ("rename", "cannot rename a file"),
        ("list", "cannot list a new file"),
    ],
)
def test_a_refusal_names_the_operation_that_the_file_system_lacks(
    tmp_path: Path, refused: str, message: str
) -> None:
    root = tmp_path / "save"
    with pytest.raises(StorageError, match=message) as raised:
        check(_RefusingStorage(root, refused))
    assert str(root) in str(raised.value)
    assert "shared by all nodes" in str(raised.value)
    eventually("nothing is left", lambda: not left(root))


def test_storage_that_hangs_is_refused_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    monkeypatch.setattr(probe, "_ANSWER_S", 0.2)
    healed = threading.Event()
    storage = PosixStorage(tmp_path)
    monkeypatch.setattr(storage, "move", lambda name, to: healed.wait(60.0))
    try:
        with pytest.raises(StorageError, match="does not answer within 0 s"):
            check(storage)
    finally:
        healed.set()


def test_a_probe_file_left_by_a_crash_is_removed(tmp_path: Path) -> None:
    (tmp_path / probe_name(3)).touch()
    (tmp_path / ".notes.0123abcd.tmp").touch()
    (tmp_path / temporary_name(CLAIM)).touch()
    sweeper = Sweeper(PosixStorage(tmp_path))
    sweeper.find_orphans_soon(lambda iteration: False)
    sweeper.sweep()
    assert left(tmp_path) == [".notes.0123abcd.tmp"]


# ---------------------------------------------------------------------- two nodes


def rank_main(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    shared, own = Path(directory, "shared"), Path(directory, f"own-{rank}")
    cases = {
        "shared": PosixStorage(shared),
        "own": PosixStorage(own),
        "late": _RefusingStorage(shared, "see"),
        "one fails": _RefusingStorage(shared, "rename" if rank else "nothing"),
    }
    results: dict[str, str | None] = {}
    for name, storage in cases.items():
        try:
            probe.check(storage, rank, is_first_of_node=True, wait_s=0.3)
            results[name] = None
        except StorageError as error:
            results[name] = str(error)
    try:
        probe.check(PosixStorage(shared), rank, is_first_of_node=rank == 0, wait_s=0.3)
        results["one node"] = None
    except StorageError as error:
        results["one node"] = str(error)
    for off in (0, 1):
        wait_s = None if rank == off else 0.3
        storage = PosixStorage(own) if rank == off else _RefusingStorage(shared, "rename")
        try:
            probe.check(storage, rank, is_first_of_node=True, wait_s=wait_s)
            results[f"off on {off}"] = None
        except StorageError as error:
            results[f"off on {off}"] = str(error)
    Path(directory, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    directory = tmp_path_factory.mktemp("probe")
    torch.multiprocessing.spawn(rank_main, (str(directory),), 2)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def test_two_nodes_that_share_the_directory_pass(results: list[dict[str, str | None]]) -> None:
    assert [result["shared"] for result in results] == [None, None]
    assert [result["one node"] for result in results] == [None, None]


@pytest.mark.parametrize("case", ["own", "late"])
def test_all_ranks_refuse_nodes_that_do_not_share_the_directory(
    results: list[dict[str, str | None]], case: str
) -> None:
    for result in results:
        message = result[case]
        assert message is not None
        assert "does not see the files of 1 of 2 nodes (those of ranks 1)" in message
        assert "a directory of its own" in message


def test_an_error_on_one_node_is_raised_on_all(results: list[dict[str, str | None]]) -> None:
    for result in results:
        assert result["one fails"] is not None
        assert "cannot rename a file" in result["one fails"]


@pytest.mark.parametrize("off", [0, 1])
def test_no_node_waits_for_a_node_without_a_probe(
    results: list[dict[str, str | None]], off: int
) -> None:
    """Nodes may have different settings; all ranks must still make the same collective calls."""
    for result in results:
        message = result[f"off on {off}"]
        assert message is not None
        assert "cannot rename a file" in message
