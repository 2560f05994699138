"""`flashckpt config check --save`: what a start tries, by hand."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_flashckpt.storage.object_store import ObjectStore
from tests.cli.conftest import Run, only_line
from tests.support.more_object_servers import moto_server
from tests.support.object_server import BUCKET, EXPIRED, LOSE, Proxy

#: Words of messages about directories, which are false for a bucket.
OF_FILES = ("mount", "directory", "file system")


@pytest.fixture
def moto_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy of moto, which checks no signature, so that a header may be hidden from it."""
    with moto_server(tmp_path) as environment, contextlib.ExitStack() as stack:
        proxy = Proxy(int(environment["AWS_ENDPOINT_URL"].rpartition(":")[2]))
        stack.callback(proxy.close)
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy


def test_a_bucket_that_saves_can_use_passes_and_keeps_nothing(
    run: Run, s3_url: str, s3_proxy: Proxy
) -> None:
    s3_proxy.fault_of = lambda method, path: faults.pop() if faults and method == "PUT" else None
    faults = [LOSE]  # what passes ends no start
    ran = run("config", "check", "--save", s3_url)
    assert (ran.status, faults) == (0, [])
    assert ran.lines[0] == f"# Saves can use {s3_url}."
    assert ObjectStore(s3_url).list("flashckpt/probe") == []
    assert json.loads(run("config", "check", "--save", s3_url, "--json").out)


def test_a_server_that_overwrites_silently_is_refused_with_the_cure(
    run: Run, moto_proxy: Proxy
) -> None:
    url = f"s3://{BUCKET}/save"
    assert run("config", "check", "--save", url).status == 0
    moto_proxy.hidden = "if-none-match"
    only_line(
        run("config", "check", "--save", url),
        rf"\[Errno 5\] {url}: this node cannot create a name once "
        rf"\({url}/flashckpt/probe/check-\w+: a second create replaced it; "
        r"saves need conditional puts \(If-None-Match: \*\), which AWS S3 and SeaweedFS have: "
        r"bring the server to a version that has them, or save elsewhere\)",
    )
    moto_proxy.hidden = None
    assert ObjectStore(url).list("flashckpt/probe") == []


def test_no_message_about_a_bucket_speaks_of_files(
    run: Run, s3_url: str, s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = [run("config", "check", "--save", "s3://no-such-bucket/save")]
    s3_proxy.fault_of = lambda method, path: EXPIRED
    refused.append(run("config", "check", "--save", s3_url))
    s3_proxy.fault_of = lambda method, path: None
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    refused.append(run("config", "check", "--save", s3_url))
    cures = (
        "the bucket does not exist",
        "ExpiredToken: as asked.; get new credentials, and start the job again with them",
        "check the credentials",
    )
    for ran, cure in zip(refused, cures, strict=True):
        only_line(
            ran, rf"\[Errno \d+\] s3://\S+: this node cannot write a large object \(.*{cure}.*\)"
        )
        assert not [word for word in OF_FILES if word in ran.err]


def test_a_directory_passes_or_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    assert (
        f"# Saves can use {tmp_path / 'save'}."
        in run("config", "check", "--save", tmp_path / "save").out
    )
    assert list((tmp_path / "save").iterdir()) == []
    (tmp_path / "file").touch()
    only_line(
        run("config", "check", "--save", tmp_path / "file"),
        rf"\[Errno 20\] {tmp_path}/file: this node cannot write a large object "
        r"\(.*a file stands where a directory should be: move it away\)",
    )
