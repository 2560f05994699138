"""The command line: output, exit status, and one-line errors."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from megatron_flashckpt import FORMAT_VERSION, __version__, config
from megatron_flashckpt.agent import alive
from megatron_flashckpt.catalog.listing import newest_durable
from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.cli.console import printable
from megatron_flashckpt.config import Config, load_config
from megatron_flashckpt.file_format.file_names import (
    LAST_OF_FORMAT_1,
    MANIFEST_OF_FORMAT_1,
    TRACKER,
    record_name,
    save_name,
    shard_name,
)
from megatron_flashckpt.file_format.run_object import Ancestor
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.cli.conftest import Run, only_line, sign_of
from tests.support.checkpoints import (
    RUN,
    SAVE_ID,
    fail,
    make,
    persist,
    pieces_of_rank,
    snapshot,
)
from tools import reference_pages

#: A time of a commit, in the local time in which tables show it.
NOON = datetime.datetime(2026, 11, 23, 12).timestamp()

# ---------------- ls


def test_ls_shows_every_checkpoint_the_tracked_one_and_the_rules_that_keep_it(
    run: Run, save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (10, 15, 20):
        made = make(save, iteration)
        made.change_manifest(lambda manifest: manifest.update(committed_at=NOON))
    for name in ("iter_10", "iter_00000011", "iter_000001x", "tensorboard"):
        (save / name).mkdir()  # no job would load them
    nbytes = sum(made.shard(rank).stat().st_size for rank in range(4))
    ran = run("ls", save)
    assert (ran.status, ran.err) == (0, "")
    names = ["iteration", "state", "date", "ranks", "size", "layout", "remark"]
    assert ran.row("iteration") == names
    assert ran.row("10")[:4] == ["10", "committed", "2026-11-23 12:00", "4"]
    size = f"{nbytes / 1024:.1f} KiB"
    row = ["*", "20", "committed", "2026-11-23 12:00", "4", size, "tp2 pp1 dp2"]
    assert ran.row("*", "20") == row
    assert ran.lines[-1] == f"* named by {TRACKER}"
    assert len(ran.lines) == 5
    monkeypatch.setenv("FLASHCKPT_RETENTION__EVERY", "10")
    ran = run("ls", save)
    assert ran.row("iteration")[-2:] == ["kept by", "remark"]
    kept = [ran.row(*start)[-1] for start in (("10",), ("15",), ("*", "20"))]
    assert kept == ["every 10", "nothing", "tracker, every 10"]


def test_ls_shows_every_attempt_of_one_iteration_and_why_it_failed(run: Run, save: Path) -> None:
    first, second, third = (save_name(RUN, 1, attempt) for attempt in (1, 2, 3))
    reason = "/disk: cannot write (No space left on device); free space there"
    fail(save, 20, first, reason)
    fail(save, 20, third, "another")
    failed = f"{first} failed: {reason}"
    assert run("ls", save).row("20", "failed")[-1] == f"{failed}; {third} failed: another"
    persist(PosixStore(save), 20, second, 1, 2, pieces_of_rank(1))
    assert run("ls", save).row("20", "not committed")[-1] == (
        f"{failed}; {second}: 1 of 2 ranks are durable, missing: 0; {third} failed: another"
    )


def test_ls_counts_durable_ranks_by_the_names_of_their_records(run: Run, save: Path) -> None:
    torn = save / "iter_0000010" / shard_name(0, SAVE_ID)
    torn.parent.mkdir(parents=True)
    torn.write_bytes(bytes(5000))  # without a header
    persist(PosixStore(save), 20, SAVE_ID, 0, 6, pieces_of_rank(0))
    directory = save / "iter_0000020"
    record = directory / record_name(range(1), SAVE_ID)
    record.rename(directory / record_name(range(1, 4), SAVE_ID))
    # A record name that claims more ranks than the job has, or than fit into memory, is ignored.
    for ranks in (range(7), range(10**10)):
        (directory / record_name(ranks, SAVE_ID)).touch()
    ran = run("ls", save)
    assert ran.row("10", "not committed") == (
        ["10", "not committed", "4.9 KiB", f"{SAVE_ID}: 0 of ? ranks are durable"]
    )
    assert ran.row("20", "not committed")[-1] == (
        f"{SAVE_ID}: 3 of 6 ranks are durable, missing: 0, 4, 5"
    )


def test_ls_names_the_run_that_left_a_checkpoint_behind(run: Run, save: Path) -> None:
    first, second = "000001-aaaa", "000002-bbbb"
    for sequence, iteration in enumerate((10, 20, 30), 1):
        make(save, iteration, save_name(first, sequence))
    for sequence, iteration in enumerate((15, 20), 1):
        make(save, iteration, save_name(second, sequence), ancestors=(Ancestor(first, 10),))
    ran = run("ls", save)
    assert ran.row("10")[1] == ran.row("15")[1] == "committed"
    assert ran.row("*", "20")[2] == "committed"
    assert ran.row("*", "20")[-1] == f"also holds {save_name(first, 2)}"
    assert ran.row("30", "of another history")[-1] == f"run {second} went on from iteration 10"
    make(save, 40, save_name("000003-cccc", 1))
    assert run("ls", save).row("15", "of another history")[-1] == (
        "run 000003-cccc began from scratch"
    )


def test_ls_tells_a_linked_and_a_renamed_directory(run: Run, save: Path) -> None:
    made = make(save, 10)
    (save / "iter_0000020").symlink_to(made.directory)
    made.directory.rename(save / "iter_0000030")
    (save / "iter_0000010").symlink_to(save / "iter_0000030")
    ran = run("ls", save)
    link = "is a symbolic link to another directory"
    assert ran.row("*", "10")[-1] == link
    assert ran.row("20", "unreadable")[-1].endswith(link)
    assert "holds iteration 10, so this directory was renamed" in ran.row("30", "unreadable")[-1]


def test_ls_names_the_formats_of_megatrons_own_checkpoints(run: Run, save: Path) -> None:
    formats = {
        "5": ("torch", {"mp_rank_00/model_optim_rng.pt": ""}),
        "6": ("torch.distributed", {".metadata": ""}),
        "7": ("?", {"metadata.json": "not json"}),
        "release": (
            "torch_dist",
            {"metadata.json": '{"sharded_backend": "torch_dist"}', ".metadata": ""},
        ),
    }
    for place, (_, files) in formats.items():
        for name, content in files.items():
            file = save / (place if place == "release" else f"iter_000000{place}") / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
    (save / TRACKER).write_text("release")
    ran = run("ls", save)
    for place, (remark, _) in formats.items():
        start = ["*"] if place == "release" else []
        assert ran.row(*start, place) == [*start, place, "Megatron's own", remark]


def test_ls_continues_after_an_unreadable_checkpoint(run: Run, save: Path) -> None:
    (save / "iter_0000005").mkdir(parents=True)
    (save / "iter_0000005" / MANIFEST_OF_FORMAT_1).write_text("{}")
    make(save, 10).manifest.write_text("{")
    newer = make(save, 20)
    newer.change_manifest(lambda manifest: manifest.update(version=FORMAT_VERSION + 1))
    make(save, 30)
    (save / "iter_0000040").write_text("a file")
    ran = run("ls", save)
    assert ran.status == 0
    assert LAST_OF_FORMAT_1 in ran.row("5", "format 1")[-1]
    assert re.search(r"is not a manifest \(.*\)$", ran.row("10", "unreadable")[-1])
    assert ran.row("20", "unreadable")[-1].endswith(": upgrade megatron_flashckpt")
    assert ran.row("*", "30", "committed")[4] == "4"
    assert "a file stands where a directory should be" in ran.row("40", "unreadable")[-1]


def test_ls_names_missing_and_truncated_files_of_a_committed_checkpoint(
    run: Run, save: Path
) -> None:
    made = make(save, 10)
    nbytes = made.shard(2).stat().st_size
    made.shard(1).unlink()
    made.common.unlink()
    os.truncate(made.shard(2), 100)
    make(save, 20)
    ran = run("ls", save)
    assert ran.row("10")[1] == "damaged"
    assert ran.row("10")[-1] == (
        f"missing: {made.common.name}, {made.shard(1).name}; "
        f"of another length: {made.shard(2).name} (100 bytes instead of {nbytes})"
    )
    assert ran.row("*", "20")[2] == "committed"


def test_ls_reports_a_tracker_that_is_missing_or_names_a_missing_iteration(
    run: Run, save: Path
) -> None:
    make(save, 10)
    for text in ("99", "release", "nonsense", "9" * 5000, "\udcff"):
        (save / TRACKER).write_text(text, errors="surrogateescape")
        ran = run("ls", save)
        assert (ran.status, ran.row("10")[1]) == (0, "committed")
        assert re.fullmatch(rf"{TRACKER} names '.+', which is missing", ran.lines[-1])
    (save / TRACKER).unlink()
    assert run("ls", save).lines[-1] == f"{TRACKER} is missing: a job would start from scratch"


@pytest.mark.parametrize("kind", ["link", "dangling link", "loop", "directory"])
def test_a_tracker_that_is_no_file_hides_no_checkpoint_from_a_command(
    run: Run, save: Path, kind: str
) -> None:
    """A load ignores it, and takes the newest checkpoint."""
    for iteration in (10, 20):
        make(save, iteration)
    tracker = save / TRACKER
    tracker.rename(save / "elsewhere")
    (save / "elsewhere").write_text("10")
    if kind == "directory":
        tracker.mkdir()
    else:
        tracker.symlink_to({"link": "elsewhere", "loop": TRACKER}.get(kind, "nowhere"))
    assert newest_durable(PosixStore(save)) == 20
    remedy = "move it away" if kind == "directory" else "remove it"
    for command in (["ls"], ["inspect"], ["verify"], ["verify", "--all"], ["report"]):
        ran = run(command[0], save, *command[1:])
        assert (ran.status, "20" in ran.out) == (0, True)
        assert re.fullmatch(
            rf"flashckpt: .* names no iteration: {tracker}: .*; .*{remedy}\n", ran.err
        )
    assert run("verify", save).lines[-1].startswith("iter_0000020: intact")
    assert run("ls", save).lines[-1] == f"{TRACKER} names no checkpoint"
    assert json.loads(run("ls", save, "--json").out)["tracker"] == ""


def test_a_directory_without_checkpoints_is_an_error_of_ls(run: Run, save: Path) -> None:
    def refused(error: str) -> None:
        for output in ([], ["--json"]):
            only_line(run("ls", save, *output), rf"{save}: holds no checkpoint{error}")

    (save / "tensorboard").mkdir(parents=True)
    wrong = "give Megatron's --save directory"
    refused(f"; {wrong}")
    (save / TRACKER).write_text("20")
    fact = rf"although {TRACKER} names '20'"
    refused(rf", {fact}; {wrong}")
    alive.put(PosixStore(save), sign_of("000001-aaaa"))
    refused(
        rf" yet, {fact}; run 000001-aaaa \(.*\) saves there, which is training or was killed: wait "
        "until a save is committed"
    )


# ---------------- inspect


def test_inspect_shows_description_tensors_and_files(run: Run, save: Path) -> None:
    made = make(save, ancestors=(Ancestor("000000-0001", 3),))
    ran = run("inspect", save)
    assert (ran.status, ran.err) == (0, "")
    assert "metrics" not in [line.split()[0] for line in ran.lines if line]
    assert ran.row("checkpoint") == ["checkpoint", str(made.directory)]
    assert ran.row("save")[1] == f"{made.save_id}, format version {FORMAT_VERSION}"
    assert ran.row("run")[1] == f"{RUN}, which continues 000000-0001 up to iteration 3"
    assert ran.row("tracker")[1] == "names this checkpoint"
    assert ran.row("tensor_model_parallel_size")[1] == "2"
    # 2 x 6 x 5 elements of 2 bytes, from two tensor-parallel ranks; replicas share some boxes.
    assert ran.row("weight", "layers.w")[2:5] == ["BF16", "[2, 6, 5]", "120 B"]
    assert ran.row("buffer", "layers.bias")[2:] == ["F32", "[3]", "12 B", "1"]
    for rank in range(4):
        size = f"{made.shard(rank).stat().st_size / 1024:.1f} KiB"
        place = f"tp{rank % 2} pp0 dp{rank // 2} cp0 ep0 edp0"
        row = [str(rank), place, made.shard(rank).name, size, str(len(made.pieces[rank]))]
        assert ran.row(str(rank)) == row
    metrics = {"lm loss validation": 2.25, "accuracy": 0.5}
    made.change_manifest(lambda manifest: manifest.update(metrics=metrics))
    assert run("inspect", save).row("metrics")[1] == "lm loss validation: 2.25, accuracy: 0.5"
    document = json.loads(run("inspect", save, "--json").out)
    assert (document["metrics"], document["tracked"]) == (metrics, True)
    assert document["nbytes"] == sum(made.shard(rank).stat().st_size for rank in range(4))
    assert document["files"][3]["coordinates"]["dp"] == 1
    pieces = [piece for held in made.pieces for piece in held]
    assert sum(tensor["nbytes"] for tensor in document["tensors"]) == sum(p.nbytes for p in pieces)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_the_given_then_the_tracked_then_the_newest_iteration_is_read(
    run: Run, save: Path, command: str
) -> None:
    for iteration in (10, 20, 30):
        make(save, iteration)
    (save / TRACKER).write_text("20")

    def shown(*arguments: str) -> str:
        out = run(command, save, *arguments).out
        return " ".join(re.findall(r"\biter_0*(\d+)\b", out))

    assert shown("--iteration", "10") == "10"
    assert shown() == "20"
    (save / TRACKER).unlink()
    assert shown() == "30"


# ---------------- verify


def test_verify_prints_one_line_or_place_digests_and_remedy_of_each_damage(
    run: Run, save: Path
) -> None:
    made = make(save)
    before = snapshot(save)
    ran = run("verify", save)
    assert (ran.status, ran.err) == (0, "")
    assert re.fullmatch(r"iter_0000010: intact \(4 shard files, 16\.\d KiB\)\n", ran.out)
    assert snapshot(save) == before
    made.shard(1).unlink()
    content = bytearray(made.shard(2).read_bytes())
    content[-1] ^= 1
    made.shard(2).write_bytes(content)
    ran = run("verify", save)
    assert (ran.status, ran.err) == (1, "")
    older = "choose an older one with --iteration"
    assert ran.lines[0] == f"damaged: {made.shard(1)}: is missing; {older}"
    assert re.fullmatch(
        rf"damaged: {made.shard(2)}, chunk 0 \(bytes 0-\d+ of the data\): digest \w{{16}}, "
        rf"expected \w{{16}}; {older}",
        ran.lines[1],
    )
    assert re.fullmatch(r"iter_0000010: 2 problems \(4 shard files, .*\)", ran.lines[2])
    assert len(ran.lines) == 3


def test_verify_all_skips_what_no_job_of_ours_would_load_unless_the_tracker_names_it(
    run: Run, save: Path
) -> None:
    make(save, 10)
    (save / "iter_0000005/mp_rank_00").mkdir(parents=True)
    (save / "iter_0000020").mkdir()
    ran = run("verify", save, "--all")
    assert (ran.status, len(ran.lines)) == (0, 1)
    (save / TRACKER).write_text("20")
    ran = run("verify", save, "--all")
    assert ran.status == 1
    assert "iteration 20 was not committed, or was removed since" in ran.lines[1]
    assert ran.lines[2] == "iter_0000020: 1 problem"


@pytest.mark.parametrize("lost", ["a piece", "a box"])
def test_verify_reports_a_tensor_with_missing_elements(run: Run, save: Path, lost: str) -> None:
    ranks = [pieces_of_rank(rank) for rank in range(4)]
    victim = next(p for p in ranks[1] if p.kind == "weight")
    box = (victim.key, victim.kind, victim.offset)
    for rank, pieces in enumerate(ranks):
        of_box = [p for p in pieces if (p.key, p.kind, p.offset) == box]
        gone = of_box if lost == "a box" else [victim]
        ranks[rank] = [p for p in pieces if p not in gone]
    made = make(save, ranks=ranks)
    ran = run("verify", save)
    assert ran.status == 1
    assert ran.lines[0].startswith(f"damaged: {made.manifest}: weight/layers.w: ")
    assert ran.lines[0].endswith("; choose an older one with --iteration")


def test_verify_shows_a_progress_bar_only_on_a_terminal(save: Path, run: Run) -> None:
    make(save)
    command = [sys.executable, "-m", "megatron_flashckpt.cli", "verify", str(save)]
    controller, terminal = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, env=environment)
    os.close(terminal)
    bar = b""
    # The read fails with EIO when the program has closed the terminal.
    with open(controller, "rb", buffering=0) as file, contextlib.suppress(OSError):
        while chunk := file.read(4096):
            bar += chunk
    assert b"iter_0000010" in bar
    out, _ = process.communicate()
    assert process.returncode == 0
    quiet = run("verify", save)
    assert (quiet.out, quiet.err) == (out.decode(), "")


def test_an_interruption_during_the_imports_gives_no_traceback(save: Path) -> None:
    make(save)
    code = (
        "import importlib.abc, signal, sys\n"
        "class Interrupt(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'rich':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from megatron_flashckpt.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", code, "ls", str(save)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "flashckpt: interrupted\n")


# ---------------- config


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file of settings; a variable overrides one of them."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "slots: 3\nbusy: wait\nagent:\n  grace_s: 5\n"
        'retention: {best: {metric: "lm loss", keep: 2}}\n'
    )
    monkeypatch.setenv("FLASHCKPT_CONFIG", str(file))
    monkeypatch.setenv("FLASHCKPT_AGENT__GRACE_S", "7")
    return file


def test_config_check_names_changed_settings_with_their_origin(run: Run, configured: Path) -> None:
    count = len(config.origins(None, {}))
    lines = run("config", "check").lines
    comments = lines[: next(n for n, line in enumerate(lines) if line[0] != "#")]
    best = '{"metric":"lm loss","keep":2,"mode":"min"}'
    assert comments == [
        f"# 3 of {count} settings differ from their defaults:",
        f"#   slots: 3 (default: 2), from {configured}",
        f"#   retention.best: {best} (default: null), from {configured}",
        "#   agent.grace_s: 7.0 (default: 600.0), from FLASHCKPT_AGENT__GRACE_S",
    ]
    assert msgspec.yaml.decode("\n".join(lines).encode(), type=Config) == load_config()


def test_the_output_of_config_check_is_a_valid_configuration_with_all_defaults(
    run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "same.yaml"
    file.write_text("slots: 2\nagent: {}\n")
    for given in ([], [file]):
        ran = run("config", "check", *given)
        assert re.fullmatch(r"# All \d+ settings have their defaults\.", ran.lines[0])
        assert ran.lines[1][0] != "#"
    file.write_text(ran.out)
    assert load_config(file, {}) == Config()


def test_line_breaks_in_names_and_values_stay_in_comments(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "mine\nslots: 7\n.yaml"
    file.write_text(r'trace: {directory: "a\nslots: 8"}')
    ran = run("config", "check", file)
    assert msgspec.yaml.decode(ran.out.encode(), type=Config) == load_config(file)
    assert [line for line in ran.lines if line.startswith("slots:")] == ["slots: 2"]
    file = tmp_path / "mine.yaml"
    file.write_text("slotts: 3")
    remedy = r"unknown setting slotts \(did you mean slots\?\); correct or remove it"
    only_line(run("config", "check", file), rf".*mine\.yaml: {remedy}", 2)


def test_config_check_prints_json(run: Run, configured: Path) -> None:
    ran = run("config", "check", "--json")
    assert (ran.status, ran.err) == (0, "")
    settings = {setting.pop("name"): setting for setting in json.loads(ran.out)}
    assert settings["slots"] == {
        "value": 3,
        "default": 2,
        "source": "file",
        "place": str(configured),
    }
    origin = {"source": "variable", "place": "FLASHCKPT_AGENT__GRACE_S"}
    assert settings["agent.grace_s"] == {"value": 7.0, "default": 600.0, **origin}
    default = {"source": "default", "place": None}
    assert settings["weights"] == {"value": "store", "default": "store", **default}
    assert settings["busy"]["source"] == "file", "the file sets it to its default"
    assert settings["retention.best"]["value"] == {"metric": "lm loss", "keep": 2, "mode": "min"}
    page = (reference_pages.DIRECTORY / "configuration.md").read_text()
    shown = re.findall(r"^### (?!retention\.best\.)(\S+)$", page, re.M)
    assert sorted(settings) == sorted(shown)


# ---------------- errors


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "report", "prune"])
def test_another_path_than_a_save_directory_gives_a_one_line_error(
    run: Run, tmp_path: Path, save: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """An empty path does not mean the working directory, in which a script would remove files."""
    for iteration in (10, 20):
        directory = make(save, iteration).directory
    before = snapshot(save)
    monkeypatch.chdir(save)
    monkeypatch.setenv("FLASHCKPT_RETENTION__LATEST", "1")
    (tmp_path / "file").write_text("")
    remedy = "give Megatron's --save directory"
    for output in ([], ["--json"]):
        for name in ("nowhere", "file", "file/below"):
            ran = run(command, tmp_path / name, *output)
            only_line(ran, rf"{tmp_path / name}: is not a directory; {remedy}")
        for path in ("", " "):
            only_line(run(command, path, *output), rf"' ?': names no directory; {remedy}")
        only_line(run(command, directory, *output), rf"{directory}: .* {save} --iteration 20")
    assert snapshot(save) == before


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_an_iteration_that_is_no_checkpoint_of_ours_gives_a_one_line_error(
    run: Run, save: Path, command: str
) -> None:
    make(save)
    only_line(
        run(command, save, "--iteration", 11),
        r".*iter_0000011: holds no end of a save: iteration 11 was not committed, or was removed "
        r"since; choose another iteration with --iteration",
    )
    stock = save / "iter_0000005"
    (stock / "mp_rank_00").mkdir(parents=True)
    (save / TRACKER).write_text("5")
    only_line(
        run(command, save),
        r".*iter_0000005: is in Megatron's own format 'torch', .*'flashckpt convert' converts it",
    )
    (stock / "mp_rank_00").rename(stock / "others")
    for content in ("not json", "[1]", '{"sharded_backend": null}'):
        (stock / "metadata.json").write_text(content)
        only_line(run(command, save), rf".*{stock.name}: .* but metadata\.json.*is damaged: rest.*")


def test_a_directory_without_checkpoints_gives_a_one_line_error(run: Run, save: Path) -> None:
    save.mkdir()
    for arguments in (["inspect"], ["verify"], ["verify", "--all"]):
        only_line(run(*arguments, save), rf"{save}: holds no committed checkpoint; .*")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_without_permission_gives_a_one_line_error(run: Run, save: Path) -> None:
    make(save)
    save.chmod(0)
    try:
        only_line(run("ls", save), r".*cannot list \(Permission denied\).*")
    finally:
        save.chmod(0o755)


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["frobnicate"], "frobnicate"),
        (["ls"], "DIR"),
        (["ls", "a", "b"], "unrecognized arguments: b"),
        (["config"], "COMMAND"),
        (["config", "frobnicate"], "frobnicate"),
        (["config", "check", ""], "names no"),
        (["verify", "a", "--all", "--iteration", "3"], "not allowed with"),
        *((["verify", "a", "--iteration", n], "is not an it") for n in ("three", "-3", "9" * 5000)),
        (["inspect", "a", "--yaml"], "--yaml"),
        (["plan", "--gpus", "8", "--num-layers", "2"], "Megatron's arguments after '--'"),
        (["config", "check", "--save", "http://host/save"], "http://host/save"),
        (["convert", "a", "b"], "--to"),
        (["convert", "a", "b", "--to", "onnx"], "onnx"),
        (["convert", "a", "b", "--to", "torch", "--memory", "lots"], "'lots' is not a size"),
        *(
            ([*command, path], fact)
            for command in (
                ["agent", "--foreground", "--save"],
                ["agent", "--wait", "--save"],
                ["convert", "--to", "torch", "save"],
                ["convert", "--to", "torch"],
            )
            for path, fact in (
                ("", "names no directory"),
                (" ", "names no directory"),
                ("msc://profile/save", "msc://profile/save: "),
            )
        ),
    ],
)
def test_wrong_usage_is_explained_with_status_2_and_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    fact: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("usage: flashckpt")
    error = printed.err.splitlines()[-1]
    assert re.match(r"flashckpt.*: error: ", error)
    assert fact in error
    assert list(tmp_path.iterdir()) == []


def test_a_call_without_command_shows_the_help_with_status_2(run: Run) -> None:
    ran = run()
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("usage: flashckpt")
    for command in ("ls", "inspect", "verify", "prune", "convert", "plan", "report", "config"):
        assert re.search(rf"^ +{command} ", ran.err, re.MULTILINE), command
    assert "exit status: 0 success" in ran.err


def test_the_version_option_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("-V", "--version"):
        with pytest.raises(SystemExit) as caught:
            main([option])
        assert caught.value.code == 0
        assert capsys.readouterr().out.strip() == __version__


# ---------------- as a program


def test_the_command_line_imports_neither_torch_nor_megatron(save: Path) -> None:
    make(save)
    code = (
        "import sys; from megatron_flashckpt.cli.commands import main;"
        "status = max(main([name, sys.argv[1]]) for name in ('ls', 'inspect', 'verify'));"
        "sys.exit(status or any(name in sys.modules for name in ('torch', 'megatron', 'numpy')))"
    )
    command = [sys.executable, "-c", code, str(save)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_closed_pipe_gives_no_traceback(save: Path) -> None:
    held = [Piece(f"layer.{n}", "weight", "U8", (1,), (0,), (1,), 0, 1) for n in range(500)]
    make(save, ranks=[held])
    command = [sys.executable, "-m", "megatron_flashckpt.cli", "inspect", str(save)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # less than 500 rows
    assert process.stdout.readline().startswith(b"checkpoint")
    process.stdout.close()
    _, errors = process.communicate()
    assert (process.returncode, errors) == (1, b"")


def test_a_closed_standard_output_gives_a_one_line_error(save: Path) -> None:
    make(save)
    command = f"exec '{sys.executable}' -m megatron_flashckpt.cli ls '{save}' >&-"
    ran = subprocess.run(["bash", "-c", command], capture_output=True)
    assert ran.returncode == 1
    assert ran.stderr == b"flashckpt: standard output is closed; nothing was done\n"


@pytest.mark.parametrize(
    "arguments",
    [
        *(["ls"], ["inspect"], ["verify"]),
        *(["ls", "--json"], ["inspect", "--json"], ["verify", "--json"]),
    ],
    ids=" ".join,
)
def test_control_characters_in_names_never_reach_the_terminal(
    run: Run, save: Path, arguments: list[str]
) -> None:
    evil = "\x1b]0;owned\x07[bold]\x9b2J\n層\U000e0001"
    held = [Piece(evil, "weight", "U8", (3,), (0,), (3,), 0, 2)]
    made = make(save, ranks=[held])
    made.change_manifest(
        lambda manifest: manifest["description"].update(tensor_model_parallel_size=evil)
    )
    (save / TRACKER).write_text(evil)
    ran = run(*arguments, save)
    for line in ran.out.splitlines():
        assert line.isprintable(), line
    assert "\x1b" not in ran.out + ran.err
    assert "owned" in ran.out
    assert "[bold]" in ran.out, "square brackets were read as markup"
    if arguments == ["inspect", "--json"]:
        assert json.loads(ran.out)["tensors"][0]["key"] == evil


@pytest.mark.parametrize(
    ("text", "encoding", "shown"),
    [
        ("weight/層 [3]", "utf-8", "weight/層 [3]"),
        ("weight/層", "ascii", "weight/\\u5c64"),
        ("\x1b[2J\r\x9b\udcff", "utf-8", "\\x1b[2J\\r\\x9b\\udcff"),
    ],
)
def test_printable_escapes_only_characters_that_cannot_be_shown(
    text: str, encoding: str, shown: str
) -> None:
    assert printable(text, encoding) == shown


def test_characters_outside_the_terminals_encoding_are_escaped(
    save: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(save, ranks=[[Piece("層", "weight", "U8", (1,), (0,), (1,), 0, 1)]])
    out = io.TextIOWrapper(io.BytesIO(), "latin-1", write_through=True)
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["inspect", str(save)]) == 0
    assert b"\\u5c64" in out.buffer.getvalue()
