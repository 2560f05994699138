"""The launch scripts that users copy: the commands that they start, and a restart after a kill.

The tests run the unedited scripts with smaller sizes from the environment. Without a GPU, the
environment also puts the stand-in on PYTHONPATH, and ARGS disables features that need a GPU.
Doubles of `srun` and `scontrol` (tests/support/slurm_double) replace Slurm; `tools/slurm` runs the
scripts under real Slurm.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked.nursery import CPU_MEGATRON
from tests.support.megatron_jobs import REPO, TINY
from tests.support.processes import end
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


def test_a_killed_rank_on_one_node_restarts_from_memory(tmp_path: Path) -> None:
    """Both ranks have trained iterations 3 and 4 twice, with equal losses."""
    variables = {
        **TINY_JOB,
        "LOSS_LOG": str(tmp_path / "losses"),
        "FLASHCKPT_RUNTIME_DIR": str(tmp_path / "run"),
        "FLASHCKPT_FAULT": f"rank1:save.granted:2:KILL:{tmp_path / 'killed'}",
        "GPUS_PER_NODE": "2",
        "TENSOR_PARALLEL": "2",
        "PRECISION": "bf16",
    }
    log = tmp_path / "log"
    with open(log, "w") as output:
        job = subprocess.Popen(
            ["bash", str(SCRIPTS / "pretrain_gpt_single_node.sh"), *ON_CPU],
            env=environment(tmp_path, **variables),
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
    assert "iteration 2 was restored from memory" in printed
    for rank in (0, 1):
        losses = [line.split() for line in (tmp_path / f"losses.{rank}").read_text().splitlines()]
        iterations = [int(iteration) for iteration, _ in losses]
        start = iterations.index(3, iterations.index(4))
        before = [loss for loss in losses[:start] if int(loss[0]) in (3, 4)]
        again = [loss for loss in losses[start:] if int(loss[0]) in (3, 4)]
        assert before == again != []
        assert iterations[-1] == 5
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "5"
    run = tmp_path / "run"
    eventually("the end of the agent", lambda: not [p for p in run.rglob("*") if not p.is_dir()])


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


@pytest.mark.parametrize("script", [name for name in SCRIPT_NAMES if "arguments" not in name])
def test_arguments_of_the_caller_come_last_and_variables_change_sizes(
    recording: dict[str, str], script: str
) -> None:
    done = ran(script, {**recording, "NUM_LAYERS": "7"}, "--lr", "1e-3", "--seed", "5 6")
    lines = done.stdout.splitlines()
    assert lines[-4:] == ["--lr", "1e-3", "--seed", "5 6"], done.stderr
    assert lines[lines.index("--num-layers") + 1] == "7"
    usage = ran(script, {"PATH": os.environ["PATH"]}, "--help")
    assert (usage.returncode, usage.stderr) == (0, "")
    assert re.search(rf"^  .*{re.escape(script)} \[ARGS\]", usage.stdout, re.MULTILINE)
    assert "CHECKPOINT_PATH" in usage.stdout
    assert "SBATCH" not in usage.stdout


@pytest.mark.parametrize(
    ("script", "missing", "message"),
    [
        ("multi_node.sh", {"MEGATRON_LM": ""}, "MEGATRON_LM: set MEGATRON_LM to "),
        ("multi_node.sh", {"CHECKPOINT_PATH": ""}, "CHECKPOINT_PATH: set CHECKPOINT_PATH to "),
        ("multi_node.sh", {"MASTER_ADDR": ""}, "MASTER_ADDR: set MASTER_ADDR to "),
        ("single_node.sh", {"MEGATRON_LM": "/no"}, "/no/pretrain_gpt.py: no such file"),
        ("slurm.sbatch", dict.fromkeys(SLURM, ""), "submit this file with sbatch"),
    ],
)
def test_a_script_names_what_is_missing(
    recording: dict[str, str], script: str, missing: dict[str, str], message: str
) -> None:
    done = ran(f"pretrain_gpt_{script}", {**recording, **missing})
    assert done.returncode != 0
    assert message in done.stderr
    assert done.stdout == ""


def test_real_data_selects_the_tokenizer_of_gpt2(recording: dict[str, str]) -> None:
    files = {"DATA_PATH": "/data/text", "VOCAB_FILE": "/v.json", "MERGE_FILE": "/m.txt"}
    lines = ran("pretrain_gpt_single_node.sh", {**recording, **files}).stdout.splitlines()
    assert "--mock-data" not in lines
    flags = ("--data-path", "--vocab-file", "--merge-file")
    assert [lines[lines.index(flag) + 1] for flag in flags] == [*files.values()]


def test_shellcheck_finds_nothing_wrong() -> None:
    search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if not (shellcheck := shutil.which("shellcheck", path=search_path)):
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, "-x", *ALL_SCRIPTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
