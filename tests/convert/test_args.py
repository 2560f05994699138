"""Megatron's args, which frameworks fill with what they like, through conversions."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import convert, open_source
from tests.convert import rebuilt
from tests.convert.made import save_as_ranks


@pytest.mark.parametrize("to", ["torch_dist", "torch"])
def test_args_may_have_any_names(tmp_path: Path, to: str) -> None:
    """Before, both conversions ended in a traceback."""
    args = rebuilt.arguments()
    vars(args).update({5: "five", "self": 1})
    save_as_ranks(rebuilt.contents(args), tmp_path / "ours", replicas=1)
    opened = open_source(tmp_path / "ours", rebuilt.ITERATION, Options())
    convert(opened, tmp_path / "result", to, Options())
    back = open_source(tmp_path / "result", rebuilt.ITERATION, Options()).contents
    assert (vars(back.args)[5], back.args.self) == ("five", 1)
