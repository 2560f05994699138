"""The announcements of a durable checkpoint follow Megatron's own finalizers."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.training import checkpointing

from megatron_flashckpt.megatron_lm.announcements import AnnouncedSave, announce_committed

SAVE = AnnouncedSave(6, "/save", None, True, False, "[ t 1/1, p 1/1 ]")
OTHER_RANK = dataclasses.replace(SAVE, first_rank=False)


@pytest.mark.parametrize(
    ("args", "save", "expected"),
    [
        (Namespace(rl_durable_rollout_bank=True), SAVE, [6]),
        (Namespace(rl_durable_rollout_bank=True), OTHER_RANK, []),
        (Namespace(rl_durable_rollout_bank=False), SAVE, []),
        (Namespace(), SAVE, []),
    ],
)
def test_rank_0_compacts_the_rollout_bank_when_a_save_is_committed(
    args: Namespace, save: AnnouncedSave, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Megatron of August 2026 does, so that a resumed job replays no rollout."""
    compacted: list[Any] = []
    monkeypatch.setattr(
        checkpointing, "_maybe_compact_rollout_bank", compacted.append, raising=False
    )
    announce_committed(args, save)
    assert compacted == expected


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
    logged.assert_called_once_with(*place, "Saved async checkpoint\tIteration: 6", barrier=False)


def test_releases_without_a_rollout_bank_need_none() -> None:
    assert not hasattr(checkpointing, "_maybe_compact_rollout_bank")
    announce_committed(Namespace(rl_durable_rollout_bank=True), SAVE)
