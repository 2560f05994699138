"""What Megatron does once a checkpoint is durable."""

from __future__ import annotations

from argparse import Namespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.training import checkpointing

from megatron_flashckpt.megatron_lm.announcements import AnnouncedSave, announce_committed

SAVE = AnnouncedSave(6, "/save", None, True, False, (1, 1), (1, 1))


def _until_0_17(string: str, barrier: bool = True) -> None: ...
def _since_0_18(save_dir: str, string: str, barrier: bool = True) -> None: ...


@pytest.mark.parametrize(
    ("log", "place"), [(_until_0_17, ()), (_since_0_18, ("/save",))], ids=["0.17", "0.18"]
)
def test_the_progress_log_is_called_as_each_release_wants_it(
    log: Any, place: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = mock.create_autospec(log)
    monkeypatch.setattr(checkpointing, "append_to_progress_log", logged)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    announce_committed(Namespace(save="/save", log_progress=True, async_save=True), SAVE)
    logged.assert_called_once_with(
        *place, "Saved async checkpoint\tIteration: 6", barrier=False
    )
