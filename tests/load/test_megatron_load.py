"""What of a job's load belongs to Megatron."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.load import megatron_load
from megatron_flashckpt.megatron_lm.compat import loads_by_msc

MSC = "msc://profile/job"


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of the client's name."""
    (tmp_path / "multistorageclient").mkdir()
    (tmp_path / "multistorageclient/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("client")
def test_a_path_of_the_multi_storage_client_is_left_to_megatron() -> None:
    call: Any = Namespace(load_arg="load")
    assert megatron_load.load(call, Namespace(load=MSC, save=None, enable_msc=True)) is None
    assert "multistorageclient" not in sys.modules


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize(
    ("args", "root"),
    [
        (Namespace(enable_msc=False), MSC),
        (Namespace(), MSC),  # a release without the client
        (Namespace(enable_msc=True), "s3://bucket/job"),
        (Namespace(enable_msc=True), "/save"),
        (Namespace(enable_msc=True), None),
    ],
)
def test_other_loads_are_not(args: Namespace, root: str | None) -> None:
    assert not loads_by_msc(args, root)
