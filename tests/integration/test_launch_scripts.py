"""The launch scripts that users copy: the commands that they start, and a restart after a kill.

The tests run the unedited scripts with smaller sizes from the environment. Without a GPU, the
environment also puts the stand-in on PYTHONPATH, and ARGS disables features that need a GPU.
Doubles of `srun` and `scontrol` (tests/support/slurm_double) replace Slurm: they run the multi-node
script twice on this machine, as two nodes with an agent each.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.training.arguments import parse_args

from tests.support.forked.nursery import CPU_MEGATRON
from tests.support.megatron_jobs import REPO, TINY, end, free_port
from tests.support.trainer import eventually

SCRIPTS = REPO / "scripts"
#: Megatron's flags for a machine without GPU, Transformer Engine or Apex.
ON_CPU = TINY[TINY.index("--num-workers") : TINY.index("--log-interval")]
SCRIPT_NAMES = sorted(path.name for path in SCRIPTS.glob("pretrain_gpt_*.s*"))
ALL_SCRIPTS = [
    path
    for path in sorted(
        [*SCRIPTS.iterdir(), *REPO.glob(".ci/*"), *REPO.glob("tests/support/slurm_double/*")]
    )
    if path.is_file() and b"bash" in path.read_bytes().split(b"\n", 1)[0]
]
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "localhost,localhost",
    "SLURM_SUBMIT_DIR": str(REPO),
}
#: Iteration 4 is saved twice: rank 1 is killed during the first save of it.
SIZES = {
    "NUM_LAYERS": "2",
    "HIDDEN_SIZE": "64",
    "NUM_ATTENTION_HEADS": "4",
    "SEQ_LENGTH": "32",
    "MICRO_BATCH_SIZE": "2",
    "VOCAB_SIZE": "4300",
    "TRAIN_ITERS": "5",
    "SAVE_INTERVAL": "2",
    "LOG_INTERVAL": "1",
    "EVAL_ITERS": "0",
}
#: Variables of a job on CPU ranks.
TINY_JOB = {
    **SIZES,
    "TRAIN_SCRIPT": str(SCRIPTS / "pretrain_gpt_tiny.py"),
    "PYTHONPATH": f"{CPU_MEGATRON}{os.pathsep}{REPO}",
    "CPU_CUDA_STUBS": "triton apex",
    "PYTHONWARNINGS": "ignore",
}


def environment(tmp_path: Path, *first_on_path: Path, **variables: str) -> dict[str, str]:
    """Return an environment as a user has it: torchrun on PATH, no setting of ours."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FLASHCKPT", "SLURM"))
    }
    path = [*map(str, first_on_path), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {
        **kept,
        "PATH": os.pathsep.join(path),
        "TMPDIR": str(tmp_path),
        "CHECKPOINT_PATH": str(tmp_path / "checkpoints"),
        **variables,
    }


def trains(tmp_path: Path, script: str, **variables: str) -> str:
    """Run a script to its end, with CPU ranks; return its output."""
    variables = {
        **TINY_JOB,
        "LOSS_LOG": str(tmp_path / "losses"),
        "FLASHCKPT_RUNTIME_DIR": str(tmp_path / "run"),
        "FLASHCKPT_FAULT": f"rank1:save.granted:2:KILL:{tmp_path / 'killed'}",
        **variables,
    }
    log = tmp_path / "log"
    with open(log, "w") as output:
        job = subprocess.Popen(
            ["bash", str(SCRIPTS / script), *ON_CPU],
            env=environment(tmp_path, REPO / "tests/support/slurm_double", **variables),
            cwd=tmp_path,
            stdout=output,
            stderr=output,
        )
    try:
        returncode = job.wait(240)
    finally:
        end(job)
    printed = log.read_text(errors="replace")
    assert returncode == 0, printed[-6000:]
    assert (tmp_path / "killed").exists(), "no rank was killed"
    return printed


def losses_in(directory: Path) -> dict[str, list[list[str]]]:
    """Return iteration and loss of every micro-batch, by rank."""
    return {
        file.suffix: [line.split() for line in file.read_text().splitlines()]
        for file in sorted(directory.glob("losses.*"))
    }


def assert_repeated(losses: dict[str, list[list[str]]]) -> None:
    """Assert that both ranks have trained iterations 3 and 4 twice, with equal losses."""
    assert sorted(losses) == [".0", ".1"]
    for of_rank in losses.values():
        iterations = [int(iteration) for iteration, _ in of_rank]
        start = iterations.index(3, iterations.index(4))
        before = [loss for loss in of_rank[:start] if int(loss[0]) in (3, 4)]
        again = [loss for loss in of_rank[start:] if int(loss[0]) in (3, 4)]
        assert before == again != []
        assert iterations[-1] == 5


def assert_restarted_from_memory(tmp_path: Path, printed: str) -> None:
    assert "iteration 2 was restored from memory" in printed
    assert_repeated(losses_in(tmp_path))
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "5"
    run = tmp_path / "run"
    eventually(
        "the end of the agents", lambda: not [path for path in run.rglob("*") if not path.is_dir()]
    )


def test_a_killed_rank_on_one_node_restarts_from_memory(tmp_path: Path) -> None:
    printed = trains(
        tmp_path,
        "pretrain_gpt_single_node.sh",
        GPUS_PER_NODE="2",
        TENSOR_PARALLEL="2",
        PRECISION="bf16",
    )
    assert_restarted_from_memory(tmp_path, printed)


def test_a_killed_rank_on_two_nodes_restarts_from_memory(
    tmp_path: Path,
) -> None:
    printed = trains(
        tmp_path,
        "pretrain_gpt_slurm.sbatch",
        **SLURM,
        GPUS_PER_NODE="1",
        TENSOR_PARALLEL="1",
        MASTER_PORT=str(free_port()),
    )
    assert_restarted_from_memory(tmp_path, printed)


@pytest.fixture
def recording(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which torchrun only prints its arguments, one per line."""
    torchrun = tmp_path / "bin/torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron/pretrain_gpt.py").touch()
    return environment(
        tmp_path,
        torchrun.parent,
        REPO / "tests/support/slurm_double",
        MEGATRON_LM=str(tmp_path / "megatron"),
        MASTER_ADDR="node-0",
        **SLURM,
        FLASHCKPT_RUNTIME_DIR=str(tmp_path),
    )


def ran(script: str, variables: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(SCRIPTS / script), *arguments], env=variables, capture_output=True, text=True
    )


def test_the_script_defaults_to_the_experiment_of_dlrovers_blog(
    recording: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ran("pretrain_gpt_multi_node.sh", recording).stdout.splitlines()
    start = lines.index("-m")
    torchrun, (_, launcher, script, *arguments) = lines[:start], lines[start:]
    assert torchrun[:4] == ["--nnodes", "2", "--nproc-per-node", "8"]
    assert launcher == "megatron_flashckpt.launch"
    assert script == f"{recording['MEGATRON_LM']}/pretrain_gpt.py"
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    args = parse_args()
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (8, 1)
    assert (args.num_layers, args.hidden_size, args.num_attention_heads) == (48, 1600, 16)
    assert (args.seq_length, args.micro_batch_size, args.global_batch_size) == (1024, 4, 8)
    assert (args.save_interval, args.use_distributed_optimizer) == (50, True)
    assert args.save == args.load == recording["CHECKPOINT_PATH"]


@pytest.mark.parametrize("script", [name for name in SCRIPT_NAMES if "arguments" not in name])
def test_arguments_of_the_caller_come_last_and_variables_change_sizes(
    recording: dict[str, str], script: str
) -> None:
    done = ran(script, {**recording, "NUM_LAYERS": "7"}, "--lr", "1e-3", "--seed", "5 6")
    lines = done.stdout.splitlines()
    assert lines[-4:] == ["--lr", "1e-3", "--seed", "5 6"], done.stderr
    assert lines[lines.index("--num-layers") + 1] == "7"


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("script", [name for name in SCRIPT_NAMES if "arguments" not in name])
def test_a_script_prints_its_usage_without_any_variable(
    tmp_path: Path, script: str, option: str
) -> None:
    path = SCRIPTS / script
    done = subprocess.run(
        ["bash", str(path), option],
        env={"PATH": os.environ["PATH"]},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert 5 <= len(lines) <= 15
    assert any(re.match(rf"  .*{re.escape(script)} \[ARGS\]", line) for line in lines)
    header = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ")]
    assert [line for line in lines if line] == header[: len([line for line in lines if line])]
    assert "CHECKPOINT_PATH" in done.stdout
    assert "SBATCH" not in done.stdout


@pytest.mark.parametrize("missing", ["MEGATRON_LM", "CHECKPOINT_PATH", "MASTER_ADDR"])
def test_a_script_names_a_missing_variable(recording: dict[str, str], missing: str) -> None:
    done = ran("pretrain_gpt_multi_node.sh", {**recording, missing: ""})
    assert done.returncode != 0
    assert re.search(rf"{missing}: set {missing} to ", done.stderr)
    assert done.stdout == ""


def test_a_checkout_that_is_not_there_is_named_before_torchrun_starts(
    recording: dict[str, str],
) -> None:
    done = ran("pretrain_gpt_single_node.sh", {**recording, "MEGATRON_LM": "/elsewhere"})
    assert (done.returncode, done.stdout) == (1, "")
    assert "/elsewhere/pretrain_gpt.py: no such file" in done.stderr
    assert "set MEGATRON_LM" in done.stderr


def test_the_slurm_script_says_that_it_needs_sbatch(recording: dict[str, str]) -> None:
    outside = {name: value for name, value in recording.items() if not name.startswith("SLURM")}
    done = ran("pretrain_gpt_slurm.sbatch", outside)
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert "submit this file with sbatch" in done.stderr


def test_real_data_selects_the_tokenizer_of_gpt2(recording: dict[str, str]) -> None:
    files = {"DATA_PATH": "/data/text", "VOCAB_FILE": "/v.json", "MERGE_FILE": "/m.txt"}
    lines = ran("pretrain_gpt_single_node.sh", {**recording, **files}).stdout.splitlines()
    assert "--mock-data" not in lines
    for flag, value in zip(
        ("--data-path", "--vocab-file", "--merge-file"), files.values(), strict=True
    ):
        assert lines[lines.index(flag) + 1] == value


@pytest.mark.parametrize("script", ALL_SCRIPTS, ids=lambda path: path.name)
def test_bash_and_shellcheck_find_nothing_wrong(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if not (shellcheck := shutil.which("shellcheck", path=search_path)):
        pytest.skip("bash reports no error, and shellcheck is not installed")
    done = subprocess.run(
        [shellcheck, "-x", str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
