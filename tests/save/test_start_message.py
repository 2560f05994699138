"""The lines that rank 0 prints before the first step."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_flashckpt.config import Best, Retention
from megatron_flashckpt.save.start_message import _interval, _retention


def test_rules_are_named_as_in_ls() -> None:
    rules = Retention(latest=2, best=Best(metric="accuracy", keep=3), max_age_hours=24)
    named = _retention(rules, SimpleNamespace())
    assert named == "kept: latest 2, best 3 by 'accuracy', age below 24 h"
    assert _retention(Retention(), SimpleNamespace(save_retain_interval=None)) == "kept: all"


def test_an_interval_of_one_iteration_has_the_singular() -> None:
    for interval, text in ((None, ""), (1, " every iteration"), (20, " every 20 iterations")):
        assert _interval(SimpleNamespace(save_interval=interval)) == text
