"""The end of training: whether Megatron saves once more after its loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flashckpt.config import Config
from megatron_flashckpt.save import session as session_module
from megatron_flashckpt.save.reports import SaveReports
from megatron_flashckpt.save.session import Session, _OpenCheckpointer


def expects_save(monkeypatch: pytest.MonkeyPatch, requested: list[int], **args: Any) -> bool:
    """Return the answer after saves to storage of the iterations in `requested`."""
    megatron = SimpleNamespace(get_args=lambda: SimpleNamespace(**args))
    monkeypatch.setattr(session_module, "checkpointing", lambda: megatron)
    reports = SaveReports("save", 0)
    for iteration in requested:
        reports.requested(iteration)
    session = Session(Config())
    session._open["save"] = _OpenCheckpointer(None, reports, None)  # type: ignore[arg-type]
    return session.expects_save()


@pytest.mark.parametrize("requested", [[], [2, 4]])
def test_a_save_is_expected_after_a_loop_that_ends_between_two_saves(
    monkeypatch: pytest.MonkeyPatch, requested: list[int]
) -> None:
    assert expects_save(monkeypatch, requested, train_iters=5, save_interval=2)


@pytest.mark.parametrize(
    ("requested", "args"),
    [
        ([2, 4, 5], {"train_iters": 5, "save_interval": 2}),
        ([2, 4], {"train_iters": 4, "save_interval": 2}),
        ([2, 4], {"train_iters": 5, "save_interval": 2, "skip_train": True}),
        ([2, 4], {"train_iters": 5, "save_interval": None}),
        ([2, 4], {"train_iters": None, "save_interval": 2}),
        ([2, 4], {}),
    ],
)
def test_no_save_is_expected_after_the_last_one(
    monkeypatch: pytest.MonkeyPatch, requested: list[int], args: dict[str, Any]
) -> None:
    assert not expects_save(monkeypatch, requested, **args)


def test_without_an_open_checkpointer_no_save_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron = SimpleNamespace(get_args=lambda: SimpleNamespace(train_iters=5, save_interval=2))
    monkeypatch.setattr(session_module, "checkpointing", lambda: megatron)
    assert not Session(Config()).expects_save()
