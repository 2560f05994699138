"""`FlashCheckpointManager` under the real `pretrain` of Megatron-Bridge 0.6.2."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.bridge import HOME
from tests.support.forked.nursery import REPO
from tests.support.rank_processes import run_ranks

if not HOME.is_dir():
    pytest.skip(
        "megatron-bridge 0.6.2 is not installed: run tools/environment.py, or set MEGATRON_BRIDGE",
        allow_module_level=True,
    )

SCRIPT = REPO / "tests/support/jobs/bridge_gpt.py"
#: Bridge imports transformers, which other jobs do without.
NEEDS = {"CPU_CUDA_HIDDEN": ""}
#: Storage every 4 iterations, and host memory at the other even ones.
EVERY_2 = "checkpoint.non_persistent_save_interval=2"
REFUSED = {
    "checkpoint.save=None": "checkpoint.save is not set",
    "peft=1": "peft",
    "dist.use_megatron_fsdp=True": "dist.use_megatron_fsdp",
    "ddp.use_megatron_fsdp=True": "ddp.use_megatron_fsdp",
    "dist.use_torch_fsdp2=True": "dist.use_torch_fsdp2",
    "dist.use_decentralized_pg=True": "dist.use_decentralized_pg",
    "model.restore_modelopt_state=True": "ModelOpt",
    "model.moe_mlp_glu_interleave_size=32": "moe_mlp_glu_interleave_size",
    "model.moe_shared_expert_glu_interleave_size=32": "moe_shared_expert_glu_interleave_size",
    "optimizer.offload_optimizer_states=True": "offload_optimizer_states",
    "checkpoint.save_optim=False": "save_optim",
    "checkpoint.save_rng=False": "save_rng",
    "checkpoint.load_optim=False": "load_optim",
    "checkpoint.load_rng=False": "load_rng",
    "checkpoint.also_save_hf_checkpoint=True": "also_save_hf_checkpoint",
    "checkpoint.most_recent_k=0": "most_recent_k",
}


def train(where: Path, *changes: str, ranks: int = 2, **more: str) -> tuple[str, int]:
    """Run the job; return what rank 0 prints, and its exit status."""
    return run_ranks([SCRIPT, where / "save", *changes], where, ranks, HOME, **NEEDS, **more)


def steps(output: str) -> list[str]:
    """Return the exact loss and weights of every step, and Bridge's `TrainState` before it."""
    return re.findall(r"^(?:before|after) .*$", output, re.MULTILINE)


def test_a_killed_job_resumes_bit_for_bit_from_memory_and_from_storage(tmp_path: Path) -> None:
    """It is killed before its first commit, and again in the save of the last iteration.

    Each resumed job repeats steps that the job before it has made.
    """
    first, status = train(tmp_path, EVERY_2, FLASHCKPT_FAULT="rank0:save.staging:2")
    assert status == -9, first
    assert len(steps(first)) == 2 * 4, first
    assert not (tmp_path / "save/latest_checkpointed_iteration.txt").exists()

    second, status = train(tmp_path, EVERY_2, FLASHCKPT_FAULT="rank0:save.staging:5")
    assert status == -9, second
    assert "iteration 2 was restored from memory" in second
    assert len(steps(second)) == 2 * 10
    assert steps(second)[: 2 * 2] == steps(first)[2 * 2 :]

    wanted = {"FLASHCKPT_RESTORE_FROM_MEMORY": "false", "FLASHCKPT_WAIT": "durable"}
    third, status = train(tmp_path, EVERY_2, **wanted)
    assert status == 0, third
    assert "iteration 8 was restored from storage" in third
    assert steps(third) == steps(second)[2 * 6 :]
    assert third.count("on_checkpoint_save") == 1


def test_unsupported_settings_of_bridge_are_refused_by_name(tmp_path: Path) -> None:
    output, status = run_ranks([SCRIPT, "refusals", *REFUSED], tmp_path, 1, HOME, **NEEDS)
    assert status == 0, output
    lines = dict(re.findall(r"^refused (\S+): (.*)$", output, re.MULTILINE))
    assert list(lines) == list(REFUSED), output
    assert [line for setting, line in lines.items() if REFUSED[setting] not in line] == []


def test_a_refused_job_takes_no_step(tmp_path: Path) -> None:
    """Bridge does not call `load` here, because there is nothing to load from."""
    refused = ("checkpoint.load=None", "checkpoint.most_recent_k=2")
    output, status = train(tmp_path, *refused, ranks=1)
    assert status == 1, output
    assert "checkpoint.most_recent_k: use the setting 'retention'" in output
    assert steps(output) == []
