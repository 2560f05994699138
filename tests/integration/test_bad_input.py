"""User mistakes, through Megatron's real `load_checkpoint` and `save_checkpoint`.

Each case raises one clear error on every rank, which names file, fact and remedy, and leaves the
files on disk unchanged; `test_fall_back.py` has more damage. One job makes a good checkpoint; a
second job runs all cases.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from megatron_flashckpt.agent.place import place_of
from megatron_flashckpt.file_format.seal import seal
from tests.agent.test_places import NOBODY, another_user, as_root
from tests.support.megatron_jobs import Result, committed, run_cases, run_job, succeeded

MODEL = ["--num-layers", "2", "--bf16", "--use-distributed-optimizer"]
RANKS = 2
ITERATION = "iter_0000002"


def shard(directory: Path, rank: int) -> Path:
    (file,) = (directory / ITERATION).glob(f"*.rank_{rank:05d}.safetensors")
    return file


def cut_short(directory: Path) -> None:
    file = shard(directory, 1)
    with open(file, "r+b") as opened:
        opened.truncate(file.stat().st_size - 1)


def newer_version_in(manifest: Path) -> None:
    content = json.loads(manifest.read_text())
    del content["digest"]
    content["version"] = 99
    manifest.write_bytes(seal(json.dumps(content).encode()))


def missing_iteration(directory: Path) -> None:
    shutil.rmtree(directory / ITERATION)


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


#: name -> (damage, extra arguments, error class or None, pattern of the message)
CASES: dict[str, tuple[Callable[[Path], None] | None, dict, str | None, list[str]]] = {
    "intact": (None, {}, None, []),
    "foreign_files": (foreign_files, {}, None, []),
    "cut_short": (
        cut_short,
        {},
        "CorruptCheckpointError",
        [r"rank_00001\.safetensors", r"bytes long, the manifest says", "--ckpt-step"],
    ),
    "missing_iteration": (
        missing_iteration,
        {},
        "NotCommittedError",
        [r"iter_0000002: holds no end of a save", "--ckpt-step"],
    ),
    "dlrovers": (
        dlrovers,
        {},
        "UnsupportedError",
        [r"iter_0000002: is in DLRover's format", r"flashckpt convert \S+ DST --to flashckpt"],
    ),
    "dlrovers_without_files": (
        dlrovers_without_files,
        {},
        "UnsupportedError",
        [r"iter_0000002: DLRover committed this iteration without any file", r"available: none"],
    ),
}


def snapshot(directory: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(file.relative_to(directory)): (file.stat().st_mtime_ns, file.read_bytes())
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


class CasesJob:
    """The job that runs all cases, and the directories before and after."""

    def __init__(self, tmp_path: Path) -> None:
        intact = tmp_path / "good"
        succeeded(
            run_job(
                tmp_path,
                "save",
                [*MODEL, "--train-iters", "2", "--save", str(intact), "--save-interval", "2"],
                ranks=RANKS,
            )
        )
        cases = []
        self.directories = {}
        for name, (damage, args, _, _) in CASES.items():
            directory = tmp_path / name
            shutil.copytree(intact, directory)
            if damage is not None:
                damage(directory)
            self.directories[name] = directory
            cases.append({"name": name, "call": "load", "args": {"load": str(directory), **args}})
        (tmp_path / "file").write_text("a file where the save directory should be")
        for name, load in (
            ("no_such_directory", {"load": str(tmp_path / "nowhere")}),
            ("of_another_client", {"load": "msc://profile/job", "enable_msc": True}),
        ):
            cases.append({"name": name, "call": "load", "args": load})
        for name, place, more in (
            ("save_into_a_file", "file", {}),
            ("no_memory_on_one_rank", "nomem", {"no_memory_on": 1}),
            ("no_doorbell_on_one_rank", "nobell", {"no_doorbell_on": 1}),
            ("load_right_after_a_save", "overlapped", {"then_load": str(intact)}),
            ("save_makes_the_directory", "new/deep", {}),
        ):
            args = {"save": str(tmp_path / place)}
            cases.append({"name": name, "call": "save", "iteration": 5, "args": args, **more})
        saved = {"load": str(tmp_path / "overlapped"), "finetune": True}
        cases.append({"name": "what_was_saved_then", "call": "load", "args": saved})
        self.tmp_path = tmp_path
        self.before = {name: snapshot(path) for name, path in self.directories.items()}
        self.result = self.run("cases", MODEL, cases)
        self.after = {name: snapshot(path) for name, path in self.directories.items()}
        self.good = intact

    def run(self, name: str, model: list[str], cases: list[dict]) -> Result:
        return run_cases(self.tmp_path, name, [*model, "--train-iters", "2"], cases, ranks=RANKS)

    def of(self, name: str) -> list[dict]:
        events = self.result.named(name)
        assert [event["rank"] for event in events] == list(range(RANKS))
        return events


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> CasesJob:
    return CasesJob(tmp_path_factory.mktemp("bad_input"))


@pytest.mark.parametrize("name", CASES)
def test_load_gives_one_clear_error_and_changes_nothing_on_disk(ran: CasesJob, name: str) -> None:
    _, _, error, says = CASES[name]
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
    assert ran.after[name] == ran.before[name]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2]])
def test_a_refused_load_overwrites_nothing(ran: CasesJob, name: str) -> None:
    assert [event["weights_changed"] for event in ran.of(name)] == [False] * RANKS


def test_a_missing_directory_starts_from_random_as_stock_does(ran: CasesJob) -> None:
    for event in ran.of("no_such_directory"):
        assert (event["result"], event["error"]) == (0, None)
    assert "will not load any checkpoints and will start from random" in ran.result.log


def test_a_path_of_a_client_that_is_not_installed_starts_nothing_from_scratch(
    ran: CasesJob,
) -> None:
    """Megatron itself takes it for a missing directory."""
    for event in ran.of("of_another_client"):
        name, message = event["error"]
        assert name == "ConfigError"
        assert "msc://profile/job: no file of the Multi-Storage Client has profiles" in message


def test_a_save_into_a_file_fails_on_every_rank_with_a_remedy(ran: CasesJob) -> None:
    for event in ran.of("save_into_a_file"):
        _, message = event["error"]
        assert str(ran.tmp_path / "file") in message
        assert "move it away" in message
    assert (ran.tmp_path / "file").read_text().startswith("a file where")


def test_a_rank_without_memory_fails_the_save_on_all_ranks_at_once(ran: CasesJob) -> None:
    for event in ran.of("no_memory_on_one_rank"):
        (message,) = event["result"]
        assert "cannot reserve 9 GiB of host memory" in message
    assert list((ran.tmp_path / "nomem/iter_0000005").glob("*.safetensors")) == []
    assert committed(ran.tmp_path / "nomem") == []


def test_a_load_does_not_overwrite_data_that_a_save_still_copies(ran: CasesJob) -> None:
    saves, loads = ran.of("load_right_after_a_save"), ran.of("what_was_saved_then")
    for save, load in zip(saves, loads, strict=True):
        assert (save["result"], save["error"], load["error"]) == ([None], None, None)
        before, after = save["weights"]
        assert before != after, "the load has changed the weights"
        assert load["weights"] == [after, before]


def test_an_unexpected_copy_thread_error_fails_the_save_on_all_ranks(ran: CasesJob) -> None:
    for event in ran.of("no_doorbell_on_one_rank"):
        (message,) = event["result"]
        assert "ValueError: an unexpected error" in message
    assert committed(ran.tmp_path / "nobell") == []


def test_a_save_creates_a_missing_directory(ran: CasesJob) -> None:
    for event in ran.of("save_makes_the_directory"):
        assert event["result"] == [None]
    assert committed(ran.tmp_path / "new/deep") == [5]


def test_a_load_into_another_model_names_differing_keys_and_both_shapes(
    ran: CasesJob,
) -> None:
    load = {"name": "other", "call": "load", "args": {"load": str(ran.good)}}
    before = snapshot(ran.good)
    wider = [*MODEL, "--ffn-hidden-size", "192"]
    result = ran.run("other", wider, [load])
    assert len(result.named("other")) == RANKS
    for event in result.named("other"):
        kind, message = event["error"]
        assert kind == "MissingStateError"
        key = "decoder.layers.mlp.linear_fc1.weight"
        match = re.search(
            rf"weight/{key}: (\(.*?\)) BF16 in the checkpoint, (\(.*?\)) BF16", message
        )
        assert match, message
        assert match[1] != match[2]
        for kind in ("weight", "master", "exp_avg", "exp_avg_sq"):
            assert f"{kind}/{key}: " in message
        assert not event["weights_changed"]
    assert snapshot(ran.good) == before


def test_a_strict_load_lists_differences_and_another_load_skips_them(
    ran: CasesJob,
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
    result = ran.run("strict", model, cases)
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
        assert [(event["result"], event["error"]) for event in events] == [(2, None)] * RANKS
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
    result = run_job(
        tmp_path,
        "unknown",
        [
            *MODEL,
            "--train-iters",
            "1",
            "--save",
            str(tmp_path / "s"),
            "--load",
            str(tmp_path / "s"),
        ],
        ranks=1,
        env={"FLASHCKPT_SLOTTS": "3"},
    )
    assert result.returncode != 0
    assert (
        "unknown setting FLASHCKPT_SLOTTS (did you mean FLASHCKPT_SLOTS?); correct or remove it"
        in result.log
    )


@as_root
@pytest.mark.parametrize("load", [True, False])
def test_a_place_unusable_for_agents_stops_the_job_before_training(
    tmp_path: Path, load: bool
) -> None:
    save, run = tmp_path / "s", tmp_path / "run"
    save.mkdir()
    job = ["--train-iters", "1", "--save", str(save), "--save-interval", "1"]
    job += ["--load", str(save)] if load else []
    run.mkdir(mode=0o755 if load else 0o700)
    reason = "other users can reach it" if load else f"user {NOBODY} has taken this name"
    with nullcontext() if load else another_user(place_of(str(save), str(run)), listens=True):
        env = {"FLASHCKPT_RUNTIME_DIR": str(run)}
        result = run_job(tmp_path, "nowhere", [*MODEL, *job], ranks=1, env=env)
    assert result.returncode != 0
    assert reason in result.log
    assert result.losses() == {}
    assert not list(tmp_path.glob("s/iter_*"))
