"""Empty prefixes on real servers of several kinds, for one test each."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from tests.support.more_object_servers import azure_server, moto_server
from tests.support.object_server import BUCKET


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with moto_server(tmp_path_factory.mktemp("moto")) as environment:
        yield environment


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with azure_server(tmp_path_factory.mktemp("azurite")) as environment:
        yield environment


def _reach(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def moto_url(moto: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    _reach(monkeypatch, moto)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/save"


@pytest.fixture
def azure_url(azurite: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    _reach(monkeypatch, azurite)
    return f"az://{BUCKET}/{uuid.uuid4().hex}/save"
