"""`flashckpt prune`: the rules, what is removed, and the bytes that this frees."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from megatron_flashckpt.agent import alive
from megatron_flashckpt.catalog.directory import read_facts
from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.cli.console import human_size
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.file_format.file_names import (
    OWN,
    TRACKER,
    run_file,
    run_name,
    run_number,
    save_name,
)
from megatron_flashckpt.file_format.run_object import Ancestor, RunObject, encode_run
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.cli.conftest import Run, keep_alive, only_line, sign_of
from tests.support.checkpoints import RUN, fail, make, snapshot


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def iterations(save: Path) -> list[int]:
    return [stored.iteration for stored in read_facts(PosixStore(save)).stored]


def test_prune_removes_checkpoints_that_no_rule_keeps_unless_dry_run_or_without_a_tracker(
    run: Run, save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (10, 15, 20):
        make(save, iteration)
    monkeypatch.setenv("FLASHCKPT_RETENTION__EVERY", "10")
    before = snapshot(save)
    size = human_size(size_of(save / "iter_0000015"))
    dry = run("prune", save, "--dry-run")
    assert dry.status == 0
    assert dry.out == f"iter_0000015: would be removed, {size}\nwould free {size}\n"
    assert snapshot(save) == before
    (save / TRACKER).rename(save / "aside")
    assert run("prune", save).status == 0
    (save / "aside").rename(save / TRACKER)
    assert snapshot(save) == before
    ran = run("prune", save)
    assert (ran.status, ran.out) == (0, f"iter_0000015: removed, {size}\nfreed {size}\n")
    assert {path.name for path in save.iterdir()} == {"iter_0000010", "iter_0000020", OWN, TRACKER}
    assert run("prune", save).out == f"{save}: no checkpoint to remove\n"


def test_prune_refuses_a_directory_in_which_a_run_is_alive(
    run: Run, save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (10, 20):
        make(save, iteration)
    monkeypatch.setenv("FLASHCKPT_RETENTION__LATEST", "1")
    with monkeypatch.context() as patch:
        keep_alive(patch, save, sign_of(RUN))
        only_line(
            run("prune", save),
            rf".*nothing was removed, .*run {RUN} \(agent \d+ on elsewhere, .*\) saves there .*",
        )
        assert "iter_0000010: would be removed" in run("prune", save, "--dry-run").out
    monkeypatch.setattr(alive, "_PATIENCE_S", 1.0)
    assert "iter_0000010: removed" in run("prune", save).out, "it is no longer renewed"


def test_prune_works_after_a_start_from_scratch_that_has_left_nothing(run: Run, save: Path) -> None:
    """Such a run takes a number, and decides nothing that counts."""
    for iteration in (10, 20):
        make(save, iteration)
    for name in (RUN, run_name(run_number(RUN) + 1, "0000")):
        PosixStore(save).create(run_file(run_number(name)), encode_run(RunObject(name=name)))
    assert "iter_0000010: removed" in run("prune", save, "--latest", "1").out
    assert iterations(save) == [20]


def test_prune_without_a_rule_is_refused(run: Run, save: Path) -> None:
    make(save, 10)
    for output in ([], ["--dry-run"], ["--json"]):
        ran = run("prune", save, *output)
        only_line(ran, r"'retention' has no rule, .*; give a rule such as --latest 3, .*", 2)


def test_prune_names_a_skipped_checkpoint_once(
    run: Run, save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(save, 10)
    for iteration in (20, 30):
        make(save, iteration)
    made.manifest.write_text("{")
    monkeypatch.setenv("FLASHCKPT_RETENTION__LATEST", "1")
    ran = run("prune", save)
    assert (ran.status, [line.split(",")[0] for line in ran.lines[:-1]]) == (
        0,
        ["iter_0000020: removed"],
    )
    assert re.fullmatch(
        r"flashckpt: nothing of save \S+ in \S+/iter_0000010 is removed, because .*\n", ran.err
    )


@pytest.mark.parametrize("tracked", ["damaged", "missing", "incomplete"])
def test_prune_keeps_the_newest_whole_checkpoint_if_the_tracked_one_cannot_be_loaded(
    run: Run, save: Path, tracked: str
) -> None:
    for iteration in (10, 15, 20):
        manifest = make(save, iteration).manifest
    if tracked == "damaged":
        manifest.write_text("{")
    elif tracked == "missing":
        manifest.unlink()
    else:
        next(manifest.parent.glob("*.safetensors")).unlink()
    before = sorted(manifest.parent.iterdir())
    ran = run("prune", save, "--every", "100")
    assert ran.status == 0
    assert "iter_0000010: removed, " in ran.out
    assert run("verify", save, "--iteration", "15").status == 0
    assert sorted(manifest.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--every", "10"], [10, 20, 25]),
        (["--latest", "2", "--every", "10"], [10, 20, 25]),
        (["--max-age-hours", "1"], [20, 25]),
        (["--max-age-hours", "0", "--latest", "3"], [15, 20, 25]),
    ],
    ids=str,
)
def test_options_of_prune_are_rules(
    run: Run, save: Path, options: list[str], kept: list[int]
) -> None:
    for iteration in (10, 15, 20, 25):
        trained_s = iteration if iteration < 20 else 7200 + iteration
        make(save, iteration).change_manifest(
            lambda manifest, trained_s=trained_s: manifest.update(trained_s=trained_s)
        )
    assert run("prune", save, *options).status == 0
    assert iterations(save) == kept


def test_an_option_of_prune_replaces_the_same_rule_of_the_configuration(
    run: Run, save: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (10, 15, 20, 25):
        make(save, iteration)
    file = tmp_path / "mine.yaml"
    file.write_text("retention: {latest: 4, every: 10}")
    monkeypatch.setenv("FLASHCKPT_CONFIG", str(file))
    assert "no checkpoint to remove" in run("prune", save).out
    assert run("prune", save, "--latest", "1").status == 0
    assert iterations(save) == [10, 20, 25], "the rule 'every' of the file still holds"


def test_a_wrong_rule_of_prune_is_wrong_usage(
    save: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for iteration in (10, 20):
        make(save, iteration)
    for name, values in {
        "--latest": ("0", "-1", "x"),
        "--every": ("1.5", "99999999999"),
        "--max-age-hours": ("-1", "nan", "inf", "x"),
    }.items():
        for value in values:
            with pytest.raises(SystemExit) as ended:
                main(["prune", str(save), f"{name}={value}"])
            assert ended.value.code == 2
            assert f"argument {name}: '{value}' is not a" in capsys.readouterr().err
    assert iterations(save) == [10, 20]


def test_prune_prints_json(run: Run, save: Path) -> None:
    for iteration in (10, 15, 20):
        save_id = make(save, iteration).save_id
    sizes = [size_of(save / name) for name in ("iter_0000010", "iter_0000015")]
    for dry_run in (True, False):
        ran = run("prune", save, "--latest", "1", "--json", *["--dry-run"][: int(dry_run)])
        assert (ran.status, ran.err) == (0, "")
        assert json.loads(ran.out) == {
            "directory": str(save),
            "dry_run": dry_run,
            "freed_nbytes": sum(sizes),
            "checkpoints": [
                {
                    "iteration": iteration,
                    "save_id": save_id,
                    "nbytes": nbytes,
                    "freed_nbytes": nbytes,
                    "removed": not dry_run,
                }
                for iteration, nbytes in zip((10, 15), sizes, strict=True)
            ],
        }
    assert iterations(save) == [20]
    nothing = json.loads(run("prune", save, "--latest", "1", "--json").out)
    assert (nothing["freed_nbytes"], nothing["checkpoints"]) == (0, [])


def test_prune_completes_and_counts_an_interrupted_removal(run: Run, save: Path) -> None:
    made = make(save, 10)
    make(save, 20)
    made.manifest.unlink()
    fail(save, 10, made.save_id, "no rule of 'retention' keeps it")
    size = human_size(size_of(made.directory))
    dry = run("prune", save, "--latest", "5", "--dry-run")
    assert dry.lines == [f"iter_0000010: would be removed, {size}", f"would free {size}"]
    ran = run("prune", save, "--latest", "5")
    assert ran.lines == [f"iter_0000010: removed, {size}", f"freed {size}"]
    assert not made.directory.exists()


def test_prune_keeps_the_history_of_the_newest_run(run: Run, save: Path) -> None:
    """Run 2 resumed from iteration 10 and has passed iteration 20 of run 1, but not 40."""
    for iteration in (10, 20, 40):
        make(save, iteration)
    newest = run_name(2, "0a1b")
    ancestors = (Ancestor(RUN, 10),)
    make(save, 30, save_name(newest, 1), ancestors=ancestors)
    assert run("prune", save, "--latest", "2").lines[0].startswith("iter_0000020: removed")
    assert iterations(save) == [10, 30, 40]


def test_prune_counts_only_bytes_that_were_freed(
    run: Run, save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(save, 10)
    make(save, 20)
    whole, delete = size_of(made.directory), PosixStore.delete
    stuck = ""  # the end of all names

    def refuse(store: PosixStore, names: Iterable[str]) -> None:
        for name in names:
            if name.endswith(stuck):
                raise StorageError(f"{name}: cannot delete (Operation not permitted)")
            delete(store, [name])

    monkeypatch.setattr(PosixStore, "delete", refuse)
    ran = run("prune", save, "--latest", "1")
    assert (ran.status, ran.lines) == (1, ["iter_0000010: cannot be removed", "freed 0 B"])
    assert iterations(save) == [10, 20]
    stuck = made.shard(1).name
    ran = run("prune", save, "--latest", "1", "--json")
    assert ran.status == 1
    assert "Operation not permitted" in ran.err
    result = json.loads(ran.out)
    (removal,) = result["checkpoints"]
    left = size_of(made.directory)
    assert made.shard(1).stat().st_size <= left < whole
    assert result["freed_nbytes"] == removal["freed_nbytes"] == whole - left
    assert not removal["removed"]
    monkeypatch.setattr(PosixStore, "delete", delete)
    assert run("prune", save, "--latest", "1").lines[-1] == f"freed {human_size(left)}"
