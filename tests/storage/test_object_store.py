"""A store in a bucket of a real S3 server, with the faults and refusals that such servers have."""

from __future__ import annotations

import errno
import itertools
import json
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_flashckpt.error_classes import class_of, may_pass, will_last
from megatron_flashckpt.errors import AlreadyExistsError, ConfigError, StorageError
from megatron_flashckpt.storage import object_store, retrying_store
from megatron_flashckpt.storage.object_store import ObjectStore
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.retrying_store import RetryingStore
from tests.support.object_server import (
    BUCKET,
    CONFLICT,
    DROP,
    NOT_FOUND,
    SLOW_DOWN,
    TWICE,
    Fault,
    Proxy,
)

DATA = bytes(range(256)) * 40


@pytest.fixture
def store(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr(retrying_store.time, "sleep", lambda _: None)
    return ObjectStore(s3_url)


def fail_first(proxy: Proxy, method: str, *faults: Fault) -> None:
    """Have the first requests of this method fail."""
    turns = iter(faults)
    proxy.fault_of = lambda sent, path: next(turns, None) if sent == method else None


# ---------------------------------------------------------------------- create


def test_a_conflict_with_a_deletion_is_no_object_that_exists(store, s3_proxy):
    """S3 answers 409 where another put or deletion came between; then nothing may exist."""
    fail_first(s3_proxy, "PUT", CONFLICT, CONFLICT)
    with pytest.raises(StorageError) as caught:
        store.create("d/end", DATA)
    assert not isinstance(caught.value, AlreadyExistsError)
    assert may_pass(caught.value)
    RetryingStore(store).create("d/end", DATA)
    assert store.get("d/end") == DATA
    fail_first(s3_proxy, "PUT", TWICE)
    with pytest.raises(AlreadyExistsError):
        store.create("d/twice", DATA)
    assert store.get("d/twice") == DATA, "a create that was sent twice leaves a whole object"


# ---------------------------------------------------------------------- reads


def test_a_body_that_ends_early_is_not_taken_for_a_short_object(store, s3_proxy):
    store.put("f", DATA)
    for read in (
        lambda store: store.get("f"),
        lambda store: store.get("f", 1, len(DATA) - 1),
        lambda store: store.get_into("f", 0, [memoryview(bytearray(len(DATA)))]),
    ):
        fail_first(s3_proxy, "GET", *[Fault(True, None, sent_nbytes=5000)] * 2)
        with pytest.raises(StorageError) as caught:
            read(store)
        assert may_pass(caught.value)
        assert read(RetryingStore(store)) in (DATA, DATA[1:], len(DATA))


def test_a_large_range_is_read_in_several_requests(store, s3_proxy, monkeypatch):
    monkeypatch.setattr(object_store, "_BLOCK_NBYTES", 1000)
    store.put("f", DATA)
    parts = [bytearray(nbytes) for nbytes in (1500, 10, len(DATA))]
    seen: list[bytes] = []
    filled = store.get_into(
        "f", 3, [memoryview(part) for part in parts], lambda part: seen.append(bytes(part))
    )
    assert filled == len(DATA) - 3
    assert b"".join(parts)[:filled] == b"".join(seen) == DATA[3:]
    assert len([path for method, path in s3_proxy.requests if method == "GET"]) == 11


def test_a_server_that_is_silent_or_away_is_a_fault_that_may_pass(s3_url, s3_proxy, monkeypatch):
    monkeypatch.setenv("AWS_TIMEOUT", "200ms")
    store = ObjectStore(s3_url)
    ended = threading.Event()

    def hang(method: str, path: str) -> Fault:
        ended.wait(60)
        return DROP

    s3_proxy.fault_of = hang
    try:
        with pytest.raises(StorageError) as caught:
            store.get("f")
    finally:
        ended.set()
    assert class_of(caught.value).kind == "transient"
    s3_proxy.fault_of = lambda method, path: DROP
    with pytest.raises(StorageError, match="check the network and the endpoint") as caught:
        store.list("")
    assert class_of(caught.value).kind == "transient"


# ---------------------------------------------------------------------- uploads in parts


def test_an_upload_survives_faults_of_its_parts(store, s3_proxy):
    data = bytes(range(256)) * 2**16 + b"the rest"  # two parts, and a short one
    faults = itertools.cycle((DROP, SLOW_DOWN, None))
    s3_proxy.fault_of = lambda method, path: next(faults) if "partNumber" in path else None
    writer = store.writer("d/shard", len(data))
    for start in range(0, len(data), 2**22):
        writer.write_at(start, memoryview(data)[start : start + 2**22])
    writer.finish()
    assert store.get("d/shard") == data
    parts = {path.partition("&")[0] for _, path in s3_proxy.requests if "partNumber" in path}
    assert len(parts) == 3


@pytest.mark.parametrize("fails", [True, False])
def test_an_upload_that_fails_or_is_abandoned_leaves_no_object(store, s3_proxy, fails):
    writer = store.writer("d/shard", len(DATA))
    writer.write_at(0, DATA)
    if fails:
        refused = Fault(False, "403 AccessDenied")
        s3_proxy.fault_of = lambda method, path: refused if "partNumber" in path else None
        with pytest.raises(StorageError, match="AccessDenied") as caught:
            writer.finish()
        assert caught.value.errno == errno.EACCES
    writer.abandon()
    assert store.list("") == []
    assert any(method == "DELETE" and "uploadId" in path for method, path in s3_proxy.requests)


@pytest.mark.parametrize("options", [False, True], ids=["as a rule", "with both options"])
def test_the_variables_choose_what_protects_a_body_on_its_way(
    s3_url, s3_proxy, monkeypatch, options
):
    """Signed with a SHA-256 of the body, or unsigned with the checksum that S3 itself keeps."""
    if options:
        monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", "true")
        monkeypatch.setenv("AWS_CHECKSUM_ALGORITHM", "crc64nvme")
    store = ObjectStore(s3_url)
    store.create("d/end", DATA)
    data = bytes(range(256)) * 2**16  # two parts
    writer = store.writer("d/shard", len(data))
    writer.write_at(0, data)
    writer.finish()
    assert (store.get("d/end"), store.get("d/shard")) == (DATA, data)
    sent = [
        (path, headers)
        for (method, path), headers in zip(s3_proxy.requests, s3_proxy.headers, strict=True)
        if method == "PUT"
    ]
    assert len([path for path, _ in sent if "partNumber" in path]) == 2
    assert len(sent) == 3
    for path, headers in sent:
        assert (headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD") is options, path
        assert ("x-amz-checksum-crc64nvme" in headers) is options, path


def test_a_server_takes_the_documented_rule_about_unfinished_uploads(moto_url):
    import boto3

    page = Path(__file__).parents[2] / "docs/how-to/object-stores.md"
    (text,) = re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL)
    client = boto3.client("s3", region_name="us-east-1")
    client.put_bucket_lifecycle_configuration(
        Bucket=BUCKET, LifecycleConfiguration=json.loads(text)
    )
    (rule,) = client.get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"]
    assert (rule["Status"], rule["AbortIncompleteMultipartUpload"]) == (
        "Enabled",
        {"DaysAfterInitiation": 1},
    )
    client.delete_bucket_lifecycle(Bucket=BUCKET)


# ---------------------------------------------------------------------- delete, directories


def test_the_object_that_stands_for_an_empty_folder_is_not_listed(store):
    """Consoles make `d/` for a folder, and so does this server when it deletes the last object."""
    store.put("d/f", DATA)
    store.delete(["d/f"])
    (marker,) = store._client.list_with_delimiter("d")["objects"]
    assert marker["path"] == "d"
    assert store.list("d") == []


def test_a_missing_object_is_no_error_where_each_deletion_is_answered(
    s3_url, s3_proxy, monkeypatch
):
    """GCS has no bulk deletion, and answers 404 for an object that is missing."""
    monkeypatch.setenv("AWS_DISABLE_BULK_DELETE", "true")
    store = ObjectStore(s3_url)
    for name in ("a", "b", "c"):
        store.put(name, DATA)
    gone = {"b"}
    s3_proxy.fault_of = lambda method, path: (
        NOT_FOUND if method == "DELETE" and path[-1] in gone else None
    )
    store.delete(["a", "b", "c"])
    assert [entry.name for entry in store.list("")] == ["b"]


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [("bucket", "the bucket does not exist"), ("secret", "check the credentials")],
)
def test_a_refusal_names_the_remedy_and_is_not_repeated(s3_url, monkeypatch, fault, remedy):
    url = s3_url
    if fault == "bucket":
        url = s3_url.replace("ckpt", "no-such-bucket")
    else:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = ObjectStore(url)
    operations: list[Callable[[], object]] = [
        *(lambda: store.get("f"), lambda: store.stat("f"), lambda: store.list("d")),
        *(lambda: store.put("f", b""), lambda: store.create("f", b"")),
        lambda: store.writer("f", 0).finish(),
    ]
    for operation in operations:
        with pytest.raises(StorageError, match=remedy) as caught:
            operation()
        assert will_last(caught.value)
        assert url in str(caught.value)


def test_credentials_that_nobody_gives_are_named(s3_url, s3_proxy, monkeypatch):
    """Without any in the environment, the service of a cloud's machine is asked."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{s3_proxy.port}")
    s3_proxy.fault_of = lambda method, path: NOT_FOUND
    with pytest.raises(StorageError, match="no credentials are set"):
        ObjectStore(s3_url).list("")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        *((url, "cannot be opened") for url in ("s3://", "s3:///x", "az://box/x", "s3://b/x//y")),
        *((url, "is of no known kind; use s3://") for url in ("http://host/x", "memory://x")),
    ],
)
def test_a_url_that_cannot_be_opened_is_a_wrong_setting(s3_proxy, monkeypatch, url, reason):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match=f"{url}: {reason}"):
        open_store(url)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"run 'pip install megatron_flashckpt\[object\]'"):
        open_store("s3://bucket/save")
