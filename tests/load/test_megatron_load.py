"""What of a job's load belongs to Megatron."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.load import megatron_load
from megatron_flashckpt.megatron_lm.compat import is_known_to_msc_alone, loads_itself

MSC = "msc://profile/job"


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of the client's name, with a profile of a bucket and one of several stores."""
    (tmp_path / "multistorageclient").mkdir()
    (tmp_path / "multistorageclient/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    bucket = "storage_provider: {type: s3, options: {base_path: bucket}}"
    (tmp_path / "msc.yaml").write_text(
        f"profiles:\n  plain: {{{bucket}}}\n  profile: {{{bucket}, replicas: []}}\n"
    )
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.yaml"))


@pytest.mark.usefixtures("client")
def test_a_profile_that_only_the_client_knows_is_left_to_megatron() -> None:
    call: Any = Namespace(load_arg="load")
    assert megatron_load.load(call, Namespace(load=MSC, save=None, enable_msc=True)) is None
    assert not is_known_to_msc_alone(Namespace(enable_msc=True), "msc://plain/job")
    assert "multistorageclient" not in sys.modules


@pytest.mark.usefixtures("client")
def test_a_profile_is_left_to_megatron_without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    assert is_known_to_msc_alone(Namespace(enable_msc=True), "msc://plain/job")


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize(
    ("enabled", "root", "loads"),
    [
        ({"enable_msc": True}, MSC, True),
        ({"enable_msc": True}, "msc://plain/job", True),
        ({"enable_msc": False}, MSC, False),
        ({}, MSC, False),  # a release without the client
        ({"enable_msc": True}, "s3://bucket/job", False),
        ({}, "/save", True),
    ],
)
def test_megatron_loads_its_formats_from_directories_and_by_its_client(
    enabled: dict[str, bool], root: str, loads: bool
) -> None:
    assert loads_itself(Namespace(**enabled), root) is loads
