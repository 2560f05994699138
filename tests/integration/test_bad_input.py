"""User mistakes, through Megatron's real `load_checkpoint` and `save_checkpoint`.

Each case raises one clear error on every rank, which names file, fact and remedy, and leaves the
files on disk unchanged; `test_fall_back.py` has more damage. One job makes a good checkpoint; a
second job runs all cases.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from megatron_flashckpt.file_format.seal import seal
from tests.support.load_cases import Damage, LoadCases, shard, snapshot
from tests.support.megatron_jobs import run_cases, run_job, succeeded

MODEL = ["--num-layers", "2", "--bf16", "--use-distributed-optimizer", "--train-iters", "2"]
ITERATION = "iter_0000002"


def newer_version_in(manifest: Path) -> None:
    content = json.loads(manifest.read_text())
    del content["digest"]
    content["version"] = 99
    manifest.write_bytes(seal(json.dumps(content).encode()))


def foreign_files(directory: Path) -> None:
    (directory / "notes.txt").write_text("mine")
    (directory / ITERATION / "rank_00007.bak").write_text("mine too")
    (directory / "iter_9").mkdir()


def dlrovers(directory: Path) -> None:
    shutil.rmtree(directory / ITERATION)
    for name in ("mp_rank_00/model_optim_rng.pt", "rank_00000/distrib_optim.pt"):
        file = directory / ITERATION / name
        file.parent.mkdir(parents=True)
        file.write_text("DLRover's")


def dlrovers_without_files(directory: Path) -> None:
    shutil.rmtree(directory / ITERATION)
    (directory / "dlrover_latest.txt").write_text("2")


#: name -> (damage, error class or None, patterns of the message)
CASES: dict[str, tuple[Damage, str | None, list[str]]] = {
    "foreign_files": (foreign_files, None, []),
    "cut_short": (
        lambda directory: os.truncate(shard(directory / ITERATION, 1), 5000),
        "CorruptCheckpointError",
        [r"rank_00001\.safetensors", r"bytes long, the manifest says", "--ckpt-step"],
    ),
    "missing_iteration": (
        lambda directory: shutil.rmtree(directory / ITERATION),
        "NotCommittedError",
        [r"iter_0000002: holds no end of a save", "--ckpt-step"],
    ),
    "dlrovers": (
        dlrovers,
        "UnsupportedError",
        [r"iter_0000002: is in DLRover's format", r"flashckpt convert \S+ DST --to flashckpt"],
    ),
    "dlrovers_without_files": (
        dlrovers_without_files,
        "UnsupportedError",
        [r"iter_0000002: DLRover committed this iteration without any file", r"available: none"],
    ),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> LoadCases:
    where = tmp_path_factory.mktemp("bad_input")
    good = where / "good"
    save = [*MODEL, "--save", str(good), "--save-interval", "2"]
    succeeded(run_job(where, "save", save, ranks=LoadCases.RANKS))
    job = LoadCases(where, good)
    for name, (damage, _, _) in CASES.items():
        job.add(name, damage)
    (where / "file").write_text("a file where the save directory should be")
    overlapped = str(where / "new/overlapped")
    for name, call, args, more in (
        ("no_such_directory", "load", {"load": str(where / "nowhere")}, {}),
        ("of_another_client", "load", {"load": "msc://profile/job", "enable_msc": True}, {}),
        ("save_into_a_file", "save", {"save": str(where / "file")}, {}),
        ("load_right_after_a_save", "save", {"save": overlapped}, {"then_load": str(good)}),
        ("what_was_saved_then", "load", {"load": overlapped, "finetune": True}, {}),
    ):
        job.cases.append({"name": name, "call": call, "args": args, "iteration": 5, **more})
    job.run(MODEL)
    return job


@pytest.mark.parametrize("name", CASES)
def test_load_gives_one_clear_error_and_changes_nothing_on_disk(ran: LoadCases, name: str) -> None:
    _, error, says = CASES[name]
    for event in ran.of(name):
        if error is None:
            assert event["error"] is None
            assert event["result"] == 2
        else:
            assert event["error"] is not None, "the load succeeded without an error"
            # A rank without an error of its own repeats the error of the affected rank.
            assert event["error"][0] in (error, "FlashCkptError")
            assert error in (event["error"][0], *event["error"][1].split(": "))
            for pattern in says:
                assert re.search(pattern, event["error"][1]), event["error"][1]
            assert not event["weights_changed"]
    ran.assert_unchanged(name)


def test_a_missing_directory_starts_from_random_as_stock_does(ran: LoadCases) -> None:
    for event in ran.of("no_such_directory"):
        assert (event["result"], event["error"]) == (0, None)
    assert "will not load any checkpoints and will start from random" in ran.result.log


def test_a_path_of_a_client_that_is_not_installed_starts_nothing_from_scratch(
    ran: LoadCases,
) -> None:
    """Megatron itself takes it for a missing directory."""
    for event in ran.of("of_another_client"):
        name, message = event["error"]
        assert name == "ConfigError"
        assert "msc://profile/job: no file of the Multi-Storage Client has profiles" in message


def test_a_save_into_a_file_fails_on_every_rank_with_a_remedy(ran: LoadCases) -> None:
    for event in ran.of("save_into_a_file"):
        _, message = event["error"]
        assert str(ran.where / "file") in message
        assert "move it away" in message
    assert (ran.where / "file").read_text().startswith("a file where")


def test_a_load_does_not_overwrite_data_that_a_save_still_copies(ran: LoadCases) -> None:
    """The save also makes the missing directory."""
    saves, loads = ran.of("load_right_after_a_save"), ran.of("what_was_saved_then")
    for save, load in zip(saves, loads, strict=True):
        assert (save["result"], save["error"], load["error"]) == ([None], None, None)
        before, after = save["weights"]
        assert before != after, "the load has changed the weights"
        assert load["weights"] == [after, before]


def test_a_strict_load_lists_differences_and_another_load_skips_them(
    ran: LoadCases,
) -> None:
    load = {"call": "load", "args": {"load": str(ran.good)}}
    cases = [
        {**load, "name": "strict"},
        {**load, "name": "not strict", "strict": False},
        {
            **load,
            "name": "as Megatron's own flag says",
            "args": {**load["args"], "dist_ckpt_strictness": "log_all"},
        },
    ]
    before = snapshot(ran.good)
    model = [*MODEL, "--untie-embeddings-and-output-weights", "--disable-bias-linear"]
    result = run_cases(ran.where, "strict", model, cases, ranks=ran.RANKS)
    for event in result.named("strict"):
        kind, message = event["error"]
        assert kind == "MissingStateError"
        assert not event["weights_changed"]
        for state_kind in ("weight", "master", "exp_avg", "exp_avg_sq"):
            assert f"{state_kind}/output_layer.weight: not in the checkpoint; " in message
            fc2 = f"{state_kind}/decoder.layers.mlp.linear_fc2.bias"
            assert f"{fc2}: in the checkpoint, not in the model" in message
    for name in ("not strict", "as Megatron's own flag says"):
        events = result.named(name)
        assert [(event["result"], event["error"]) for event in events] == [(2, None)] * ran.RANKS
    assert all(event["weights_changed"] for event in result.named("not strict"))
    warnings = re.findall(
        r"missing state keeps its values: (.*); unexpected state is not read: (.*)", result.log
    )
    assert len(warnings) == 2, "once per load, on rank 0"
    for missing, unexpected in warnings:
        assert "weight/output_layer.weight" in missing
        assert "weight/decoder.layers.mlp.linear_fc2.bias" in unexpected
    assert snapshot(ran.good) == before


def test_an_unknown_setting_stops_the_job_before_training(tmp_path: Path) -> None:
    job = [*MODEL, "--save", str(tmp_path / "s"), "--load", str(tmp_path / "s")]
    result = run_job(tmp_path, "unknown", job, ranks=1, env={"FLASHCKPT_SLOTTS": "3"})
    assert result.returncode != 0
    assert (
        "unknown setting FLASHCKPT_SLOTTS (did you mean FLASHCKPT_SLOTS?); correct or remove it"
        in result.log
    )
