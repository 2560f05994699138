"""`flashckpt convert --overwrite` replaces the result of an earlier conversion and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.cli.convert import FORMATS
from megatron_flashckpt.convert.common import output_dir
from megatron_flashckpt.convert.common.former_export import MARKER
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.common.safetensors_files import INDEX
from megatron_flashckpt.convert.writers.flashckpt import write_ours
from megatron_flashckpt.errors import ConfigError
from megatron_flashckpt.file_format.file_names import OWN, iteration_dir, save_of
from tests.convert import rebuilt
from tests.convert.made import ITERATION, contents, save_as_ranks
from tests.support.checkpoints import snapshot

DIRECTORY = iteration_dir(ITERATION)


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """Return a save directory with a checkpoint of a job, next to foreign files."""
    root = tmp_path / "job" / "save"
    save_as_ranks(contents(), root, replicas=2)
    (root / "args.txt").write_text("--lr 1e-3")
    (root.parent / "notes.txt").write_text("mine")
    return root


def convert(source: Path, to: Path, form: str, *more: str) -> int:
    options = rebuilt.options_of(form)
    return main(["convert", str(source), str(to), "--to", form, *options, *more])


def link(save: Path) -> Path:
    path = save.parent.parent / "link"
    path.symlink_to(save)
    return path


def where_the_checkpoint_really_is(save: Path) -> Path:
    """Move the checkpoint elsewhere, leave a link to it, and return its new parent."""
    elsewhere = save.parent.parent / "disk"
    elsewhere.mkdir()
    (save / DIRECTORY).rename(elsewhere / DIRECTORY)
    (save / DIRECTORY).symlink_to(elsewhere / DIRECTORY)
    return elsewhere


def where_a_file_really_is(save: Path) -> Path:
    elsewhere = save.parent.parent / "disk"
    elsewhere.mkdir()
    file = next((save / DIRECTORY).glob("*.rank_*"))
    shutil.copy2(file, elsewhere / "copy")
    (save / DIRECTORY / "copy").symlink_to(elsewhere / "copy")
    return elsewhere


@pytest.mark.parametrize(
    ("where", "form"),
    [
        (lambda save: save, "flashckpt"),
        (lambda save: save.parent, "safetensors"),
        (lambda save: save / "hf", "hf"),
        (lambda save: save / DIRECTORY, "torch"),
        (link, "torch_dist"),
        (where_the_checkpoint_really_is, "flashckpt"),
        (where_a_file_really_is, "safetensors"),
    ],
    ids=["same", "parent", "child", "checkpoint", "link", "linked checkpoint", "linked file"],
)
def test_a_destination_that_overlaps_the_source_is_refused(
    tmp_path: Path,
    save: Path,
    capsys: pytest.CaptureFixture[str],
    where: Callable[[Path], Path],
    form: str,
) -> None:
    assert_overlap_is_refused(tmp_path, save, where(save), capsys, form)


def assert_overlap_is_refused(
    tmp_path: Path,
    save: Path,
    to: Path,
    capsys: pytest.CaptureFixture[str],
    form: str = "safetensors",
) -> None:
    before = snapshot(tmp_path)
    assert convert(save, to, form, "--overwrite") == 2
    error = capsys.readouterr().err
    assert "; nothing was changed; name a destination outside of the source" in error
    assert len(error.splitlines()) == 1
    assert snapshot(tmp_path) == before


def test_a_bind_mount_of_the_source_is_refused(
    tmp_path: Path, save: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (save / "logs").mkdir()
    for of, to in (("", ""), (DIRECTORY, "deeper/still"), ("..", "save/hf"), ("", "..")):
        point = tmp_path / "mount" / "point"
        point.mkdir(parents=True, exist_ok=True)
        command = ["mount", "--bind", str((save / of).resolve()), str(point)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("this machine refuses to mount")
        try:
            where = Path(os.path.normpath(point / to))
            assert_overlap_is_refused(tmp_path, save, where, capsys)
        finally:
            subprocess.run(["umount", str(point)], check=True)


def test_a_destination_next_to_the_source_is_accepted(tmp_path: Path, save: Path) -> None:
    (save / DIRECTORY / "loop").symlink_to("loop")  # which lies in no destination
    before = snapshot(save)
    for _ in range(2):
        for form in ("torch_dist", "safetensors"):
            assert convert(save, Path(f"{save}-{form}"), form, "--overwrite") == 0
    assert snapshot(save) == before


# ---------------------------------------------------------------------- replaced exports


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a save directory with a GPT that every format can hold."""
    made = rebuilt.contents(rebuilt.arguments(use_distributed_optimizer=True))
    write_ours(made, tmp_path / "model", Options())
    return tmp_path / "model"


def directory_of(to: Path, form: str) -> Path:
    return to if form in ("safetensors", "hf") else to / iteration_dir(rebuilt.ITERATION)


def test_a_new_export_replaces_an_earlier_export_of_any_format(tmp_path: Path, model: Path) -> None:
    to = tmp_path / "to"
    forms = ["flashckpt", "torch_dist", "torch", "flashckpt", "torch", "torch_dist", "torch_dist"]
    for before, form in zip([None, *forms], forms, strict=False):
        assert convert(model, to, form) == (0 if before is None else 2)
        if before is not None:
            assert convert(model, to, form, "--overwrite") == 0
        alone = tmp_path / f"alone-{form}-{before}"
        assert convert(model, alone, form) == 0
        names = [_names(root / iteration_dir(rebuilt.ITERATION)) for root in (to, alone)]
        assert names[0] == names[1], "a file of the earlier export is left"
        assert {*os.listdir(to)} == {*os.listdir(alone), OWN}, "runs of former conversions stay"


def _names(directory: Path) -> list[str]:
    """Return the names of all files, without those of their saves."""
    files = (path.name for path in directory.rglob("*") if path.is_file())
    return sorted(name.removeprefix(save_of(name) or "") for name in files)


def put_file(directory: Path) -> str:
    (directory / "README.md").write_text("mine")
    return "README.md"


def put_directory(directory: Path) -> str:
    (directory / "logs" / "tb").mkdir(parents=True)
    return "logs, logs/tb"


def put_link(directory: Path) -> str:
    (directory / "link").symlink_to("/nowhere")
    return "link"


def take_the_largest_file(directory: Path) -> Path:
    files = (path for path in directory.rglob("*") if path.is_file())
    file = max(files, key=lambda path: path.stat().st_size)
    file.rename(directory.parent.parent / f"{directory.name}.away")
    return file


def put_in_place_of_a_file(directory: Path) -> str:
    """Replace a file of the export, as a user does who saves a trained model under its name."""
    file = take_the_largest_file(directory)
    file.write_bytes(b"another")
    return str(file.relative_to(directory))


def put_link_in_place_of_a_file(directory: Path) -> str:
    file = take_the_largest_file(directory)
    file.symlink_to(directory.parent.parent / f"{directory.name}.away")
    return str(file.relative_to(directory))


@pytest.mark.parametrize("form", FORMATS)
def test_a_foreign_file_in_an_export_is_named_and_kept(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    assert convert(model, tmp_path / "export" / "to", form) == 0
    places = [put_file, put_directory, put_link, put_link_in_place_of_a_file]
    if form != "flashckpt":  # whose names hold the id of one save, so no other file gets them
        places.append(put_in_place_of_a_file)
    for put in places:
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        to = Path(shutil.copytree(tmp_path / "export", tmp_path / "again")) / "to"
        foreign = put(directory_of(to, form))
        before = snapshot(tmp_path)
        assert convert(model, to, form, "--overwrite") == 2
        error = capsys.readouterr().err
        directory = directory_of(to, form)
        assert f"{directory}: holds files that 'flashckpt convert' did not write: " in error
        assert foreign in error
        assert snapshot(tmp_path) == before


def nothing(directory: Path) -> None:
    """Leave the checkpoint of a job unchanged."""


def another_format(directory: Path) -> None:
    """Replace it by Megatron's own checkpoint, which looks like an export."""
    for path in directory.iterdir():
        path.unlink()
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (directory / "common.pt").write_bytes(b"")


def half_a_save(directory: Path) -> None:
    next(directory.glob("*.end")).unlink()


def false_list(directory: Path) -> None:
    (directory / MARKER).write_text('{"files": 3}')


@pytest.mark.parametrize("form", ["flashckpt", "torch_dist", "safetensors"])
@pytest.mark.parametrize("change", [nothing, another_format, half_a_save, false_list])
def test_a_conversion_never_replaces_a_checkpoint_of_a_job(
    tmp_path: Path, save: Path, capsys: pytest.CaptureFixture[str], change: Callable, form: str
) -> None:
    other = tmp_path / "other"
    save_as_ranks(contents(seed=1), other, replicas=1)
    change(other / DIRECTORY)
    before = snapshot(tmp_path)
    assert convert(save, other, form, "--overwrite") == 2
    place = other if form == "safetensors" else other / DIRECTORY
    assert f"{place}: holds files that 'flashckpt convert' did not write" in capsys.readouterr().err
    assert snapshot(tmp_path) == before


def test_a_link_to_an_export_is_kept_but_a_linked_iteration_is_refused(
    tmp_path: Path, save: Path
) -> None:
    assert convert(save, tmp_path / "hf", "safetensors") == 0
    (tmp_path / "link").symlink_to("hf")
    assert convert(save, tmp_path / "link", "safetensors", "--overwrite") == 0
    assert os.readlink(tmp_path / "link") == "hf"
    assert (tmp_path / "hf" / INDEX).exists()
    assert convert(save, tmp_path / "dist", "torch_dist") == 0
    (tmp_path / "dist" / DIRECTORY).rename(tmp_path / "away")
    (tmp_path / "dist" / DIRECTORY).symlink_to(tmp_path / "away")
    before = snapshot(tmp_path)
    assert convert(save, tmp_path / "dist", "torch_dist", "--overwrite") == 2
    assert snapshot(tmp_path) == before


def test_damaged_and_interrupted_exports_do_not_block_a_new_export(
    tmp_path: Path, save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "hf"
    assert convert(save, to, "safetensors", "--max-file-size", "200") == 0
    next(to.glob("model-*")).unlink()

    def die(*_: object) -> None:
        raise SystemExit("killed")

    # Leave the files of a killed conversion, which runs no cleanup.
    for step in ("_sync", "_replace"):
        with monkeypatch.context() as patched:
            patched.setattr(output_dir, step, die)
            patched.setattr(output_dir.shutil, "rmtree", lambda *_, **__: None)
            with pytest.raises(SystemExit):
                convert(save, to, "safetensors", "--overwrite")
    left = [path for path in tmp_path.iterdir() if path.name.startswith(".hf.")]
    assert len(left) == 2
    before = [snapshot(path) for path in left]
    assert convert(save, to, "safetensors", "--overwrite") == 0
    alone = tmp_path / "alone"
    assert convert(save, alone, "safetensors") == 0
    assert sorted(os.listdir(to)) == sorted(os.listdir(alone))
    assert [snapshot(path) for path in left] == before, (
        "temporary files of another conversion were changed"
    )


def test_an_export_is_in_place_while_it_is_compared_and_a_file_added_before_is_kept(
    tmp_path: Path, save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison takes seconds on a network file system, and the command may be killed."""
    to = tmp_path / "hf"
    assert convert(save, to, "safetensors") == 0
    before = snapshot(to)
    sync, refuse_others = output_dir._sync, output_dir.former_export.refuse_others
    compared = []

    def note_and_sync(path: Path) -> None:
        (to / "notes.txt").write_text("mine")
        sync(path)

    def note(directory: Path) -> None:
        compared.append((directory, (to / INDEX).exists()))
        refuse_others(directory)

    monkeypatch.setattr(output_dir, "_sync", note_and_sync)
    monkeypatch.setattr(output_dir.former_export, "refuse_others", note)
    assert convert(save, to, "safetensors", "--overwrite") == 2
    assert compared == [(to, True), (to, True)]
    assert (to / "notes.txt").read_text() == "mine"
    (to / "notes.txt").unlink()
    assert snapshot(to) == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".hf.")] == []


def write(final: Path, text: str) -> None:
    """Write an export of one file."""
    with output_dir.new_directory(final, overwrite=True) as fresh:
        (fresh / "model").write_text(text)


def test_a_file_added_to_an_export_during_its_removal_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    final = tmp_path / "hf"

    write(final, "one")
    rename = Path.rename

    def rename_and_note(path: Path, target: Path) -> Path:
        if path == final:
            monkeypatch.setattr(output_dir.former_export, "refuse_others", lambda *_: None)
        elif target == final:
            (replaced,) = tmp_path.glob(".hf.*.replaced")
            (replaced / "notes.txt").write_text("mine")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_and_note)
    write(final, "two")
    assert (final / "model").read_text() == "two"
    (left,) = tmp_path.glob(".hf.*.replaced/*")
    assert (left.name, left.read_text()) == ("notes.txt", "mine")
    assert str(left.parent) in caplog.text


def test_ctrl_c_between_the_renames_of_a_replacement_leaves_the_earlier_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final, rename = tmp_path / "hf", Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        if target == final and path.parent.suffix == ".tmp":
            raise KeyboardInterrupt
        return rename(path, target)

    write(final, "one")
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(final, "two")
    assert (final / "model").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_file_list_with_outside_paths_removes_none_of_them(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    write(tmp_path / "hf", "one")
    marker = tmp_path / "hf" / MARKER
    text = marker.read_text()
    for name in ("../mine", str(tmp_path / "mine")):
        (tmp_path / "hf" / "model").write_text("mine")
        os.utime(tmp_path / "hf" / "model", (1, 1))
        shutil.copystat(tmp_path / "hf" / "model", tmp_path / "mine")
        marker.write_text(
            text.replace('"model"', f'"{name}"').replace('"nbytes": 3', '"nbytes": 4')
        )
        with (
            pytest.raises(ConfigError, match="model"),
            output_dir.new_directory(tmp_path / "hf", overwrite=True),
        ):
            pass
    assert output_dir.former_export.remove(tmp_path / "hf") is False
    assert (tmp_path / "mine").read_text() == "mine"
