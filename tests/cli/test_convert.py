"""`flashckpt convert`: output, exit status, and one-line errors."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_flashckpt.cli import convert
from megatron_flashckpt.cli.convert import FORMATS
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import DESTINATIONS, OURS, SOURCES, open_source
from megatron_flashckpt.convert.writers.flashckpt import write_ours
from megatron_flashckpt.convert.writers.torch_dist import write_torch_dist
from megatron_flashckpt.file_format.file_names import TRACKER
from tests.cli.conftest import Run, only_line
from tests.convert import rebuilt
from tests.convert.made import ITERATION, contents, differing, save_as_ranks, whole, with_tensor
from tests.support.checkpoints import snapshot


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """Return a save directory in our format, as two ranks write it."""
    save_as_ranks(contents(), tmp_path / "save", replicas=2)
    return tmp_path / "save"


def test_the_command_offers_every_format() -> None:
    assert set(FORMATS) == set(DESTINATIONS)
    assert set(convert.SOURCES) == {OURS, "hf", *(source.name for source in SOURCES)}


def test_a_conversion_to_megatrons_format_and_back_is_exact(
    run: Run, tmp_path: Path, save: Path
) -> None:
    before = snapshot(save)
    dist, back = tmp_path / "dist", tmp_path / "back"
    ran = run("convert", save, dist, "--to", "torch_dist", "--max-file-size", "1K")
    assert (ran.status, ran.err) == (0, "")
    directory = f"iter_{ITERATION:07d}"
    source, result = ran.lines
    assert source.startswith(f"{save}/{directory} (flashckpt, iteration {ITERATION}): 21 tensors, ")
    assert re.fullmatch(rf"{dist}/{directory} \(torch_dist\), in \d+\.\d (ms|s|min)", result)
    assert len(list((dist / directory).glob("*.distcp"))) > 3
    ran = run("convert", dist, back, "--to", "flashckpt", "--iteration", ITERATION)
    assert (ran.status, ran.err) == (0, "")
    reopened = open_source(back, None, Options()).contents
    assert differing(contents().tensors, reopened.tensors) == []
    assert snapshot(save) == before
    assert run("verify", back).status == 0


@pytest.mark.parametrize(
    ("status", "arguments", "fact"),
    [
        (1, ["SAVE/no", "DIR/other"], "is not a directory"),
        (1, ["SAVE/iter_0000010", "DIR/other"], "--iteration 10"),
        (1, ["SAVE", "DIR/other", "--iteration", "3"], "iter_0000003"),
        (2, ["SAVE", "DIR/used", "--to", "safetensors"], "--overwrite"),
        (1, ["DIR", "DIR/other", "--iteration", "4"], "no checkpoint"),
        (2, ["SAVE", "DIR/other", "--from", "hf"], "is in the format flashckpt, not hf; leave out"),
    ],
    ids=["no source", "one checkpoint", "no iteration", "exists", "empty", "another format"],
)
def test_a_mistake_gives_a_one_line_error_and_changes_nothing(
    run: Run, tmp_path: Path, save: Path, status: int, arguments: list[str], fact: str
) -> None:
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes").touch()
    before = snapshot(tmp_path)
    words = (word.replace("SAVE", str(save)).replace("DIR", str(tmp_path)) for word in arguments)
    ran = run("convert", "--to", "torch_dist", *words)
    only_line(ran, f".*{fact}.*", status)
    assert "--ckpt-step" not in ran.err
    assert snapshot(tmp_path) == before


def test_a_source_without_arguments_or_shards_gives_a_one_line_error(
    run: Run, tmp_path: Path, save: Path
) -> None:
    made, source = contents(), tmp_path / "without"
    made.common["args"] = None
    save_as_ranks(made, source, replicas=1)
    ran = run("convert", source, tmp_path / "other", "--to", "torch_dist")
    only_line(ran, ".* holds None instead of training arguments; .*")
    shard = min(save.glob("*/*.rank_00001.safetensors"))
    shard.unlink()
    ran = run("convert", save, tmp_path / "other", "--to", "torch_dist")
    only_line(ran, rf"{shard}: is missing; choose an older one with --iteration")


def test_optimizer_state_that_does_not_fit_the_weights_is_refused_unless_accepted(
    run: Run, tmp_path: Path
) -> None:
    made, name = contents(), "master/decoder.layers.mlp.linear_fc2.weight"
    (tensor,) = (tensor for tensor in made.tensors if tensor.name == name)
    value = whole(tensor)
    value[1, :, 3] *= 1.5
    write_torch_dist(with_tensor(made, name, value), tmp_path / "save", Options())
    command = ["convert", tmp_path / "save", tmp_path / "to", "--to", "flashckpt"]
    message = r".*linear_fc2\.weight \(6 of 96 elements\).* 0\.15\.0 to 0\.19\.0 .*--weights-only.*"
    only_line(run(*command), message)
    assert not (tmp_path / "to").exists()
    for options, is_whole in (
        (["--weights-only"], False),
        (["--accept-damage", "--overwrite"], True),
    ):
        assert run(*command, *options).status == 0
        tensors = open_source(tmp_path / "to", None, Options()).contents.tensors
        assert ("master" in {tensor.kind for tensor in tensors}) is is_whole


def test_convert_without_torch_names_the_missing_package(tmp_path: Path, save: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None; from megatron_flashckpt.cli.commands import main;"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = ["convert", str(save), str(tmp_path / "other"), "--to", "torch_dist"]
    done = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("flashckpt: torch is not installed in this environment")
    assert len(done.stderr.splitlines()) == 1


def test_convert_prints_only_the_result_to_a_pipe(tmp_path: Path, save: Path) -> None:
    """The output has no progress bar, and no messages from the import of Megatron."""
    command = ["convert", str(save), str(tmp_path / "other"), "--to", "torch_dist"]
    program = [sys.executable, "-m", "megatron_flashckpt.cli"]
    done = subprocess.run([*program, *command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize("to", ["flashckpt", "torch_dist", "safetensors"])
def test_a_full_disk_gives_a_one_line_error_and_leaves_no_files(
    run: Run, tmp_path: Path, save: Path, to: str
) -> None:
    """A limit on the size of files makes a write fail halfway, as on a full disk."""
    other = tmp_path / "other"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    try:
        ran = run("convert", save, other, "--to", to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    only_line(ran, rf".*{other}.*File too large.*")
    assert list(other.rglob("*")) == []


@pytest.mark.parametrize("to", FORMATS)
def test_a_destination_that_cannot_be_made_is_named_with_the_remedy(
    run: Run, tmp_path: Path, to: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to(tmp_path / "file/nowhere")
    source = tmp_path / "model"
    write_ours(rebuilt.contents(rebuilt.arguments()), source, Options())
    before = snapshot(tmp_path)
    for below in ("file/deep", "file/deeper/still", "broken/link"):
        only_line(
            run("convert", source, tmp_path / below, "--to", to, *rebuilt.options_of(to)),
            rf"\[Errno \d+\] {tmp_path}/\S+: cannot be written \(.*\); a file stands where a "
            "directory should be: move it away",
        )
    assert snapshot(tmp_path) == before


def test_a_tracker_without_an_iteration_in_the_destination_is_replaced(
    run: Run, tmp_path: Path, save: Path
) -> None:
    """`int` refuses so many digits."""
    (tmp_path / "other").mkdir()
    tracker = tmp_path / "other" / TRACKER
    tracker.write_text("9" * 5000)
    assert run("convert", save, tmp_path / "other", "--to", "torch_dist").status == 0
    assert tracker.read_text() == str(ITERATION)
