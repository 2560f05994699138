"""The setting `memory_interval` in Megatron's training loop."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.megatron_lm.announcements import ask_for_memory_saves


@pytest.mark.parametrize(
    ("given", "interval", "then", "message"),
    [
        (None, None, None, ""),
        (5, None, 5, ""),
        (None, 2, 2, "memory_interval 2: as with --non-persistent-save-interval 2"),
        (5, 2, 5, "--non-persistent-save-interval 5 overrides memory_interval 2"),
    ],
)
def test_memory_interval_sets_megatrons_own_flag_if_unset(
    given: int | None,
    interval: int | None,
    then: int | None,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = Namespace(non_persistent_save_interval=given)
    ask_for_memory_saves(args, interval)
    assert args.non_persistent_save_interval == then
    assert message in capsys.readouterr().out


def test_memory_interval_is_refused_by_releases_without_such_saves() -> None:
    ask_for_memory_saves(Namespace(), None)
    with pytest.raises(UnsupportedError, match=r"core 0\.10 was.*unset memory_interval"):
        ask_for_memory_saves(Namespace(), 2)
