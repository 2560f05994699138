"""Profiles of the Multi-Storage Client: which bucket they name, and which are refused.

The texts are those that the client's own schema and providers of release 1.3.1 take.
"""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.errors import ConfigError
from megatron_flashckpt.storage.msc_profile import Bucket, bucket_of
from megatron_flashckpt.storage.object_store import ObjectStore
from megatron_flashckpt.storage.opening import open_store

S3 = {
    "storage_provider": {
        "type": "s3",
        "options": {"base_path": "ckpt/runs/", "endpoint_url": "http://host:1", "region_name": "r"},
    },
    "credentials_provider": {
        "type": "S3Credentials",
        "options": {"access_key": "${AWS_ACCESS_KEY_ID}", "secret_key": "$MSC_SECRET"},
    },
    "caching_enabled": True,
}
AZURE = {
    "storage_provider": {
        "type": "azure",
        "options": {"base_path": "box", "endpoint_url": "https://me.blob.core.windows.net"},
    },
    "credentials_provider": {
        "type": "AzureCredentials",
        "options": {"connection": "AccountName=me;AccountKey=a2V5==;EndpointSuffix=x"},
    },
}
GCS = {"storage_provider": {"type": "gcs", "options": {"base_path": "box", "project_id": "p"}}}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that MSC_CONFIG names."""
    for name, value in {"AWS_ACCESS_KEY_ID": "key", "MSC_SECRET": "secret"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    return tmp_path / "msc.json"


def profiles(config: Path, **named: dict[str, Any]) -> None:
    config.write_text(json.dumps({"profiles": named, "cache": {"size": "1G"}}))


def test_a_profile_names_bucket_endpoint_and_credentials(config: Path) -> None:
    profiles(config, s3=S3, azure=AZURE, gcs=GCS)
    keys = {"access_key_id": "key", "secret_access_key": "secret"}
    at = {"endpoint": "http://host:1", "region": "r", **keys}
    assert bucket_of("msc://s3/job/a") == Bucket("s3://ckpt/runs/job/a", at, allows_http=True)
    at = {
        "endpoint": "https://me.blob.core.windows.net",
        "account_name": "me",
        "account_key": "a2V5==",
    }
    assert bucket_of("msc://azure/job") == Bucket("az://box/job", at)
    assert bucket_of("msc://gcs") == Bucket("gs://box")


def provider(kind: str, **options: object) -> dict[str, Any]:
    return {"storage_provider": {"type": kind, "options": options}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (provider("file", base_path="/"), "the type 'file'"),
        (provider("s3"), "no base_path"),
        ({"provider_bundle": {"type": "x.Y"}}, "has 'provider_bundle'"),
        ({"metadata_provider": {"type": "manifest"}}, "has 'metadata_provider'"),
        ({"replicas": []}, "has 'replicas'"),
        ({"credentials_provider": {"type": "FileBased"}}, "of type 'FileBased'"),
        (provider("s3", base_path="$HOME/x"), "the variable HOME"),
        (provider("s3", base_path="$AWS_NONE"), "AWS_NONE, which is not set"),
        (provider("s3", base_path="b", verify=False), "has 'verify'"),
    ],
)
def test_what_only_the_client_can_know_is_refused(
    config: Path, change: dict[str, Any], reason: str
) -> None:
    """Objects would be somewhere else, or somewhere else as well."""
    profiles(config, mine={**S3, **change})
    with pytest.raises(ConfigError, match=f"msc://mine/job: the profile in {config} .*{reason}"):
        open_store("msc://mine/job")


def test_the_first_file_that_exists_counts(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = config.parent / "home"
    for name in ("XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"):
        monkeypatch.setenv(name, str(config.parent / "none"))
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(ConfigError, match="no file of the Multi-Storage Client"):
        bucket_of("msc://a/job")
    home.mkdir()
    (home / ".msc_config.yaml").write_text(
        "profiles:\n  a:\n    storage_provider: {type: s3, options: {base_path: from-home}}\n"
    )
    assert bucket_of("msc://a/job").url == "s3://from-home/job"
    profiles(config, b=S3)
    with pytest.raises(ConfigError, match=f"{config} has no profile 'a'"):
        bucket_of("msc://a/job")


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_a_damaged_file_is_named_without_its_secrets(
    config: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.delattr("yaml.CSafeLoader", raising=False)  # the other one quotes the lines
    damaged = config.with_suffix(suffix)
    damaged.write_text("profiles: {a: {secret_key: hunter2]")
    monkeypatch.setenv("MSC_CONFIG", str(damaged))
    with pytest.raises(ConfigError, match=f"{damaged}: is neither JSON nor YAML") as raised:
        bucket_of("msc://a/job")
    assert "hunter2" not in "".join(traceback.format_exception(raised.value))


def test_a_store_of_a_profile_is_that_of_its_bucket(
    config: Path, s3_url: str, s3_proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Endpoint and credentials come from the profile; the environment names wrong ones."""
    ObjectStore(s3_url).create("a", b"1")
    base, _, job = s3_url.removeprefix("s3://").rpartition("/")
    keys = {"access_key": "test", "secret_key": "$MSC_SECRET"}
    monkeypatch.setenv("MSC_SECRET", "testtest12")
    endpoint = f"http://127.0.0.1:{s3_proxy.port}"
    credentials = {"credentials_provider": {"type": "S3Credentials", "options": keys}}
    profiles(
        config, seaweed={**provider("s3", base_path=base, endpoint_url=endpoint), **credentials}
    )
    for name in ("AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = open_store(f"msc://seaweed/{job}")
    assert store.place == f"msc://seaweed/{job}"
    assert store.get("a") == b"1"
    with pytest.raises(FileNotFoundError, match=f"msc://seaweed/{job}/b"):
        store.get("b")
