"""Commands on a save directory that was copied to a bucket of a real S3 server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_flashckpt.catalog.history import append
from megatron_flashckpt.storage.object_store import ObjectStore
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.cli.conftest import Run, only_line
from tests.support import histories
from tests.support.checkpoints import make
from tests.support.object_server import Proxy


def copy(save: Path, url: str) -> ObjectStore:
    """Copy the files to the bucket, as a person does with a tool of the cloud."""
    store = ObjectStore(url)
    for path in save.rglob("*"):
        if path.is_file():
            store.put(path.relative_to(save).as_posix(), path.read_bytes())
    return store


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save directory with checkpoints of iterations 10 and 20, and a history."""
    save = tmp_path_factory.mktemp("two") / "save"
    for iteration in (10, 20):
        make(save, iteration)
    for event in histories.history(2):
        append(PosixStore(save), event)
    return save


def test_a_copy_in_a_bucket_looks_like_the_directory(run: Run, two: Path, s3_url: str) -> None:
    only_line(run("ls", s3_url), rf"{s3_url}: holds no checkpoint; .*")
    store = copy(two, s3_url)
    for command in (
        "ls DIR",
        "ls DIR --json",
        "inspect DIR",
        "inspect DIR --iteration 10 --json",
        "verify DIR --all",
        "verify DIR --json",
        "report DIR",
        "report DIR --json",
        "prune DIR --latest 1 --dry-run",
    ):
        local, remote = (
            run(*(place if word == "DIR" else word for word in command.split()))
            for place in (two, s3_url)
        )
        assert (remote.status, remote.err) == (local.status, local.err) == (0, ""), command
        assert remote.out.replace(s3_url, str(two)) == local.out, command
    ran = run("ls", f"{s3_url}/iter_0000010/")
    only_line(ran, rf"{s3_url}/iter_0000010/: is one checkpoint; .*: {s3_url} --iteration 10")
    assert "iter_0000010: removed" in run("prune", s3_url, "--latest", "1").out
    assert store.list("iter_0000010") == []
    assert run("verify", s3_url, "--all").status == 0


def test_a_store_that_cannot_be_used_is_one_line_with_the_remedy(
    run: Run, s3_url: str, s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = (["ls"], ["inspect"], ["verify"], ["report"], ["prune", "--latest", "1"])

    def every(url: str, error: str, status: int = 1) -> None:
        for command in commands:
            only_line(run(*command, url), error, status)

    url = "s3://no-such-bucket/save"
    every(url, rf".*{url}.*; the bucket does not exist.*")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    every(s3_url, rf".*{s3_url}.*; check the credentials.*")
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    every(s3_url, rf"{s3_url}: .*megatron_flashckpt\[object\]'", 2)
