"""Refusal of a load on a rank that read its arguments from another checkpoint than rank 0."""

from __future__ import annotations

import re

import pytest

from megatron_flashckpt.load import argument_source
from megatron_flashckpt.load.argument_source import (
    ArgumentSource,
    chosen_sources,
    disagreement,
    note,
)

FIRST = ArgumentSource(4, "aa", "digest of 4")


@pytest.fixture(autouse=True)
def nothing_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_source, "_chosen", {})


@pytest.mark.parametrize(
    ("own", "first", "message"),
    [
        (None, None, None),
        (FIRST, FIRST, None),
        (ArgumentSource(2, "bb", FIRST.digest), FIRST, None),
        # Nodes may have different command lines; only the save must be the same.
        (ArgumentSource(4, "aa", "another"), FIRST, None),
        (None, FIRST, "from no checkpoint in --load, on rank 0 from iteration 4 .save aa."),
        (FIRST, None, "from iteration 4 .save aa. in --load, on rank 0 from no checkpoint"),
        (ArgumentSource(2, "bb", "another"), FIRST, "from iteration 2 .save bb. in --load, on"),
        # Another save of the same iteration.
        (ArgumentSource(4, "bb", "another"), FIRST, "from iteration 4 .save bb. in --load, on"),
    ],
)
def test_ranks_with_the_same_save_or_arguments_agree(
    own: ArgumentSource | None, first: ArgumentSource | None, message: str | None
) -> None:
    note("load", own)
    error = disagreement({} if first is None else {"load": first})
    assert (error is None) == (message is None)
    if error is not None:
        assert re.search(str(message), str(error))


def test_each_option_has_a_source_and_a_later_read_replaces_it() -> None:
    note("pretrained_checkpoint", FIRST)
    note("load", ArgumentSource(2, "bb", "another"))
    note("load", None)
    assert chosen_sources() == {"pretrained_checkpoint": FIRST}
    assert disagreement({"pretrained_checkpoint": FIRST}) is None
    assert disagreement({"load": FIRST}) is not None
