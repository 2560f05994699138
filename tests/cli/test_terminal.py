"""Tables on terminals of several widths and in a pipe: no title and no name is ever folded."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from megatron_flashckpt.cli.console import table_lines
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.template import order
from tests.cli.conftest import CommandResult, Run
from tests.support import terminal
from tests.support.checkpoints import SAVE_ID, fail, make

WIDTHS = (80, 120, 200)
#: The longest key of a Megatron GPT, of 58 characters.
KEY = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
KINDS = {"weight": "BF16", "master": "F32", "exp_avg": "F32", "exp_avg_sq": "F32"}


def large(root: Path, iteration: int = 10) -> None:
    """Make a checkpoint with long keys and many digits."""
    held = [
        Piece(key, kind, dtype, (8, 28, 100), (0, 0, 0), (1, 1, 1), 0, 1)
        for key in (KEY, KEY.replace("qkv", "proj"))
        for kind, dtype in KINDS.items()
    ]
    made = make(root, iteration, ranks=[[held[number] for number in order(held)]] * 2)
    sizes = {"tensor_model": 8, "pipeline_model": 16, "expert_model": 64, "context": 4, "data": 128}
    description = {f"{name}_parallel_size": size for name, size in sizes.items()}
    made.change_manifest(lambda manifest: manifest["description"].update(description))


@pytest.fixture
def shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a command on a terminal: its columns, then the arguments."""

    def shown(columns: int, *arguments: object) -> CommandResult:
        with monkeypatch.context() as patch:
            terminal.pretend(patch, columns)
            return run(*arguments)

    return shown


def test_inspect_shows_each_key_once_and_no_line_is_too_long(shown: Run, save: Path) -> None:
    large(save)
    for columns in WIDTHS:
        lines = shown(columns, "inspect", save).lines
        tensors = lines[lines.index("key") : lines.index("", lines.index("key"))]
        assert tensors[1].split() == ["kind", "dtype", "global", "shape", "size", "pieces"]
        assert len(tensors) == 2 + 2 * (1 + len(KINDS))
        of_key = tensors.index(KEY)
        kinds = [line.split()[0] for line in tensors[of_key + 1 : of_key + 1 + len(KINDS)]]
        assert sorted(kinds) == sorted(KINDS)
        files = [line for line in lines if ".safetensors" in line]
        assert len(files) == 2, "a line per file"
        assert all("edp" in line and "KiB" in line for line in files)
        # A path or a description may be longer.
        assert all(len(line) <= columns for line in (*tensors, *files))
    lines = shown(30, "inspect", save).lines
    assert KEY in lines
    assert any(".safetensors" in line and "edp0" in line for line in lines)


def test_rows_in_a_pipe_are_whole_and_have_their_key(run: Run, save: Path) -> None:
    large(save)
    ran = run("inspect", save)
    for kind, dtype in KINDS.items():
        assert ran.row(kind, KEY)[2:4] == [dtype, "[8, 28, 100]"]
    fail(save, 16, SAVE_ID, "word " * 800)
    assert run("ls", save).row("16")[-1].count("word") == 800


def test_ls_has_a_line_per_checkpoint_and_its_remark_below(
    shown: Run, save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_RETENTION__LATEST", "2")
    monkeypatch.setenv("FLASHCKPT_RETENTION__EVERY", "4")
    for iteration in (8, 12):
        large(save, iteration)
    reason = "/disk: cannot write (No space left on device); " + "free space there; " * 10
    fail(save, 16, SAVE_ID, reason)
    for columns in WIDTHS:
        ran = shown(columns, "ls", save)
        titles = re.split(r"\s{2,}", ran.lines[0].strip())
        assert titles[:3] == ["iteration", "state", "date"]
        assert ("layout" in titles) == (columns > 80)
        assert ran.lines[4] == f"  {SAVE_ID} failed: {reason.strip()}"
        table = ran.lines[:4]
        assert all(len(line) <= columns for line in table)
        assert [line.lstrip("* ").split()[0] for line in table[1:]] == ["8", "12", "16"]
        assert table[2].startswith("*"), "the tracked one"


def test_names_of_emoji_are_text_and_wide_characters_take_two_places(
    run: Run, tmp_path: Path
) -> None:
    save = tmp_path / ":100:"
    made = make(save)
    made.change_manifest(lambda manifest: manifest["description"].update(name=":smile:"))
    for command in ("ls", "inspect", "report"):
        assert run(command, save).out.isascii()
    assert ":100:: is not" in run("ls", tmp_path / "no:100:").err
    out = Console(width=80, file=io.TextIOWrapper(io.BytesIO(), "utf-8"))
    lines = table_lines({"key": ["層", "ab"], "size": ["1", "10"]}, out)
    assert lines == ["key  size", "層      1", "ab     10"]
