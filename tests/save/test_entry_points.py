"""Wrappers around Megatron's training functions."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_flashckpt.megatron_lm import stock
from megatron_flashckpt.save import entry_points
from megatron_flashckpt.save.session import session


def test_the_first_step_of_a_job_that_is_left_to_megatron_prepares_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The self-check would refuse a model that shards its parameters itself."""

    def prepare(root: str) -> None:
        raise AssertionError(f"saves to {root} are prepared")

    args = Namespace(save="/save", use_megatron_fsdp=True)
    monkeypatch.setitem(stock._ORIGINALS, ("training", "train_step"), lambda model: f"{model} made")
    monkeypatch.setattr(stock.checkpointing(), "get_args", lambda: args)
    monkeypatch.setattr(session, "startup", prepare)
    assert entry_points.train_step("step") == "step made"
    args.use_megatron_fsdp = False
    with pytest.raises(AssertionError, match="saves to /save are prepared"):
        entry_points.train_step("step")
