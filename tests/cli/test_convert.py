"""`flashckpt convert`: output, exit status, and one-line errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.progress import Progress

from megatron_flashckpt.cli import convert
from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.cli.convert import FORMATS
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.common.safetensors_files import INDEX
from megatron_flashckpt.convert.formats import DESTINATIONS, OURS, SOURCES, open_source
from megatron_flashckpt.convert.writers.flashckpt import write_ours
from megatron_flashckpt.convert.writers.torch_dist import write_torch_dist
from megatron_flashckpt.file_format.file_names import TRACKER
from tests.convert import rebuilt
from tests.convert.made import ITERATION, contents, differing, save_as_ranks, whole, with_tensor
from tests.support.checkpoints import snapshot


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """Return a save directory in our format, as two ranks write it."""
    save_as_ranks(contents(), tmp_path / "save", replicas=2)
    return tmp_path / "save"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["convert", *map(str, arguments)])
    return (status, *capsys.readouterr())


def test_the_command_offers_every_format() -> None:
    assert set(FORMATS) == set(DESTINATIONS)
    assert set(convert.SOURCES) == {OURS, "hf", *(source.name for source in SOURCES)}


def test_another_format_than_the_expected_one_is_refused(
    tmp_path: Path, save: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, save, tmp_path / "to", "--to", "torch_dist", "--from", "hf")
    assert (status, out) == (2, "")
    assert err == f"flashckpt: {save}: is in the format flashckpt, not hf; leave out --from\n"


def test_a_conversion_to_megatrons_format_and_back_is_exact(
    tmp_path: Path, save: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(save)
    dist, back = tmp_path / "dist", tmp_path / "back"
    status, out, err = run(capsys, save, dist, "--to", "torch_dist", "--max-file-size", "1K")
    directory = f"iter_{ITERATION:07d}"
    source, result = out.splitlines()
    assert source.startswith(f"{save}/{directory} (flashckpt, iteration {ITERATION}): 21 tensors, ")
    assert re.fullmatch(rf"{dist}/{directory} \(torch_dist\), in \d+\.\d (ms|s|min)", result)
    assert (status, err) == (0, "")
    assert len(list((dist / directory).glob("*.distcp"))) > 3
    status, out, err = run(capsys, dist, back, "--to", "flashckpt", "--iteration", ITERATION)
    assert (status, err) == (0, "")
    reopened = open_source(back, None, Options()).contents
    assert differing(contents().tensors, reopened.tensors) == []
    assert snapshot(save) == before
    assert main(["verify", str(back)]) == 0


def test_safetensors_are_written_directly_into_the_directory(
    tmp_path: Path, save: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, save, tmp_path / "hf", "--to", "safetensors")
    assert status == 0
    assert out.splitlines()[1].startswith(f"{tmp_path / 'hf'} (safetensors), in ")
    assert (tmp_path / "hf" / INDEX).exists()


def mistakes(save: Path) -> dict[str, tuple[int, list[object], str]]:
    other = save.parent / "other"
    return {
        "no source": (1, [save / "no", other, "--to", "torch_dist"], "is not a directory"),
        "one checkpoint": (
            1,
            [save / "iter_0000010", other, "--to", "torch_dist"],
            "--iteration 10",
        ),
        "no iteration": (1, [save, other, "--to", "torch_dist", "--iteration", 3], "iter_0000003"),
        "exists": (2, [save, save.parent / "used", "--to", "safetensors"], "--overwrite"),
        "empty": (1, [save.parent, other, "--to", "torch_dist", "--iteration", 4], "no checkpoint"),
    }


@pytest.mark.parametrize("mistake", mistakes(Path()))
def test_a_mistake_gives_a_one_line_error_and_changes_nothing(
    tmp_path: Path, save: Path, capsys: pytest.CaptureFixture[str], mistake: str
) -> None:
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes").touch()
    before = snapshot(tmp_path)
    expected, arguments, text = mistakes(save)[mistake]
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (expected, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("flashckpt: ")
    assert text in err
    assert "--ckpt-step" not in err
    assert snapshot(tmp_path) == before


def test_missing_model_arguments_give_a_one_line_error(
    tmp_path: Path, save: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, save, tmp_path / "other", "--to", "torch")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "which lack num_layers, hidden_size, " in err
    made, source = contents(), tmp_path / "without"
    made.common["args"] = None
    save_as_ranks(made, source, replicas=1)
    status, out, err = run(capsys, source, tmp_path / "other", "--to", "torch_dist")
    assert (status, out) == (1, "")
    assert re.fullmatch(r"flashckpt: .* holds None instead of training arguments; .*\n", err)


def test_a_damaged_source_gives_a_one_line_error_with_a_valid_option(
    tmp_path: Path, save: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = min(save.glob("*/*.rank_00001.safetensors"))
    shard.unlink()
    status, out, err = run(capsys, save, tmp_path / "other", "--to", "torch_dist")
    assert (status, out) == (1, "")
    assert err == f"flashckpt: {shard}: is missing; choose an older one with --iteration\n"


def test_optimizer_state_that_does_not_fit_the_weights_is_refused_unless_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, name = contents(), "master/decoder.layers.mlp.linear_fc2.weight"
    (tensor,) = (tensor for tensor in made.tensors if tensor.name == name)
    value = whole(tensor)
    value[1, :, 3] *= 1.5
    write_torch_dist(with_tensor(made, name, value), tmp_path / "save", Options())
    other = tmp_path / "other"
    status, out, err = run(capsys, tmp_path / "save", other, "--to", "flashckpt")
    assert (status, out) == (1, "")
    assert "linear_fc2.weight (6 of 96 elements)" in err
    assert "0.15.0 to 0.19.0" in err
    assert "--weights-only" in err
    assert not other.exists()
    for options, is_whole in (
        (["--weights-only"], False),
        (["--accept-damage", "--overwrite"], True),
    ):
        assert run(capsys, tmp_path / "save", other, "--to", "flashckpt", *options)[0] == 0
        kinds = {t.kind for t in open_source(other, None, Options()).contents.tensors}
        assert ("master" in kinds) is is_whole


def test_convert_without_torch_names_the_missing_package(tmp_path: Path, save: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None; from megatron_flashckpt.cli.commands import main;"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = ["convert", str(save), str(tmp_path / "other"), "--to", "torch_dist"]
    done = subprocess.run(
        [sys.executable, "-c", script, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("flashckpt: torch is not installed in this environment")
    assert len(done.stderr.splitlines()) == 1


def test_convert_prints_only_the_result_to_a_pipe(tmp_path: Path, save: Path) -> None:
    """The output has no progress bar, and no messages from the import of Megatron."""
    command = ["convert", str(save), str(tmp_path / "other"), "--to", "torch_dist"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_flashckpt.cli", *command],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 2


def test_the_progress_bar_of_a_conversion_begins_before_the_imports(
    tmp_path: Path, save: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bar = Progress(disable=True)
    shown = []

    def formats() -> ModuleType:
        shown.append([(task.description, task.total) for task in bar.tasks])
        return imported

    imported = convert._formats()
    monkeypatch.setattr(convert, "progress_bar", lambda: bar)
    monkeypatch.setattr(convert, "_formats", formats)
    assert run(capsys, save, tmp_path / "other", "--to", "torch_dist")[0] == 0
    assert shown == [[("importing torch and Megatron", None)]]
    (task,) = bar.tasks
    assert (task.description, task.completed) == ("torch_dist", task.total)


def test_a_full_disk_gives_a_one_line_error_and_leaves_no_files(tmp_path: Path, save: Path) -> None:
    """A limit on the size of files makes a write fail halfway, as on a full disk."""
    script = (
        "import resource, sys; from megatron_flashckpt.cli.commands import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500));"
        "print([main(['convert', *sys.argv[1:], '--to', to]) for to in formats])"
    )
    formats, other = ["flashckpt", "torch_dist", "safetensors"], tmp_path / "other"
    done = subprocess.run(
        [sys.executable, "-c", f"formats = {formats}; {script}", str(save), str(other)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[1, 1, 1]\n", done.stderr
    for _, line in zip(formats, done.stderr.splitlines(), strict=True):
        assert "File too large" in line
        assert str(other) in line
    assert list(other.rglob("*")) == []


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("below", ["file/deep", "file/deeper/still", "broken/link"])
def test_a_destination_that_cannot_be_made_is_named_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str, below: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to(tmp_path / "file/nowhere")
    source = tmp_path / "model"
    write_ours(rebuilt.contents(rebuilt.arguments()), source, Options())
    before = snapshot(tmp_path)
    status, out, err = run(capsys, source, tmp_path / below, "--to", to, *rebuilt.options_of(to))
    assert (status, out) == (1, "")
    assert re.fullmatch(
        rf"flashckpt: \[Errno \d+\] {tmp_path}/\S+: cannot be written \(.*\); a file stands "
        r"where a directory should be: move it away\n",
        err,
    )
    assert snapshot(tmp_path) == before


def test_a_tracker_without_an_iteration_in_the_destination_is_replaced(
    tmp_path: Path, save: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`int` refuses so many digits."""
    (tmp_path / "other").mkdir()
    tracker = tmp_path / "other" / TRACKER
    tracker.write_text("9" * 5000)
    assert run(capsys, save, tmp_path / "other", "--to", "torch_dist")[0] == 0
    assert tracker.read_text() == str(ITERATION)
