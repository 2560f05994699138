"""Stock Megatron trains in between, in the directory in which our jobs save."""

from __future__ import annotations

from pathlib import Path

from megatron_flashckpt.convert import formats
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.file_format.file_names import TRACKER
from tests.support.megatron_jobs import Result, run_job, succeeded

MODEL = ["--num-layers", "1", "--bf16", "--use-distributed-optimizer", "--ckpt-format", "torch"]
MODEL += ["--save-interval", "2", "--override-opt_param-scheduler"]


def train(where: Path, until: int, load: Path, entry_point: str = "launch") -> Result:
    """Train one rank until an iteration, and save to the one directory."""
    flags = ["--train-iters", str(until), "--save", str(where / "save"), "--load", str(load)]
    name = f"{entry_point}-{until}"
    return succeeded(run_job(where, name, [*MODEL, *flags], ranks=1, entry_point=entry_point))


def test_saves_of_stock_and_ours_follow_each_other_in_one_directory(tmp_path: Path) -> None:
    """Stock reads a conversion of our checkpoint, but saves beside the original one."""
    save, converted = tmp_path / "save", tmp_path / "converted"
    train(tmp_path, 4, save)
    formats.convert(formats.open_source(save, None, Options()), converted, "torch", Options())
    assert sorted(train(tmp_path, 6, converted, "stock").losses()) == [5, 6]
    assert (save / TRACKER).read_text() == "6"
    assert sorted(train(tmp_path, 8, save).losses()) == [7, 8]
    assert (save / TRACKER).read_text() == "8"
    again = train(tmp_path, 10, save)
    assert sorted(again.losses()) == [9, 10]
    assert "iteration 8 was restored from " in again.log
