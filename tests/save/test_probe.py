"""Probe of the save directory before the first step; two gloo ranks represent two nodes."""

from __future__ import annotations

import builtins
import datetime
import errno
import json
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_flashckpt.catalog.directory import check_run_is_known
from megatron_flashckpt.error_classes import class_of
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.save import probe
from megatron_flashckpt.storage import posix_store
from megatron_flashckpt.storage.object_store import ObjectStore
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.posix_writer import PosixWriter
from megatron_flashckpt.storage.store import Entry
from tests.support.forked.nursery import call_in_ranks
from tests.support.trainer import eventually


class _RefusingStore(PosixStore):
    """A real store on which one operation fails, as on some mounts of object stores."""

    def __init__(self, root: Path, refused: str) -> None:
        super().__init__(root)
        self.refused = refused

    def create(self, name: str, data: bytes) -> None:
        if self.refused == "create":
            raise StorageError(errno.EPERM, class_of(errno.EPERM).remedy)
        super().create(name, data)

    def list(self, directory: str, *, sizes: bool = True) -> builtins.list[Entry]:
        entries = super().list(directory, sizes=sizes)
        if self.refused == "see" and not sizes:
            return [entry for entry in entries if "00000" in entry.name]
        return entries


def check(store: PosixStore, wait_s: float = 60.0) -> None:
    probe.check(store, 0, is_first_of_node=True, wait_s=wait_s)


def left(root: Path) -> list[str]:
    """Return the probes that are left."""
    return sorted(entry.name for entry in PosixStore(root).list("flashckpt/probe"))


def test_a_refusal_names_the_operation_that_the_file_system_lacks(tmp_path: Path) -> None:
    root = tmp_path / "save"
    with pytest.raises(StorageError, match="cannot create a name once") as raised:
        check(_RefusingStore(root, "create"))
    assert str(root) in str(raised.value)
    assert "the file system refuses the operation: save elsewhere" in str(raised.value)
    eventually("nothing is left", lambda: not left(root))


def test_a_node_that_must_not_probe_writes_nothing(tmp_path: Path) -> None:
    store = _RefusingStore(tmp_path / "save", "create")
    probe.check(store, 0, is_first_of_node=True, wait_s=None)
    assert not (tmp_path / "save").exists()


def test_a_write_that_fails_once_ends_no_start_and_old_probes_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that restarts while a job starts."""
    store, failures = PosixStore(tmp_path), [StorageError(errno.ESHUTDOWN, "the server restarts")]
    store.create("flashckpt/probe/00003-0123abcd", b"of a killed job")
    lost_answers = failures.copy()

    class Failing(PosixWriter):
        def write_at(self, offset: int, chunk: bytes | memoryview) -> None:
            if failures:
                raise failures.pop()
            super().write_at(offset, chunk)

        def finish(self) -> None:
            super().finish()
            if lost_answers:
                raise lost_answers.pop()

    monkeypatch.setattr(posix_store, "PosixWriter", Failing)
    check(store)
    assert not failures
    assert not lost_answers
    eventually("nothing is left", lambda: not left(tmp_path))


def test_storage_that_hangs_is_refused_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_ANSWER_S", 0.2)
    healed = threading.Event()
    store = PosixStore(tmp_path)
    monkeypatch.setattr(store, "create", lambda name, data: healed.wait(60.0))
    try:
        with pytest.raises(StorageError, match="does not answer within 0 s"):
            check(store)
    finally:
        healed.set()


@pytest.mark.second_tier
def test_messages_about_a_bucket_advise_nothing_about_files(s3_url: str) -> None:
    store = ObjectStore(s3_url)
    never = threading.Event()
    messages = []
    try:
        for work in (
            lambda: probe._within(0.2, lambda: never.wait(60.0), store),
            lambda: probe._await(store, ["flashckpt/probe/00000-0123abcd"], 0.0),
            lambda: check_run_is_known(store, "000007-0a1b.00001.1"),
        ):
            with pytest.raises(StorageError) as raised:
                work()
            messages.append(str(raised.value))
    finally:
        never.set()
    for message, cure in zip(messages, ("endpoint", "AWS_*", "endpoint"), strict=True):
        assert cure in message
        assert not [word for word in ("mount", "directory", "file") if word in message], message


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
    refusing = _RefusingStore(shared, "create")
    #: By case: the store, whether this rank probes for its node, and how long rank 0 waits.
    cases: dict[str, tuple[PosixStore, bool, float | None]] = {
        "shared": (PosixStore(shared), True, 0.3),
        "own": (PosixStore(own), True, 0.3),
        "late": (_RefusingStore(shared, "see"), True, 0.3),
        "one fails": (refusing if rank else PosixStore(shared), True, 0.3),
        "one node": (PosixStore(shared), rank == 0, 0.3),
    }
    for off in (0, 1):
        is_off = (PosixStore(own), True, None)
        cases[f"off on {off}"] = is_off if rank == off else (refusing, True, 0.3)
    results: dict[str, str | None] = {}
    for name, (storage, is_first, wait_s) in cases.items():
        try:
            probe.check(storage, rank, is_first_of_node=is_first, wait_s=wait_s)
            results[name] = None
        except StorageError as error:
            results[name] = str(error)
    Path(directory, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    directory = tmp_path_factory.mktemp("probe")
    call_in_ranks(rank_main, (str(directory),), 2)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def test_all_ranks_refuse_nodes_that_do_not_share_the_directory(
    results: list[dict[str, str | None]],
) -> None:
    for result in results:
        assert result["shared"] is result["one node"] is None
        for case in ("own", "late"):
            message = result[case] or ""
            assert "does not see what 1 of 2 nodes (those of ranks 1) have written 0" in message
            assert "a directory of its own" in message


@pytest.mark.parametrize("case", ["one fails", "off on 0", "off on 1"])
def test_an_error_on_one_node_is_raised_on_all(
    results: list[dict[str, str | None]], case: str
) -> None:
    """Also if one node has no probe: all ranks must still make the same collective calls."""
    for result in results:
        assert "cannot create a name once" in (result[case] or "")
