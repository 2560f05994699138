"""`--json` of `ls` and `verify`: the fields, and a standard output that holds nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_flashckpt.agent import alive
from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.file_format.file_names import TRACKER, alive_file
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.cli.conftest import Run, sign_of
from tests.support.checkpoints import SAVE_ID, make, snapshot

WRITER = "000009-beef"


def test_ls_prints_every_checkpoint_as_json(
    run: Run, save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (10, 20):
        made = make(save, iteration)
        made.change_manifest(lambda manifest: manifest.update(committed_at=1234.5))
    (save / "iter_0000030/mp_rank_00").mkdir(parents=True)
    (save / "iter_0000040").mkdir()
    alive.put(PosixStore(save), sign_of(WRITER))
    monkeypatch.setenv("FLASHCKPT_RETENTION__EVERY", "15")
    before = snapshot(save)
    ran = run("ls", save, "--json")
    assert (ran.status, ran.err) == (0, "")
    assert snapshot(save) == before
    document = json.loads(ran.out)
    assert document.keys() == {"directory", "tracker", "checkpoints", "writer"}
    assert (document["directory"], document["tracker"]) == (str(save), "20")
    assert document["writer"] == {
        "run": WRITER,
        "host": "elsewhere",
        "agent_pid": 1234,
        "renewed_at": 77.0,
        "state": "training",
    }
    ours, tracked, stock, empty = document["checkpoints"]
    assert tracked == {
        "directory": "iter_0000020",
        "iteration": 20,
        "state": "committed",
        "save_id": SAVE_ID,
        "committed_at": 1234.5,
        "ranks": 4,
        "nbytes": sum(made.shard(rank).stat().st_size for rank in range(4)),
        "layout": "tp2 pp1 dp2",
        "tracked": True,
        "kept_by": ["tracker"],
        "remark": "",
    }
    assert (ours["tracked"], ours["kept_by"]) == (False, [])
    assert (stock["state"], stock["remark"], stock["kept_by"]) == ("Megatron's own", "torch", None)
    assert (stock["committed_at"], stock["ranks"], stock["nbytes"]) == (None, None, None)
    assert empty["state"] == "not committed"
    monkeypatch.delenv("FLASHCKPT_RETENTION__EVERY")
    document = json.loads(run("ls", save, "--json").out)
    assert {entry["kept_by"] for entry in document["checkpoints"]} == {None}


def test_a_missing_tracker_and_a_missing_or_damaged_writer_are_null(run: Run, save: Path) -> None:
    make(save)
    (save / TRACKER).unlink()
    document = json.loads(run("ls", save, "--json").out)
    assert (document["tracker"], document["writer"]) == (None, None)
    assert [entry["tracked"] for entry in document["checkpoints"]] == [False]
    file = save / alive_file(WRITER)
    file.parent.mkdir()
    file.write_bytes(b"x" * 1024)
    for output in ([], ["--json"]):
        ran = run("ls", save, *output)
        assert ran.status == 0
        assert re.fullmatch(rf"flashckpt: {file}: does not tell .*\n", ran.err)
    assert json.loads(ran.out) == document


def test_verify_prints_a_verdict_per_checkpoint_as_json(run: Run, save: Path) -> None:
    damaged = make(save, 10)
    damaged.shard(1).unlink()
    make(save, 20).manifest.write_text("{")
    newest = make(save, 30)
    ran = run("verify", save, "--all", "--json")
    assert (ran.status, ran.err) == (1, "")
    first, second, third = json.loads(ran.out)
    assert third == {
        "iteration": 30,
        "directory": "iter_0000030",
        "intact": True,
        "files": 4,
        "nbytes": sum(newest.shard(rank).stat().st_size for rank in range(4)),
        "problems": [],
    }
    assert (first["intact"], first["files"]) == (False, 4)
    older = "choose an older one with --iteration"
    message = f"{damaged.shard(1)}: is missing; {older}"
    assert first["problems"] == [{"state": "damaged", "message": message}]
    assert (second["intact"], second["files"], second["nbytes"]) == (False, None, None)
    assert "is not a manifest" in second["problems"][0]["message"]
    ran = run("verify", save, "--json")
    assert (ran.status, json.loads(ran.out)) == (0, [third])


def fields(document: object) -> set[str]:
    """Return the names of all fields in a JSON document."""
    if isinstance(document, list):
        return set().union(*map(fields, document))
    if isinstance(document, dict):
        return {*document, *fields([*document.values()])}
    return set()


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "report", "prune"])
def test_the_help_names_all_fields_of_the_json(
    run: Run, save: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for iteration in (5, 10, 20):
        damaged = make(save, iteration)
    damaged.shard(1).unlink()
    alive.put(PosixStore(save), sign_of(WRITER))
    options = ["--latest", "1", "--dry-run"] if command == "prune" else []
    document = json.loads(run(command, save, *options, "--json").out)
    if command == "inspect":
        del document["description"]  # its names are those of Megatron's arguments
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out.partition("print JSON: ")[2]
    words = set(re.findall(r"\w+", shown))
    assert len(fields(document)) > 5
    assert fields(document) <= words
