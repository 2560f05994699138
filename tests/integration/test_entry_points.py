"""The entry points, swapped imports (our patch) and the launcher, train exactly as stock Megatron.

One stock job and one job per entry point run with the same seed. Then the weights in our checkpoint
are compared with those that stock's own `save_checkpoint` wrote.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.forked.nursery import CPU_MEGATRON
from tests.support.megatron_jobs import (
    REPO,
    TINY,
    Result,
    assemble,
    patched_megatron,
    run_job,
    succeeded,
    tensors,
)

MODEL = [
    *("--num-layers", "2", "--bf16", "--tensor-model-parallel-size", "2"),
    *("--use-distributed-optimizer", "--untie-embeddings-and-output-weights"),
]


#: Megatron's local layers name their layer norms as TransformerEngine names its fused ones.
FUSED_NAMES = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
RANKS = 2


def arguments(save: Path, *more: str) -> list[str]:
    return [*MODEL, "--train-iters", "4", "--save", str(save), "--save-interval", "2", *more]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("entry_points")


@pytest.fixture(scope="module")
def stock(where: Path) -> Result:
    legacy = ("--ckpt-format", "torch")
    return succeeded(
        run_job(
            where, "stock", arguments(where / "stock", *legacy), ranks=RANKS, entry_point="stock"
        )
    )


@pytest.fixture(scope="module")
def swapped(where: Path) -> Result:
    control = {"CONTROL": "1"}
    return succeeded(
        run_job(
            where, "swap", arguments(where / "swap"), ranks=RANKS, entry_point="swap", env=control
        )
    )


@pytest.fixture(scope="module")
def launched(where: Path) -> Result:
    # torchrun's own defaults, with which its restarts fail; this job needs none.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
    options = {"torchrun": True, "max_restarts": 1, "env": env}
    return succeeded(run_job(where, "launch", arguments(where / "launch"), ranks=RANKS, **options))


def test_both_entry_points_train_exactly_as_stock(
    stock: Result, swapped: Result, launched: Result
) -> None:
    assert sorted(stock.losses()) == [1, 2, 3, 4]
    assert swapped.losses() == stock.losses()
    assert launched.losses() == stock.losses()


def test_the_log_names_the_entry_point_before_the_first_step(
    where: Path, swapped: Result, launched: Result
) -> None:
    for result, entry_point in (
        (launched, "through the launcher"),
        (swapped, f"by the imports of {patched_megatron(where)}/megatron/training/training.py"),
    ):
        start, _, rest = result.log.partition("flashckpt: self-check of ")
        assert f"{entry_point}; megatron-core 0." in start
        assert " iteration        1/" in rest
        assert " iteration        1/" not in start


def test_rank_0_warns_once_that_restarts_by_torchrun_will_fail(
    swapped: Result, launched: Result
) -> None:
    text = "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun starts"
    assert [result.log.count(text) for result in (swapped, launched)] == [0, 1]


def test_agent_and_slab_are_begun_before_the_data_loaders(
    swapped: Result, launched: Result
) -> None:
    """These jobs load nothing."""
    for result in (swapped, launched):
        start, _, rest = result.log.partition("flashckpt: self-check of ")
        assert "[after dataloaders are built]" in rest
        assert "[after dataloaders are built]" not in start


def test_both_entry_points_save_the_same_state(
    where: Path, swapped: Result, launched: Result
) -> None:
    one, other = tensors(where / "swap", 4), tensors(where / "launch", 4)
    assert one.keys() == other.keys()
    state = [name for name in one if not name[1].startswith("rank_state/")]
    assert [name for name in state if not torch.equal(one[name], other[name])] == []


def test_a_save_does_not_communicate_and_the_counter_detects_calls(swapped: Result) -> None:
    saves, controls = swapped.named("save"), swapped.named("control")
    assert len(saves) == len(controls) == RANKS * 2
    assert [save["calls"] for save in saves] == [[]] * RANKS * 2
    for control in controls:
        assert {"all_reduce", "barrier"} <= set(control["calls"])
        assert any("allreduce" in call for call in control["calls"]), "seen by the dispatcher"


def test_weights_equal_those_that_stock_saved(where: Path, stock: Result, launched: Result) -> None:
    ours = assemble(where / "launch", 4)
    seen = set()
    for rank in range(RANKS):
        file = where / f"stock/iter_0000004/mp_rank_{rank:02d}/model_optim_rng.pt"
        for name, stock_weight in torch.load(file, weights_only=False)["model"].items():
            if not isinstance(stock_weight, torch.Tensor):
                continue
            key, layer = re.subn(r"\.layers\.\d+\.", ".layers.", name)
            for local, fused in FUSED_NAMES.items():
                key = key.replace(local, fused)
            whole = ours["weight", key]
            if layer:
                whole = whole[int(re.search(r"\.layers\.(\d+)\.", name)[1])]
            seen.add(("weight", key))
            (axis,) = [
                a for a in range(stock_weight.dim()) if whole.shape[a] != stock_weight.shape[a]
            ] or [None]
            expected = whole if axis is None else whole.chunk(2, axis)[rank]
            assert torch.equal(expected, stock_weight), name
    assert seen == {name for name in ours if name[0] == "weight"}


def test_python_dash_m_runs_a_script_without_torchrun(tmp_path: Path) -> None:
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("FLASHCKPT")},
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{CPU_MEGATRON}{os.pathsep}{REPO}",
        "FLASHCKPT_RUNTIME_DIR": str(tmp_path / "run"),
    }
    save = tmp_path / "save"
    job = [*TINY, "--num-layers", "1", "--train-iters", "2", "--save", str(save)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "megatron_flashckpt.launch"),
            *(str(REPO / "scripts/pretrain_gpt_tiny.py"), *job, "--save-interval", "2"),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "2"


@pytest.mark.parametrize(
    "entry_point",
    [
        [sys.executable, "-m", "megatron_flashckpt.launch"],
        [str(Path(sys.executable).parent / "flashckpt-launch")],
    ],
    ids=["module", "console script"],
)
def test_the_launcher_refuses_a_missing_script(entry_point: list[str]) -> None:
    done = subprocess.run(
        [*entry_point, "no_such_script.py"], capture_output=True, text=True, cwd=REPO, check=False
    )
    assert done.returncode == 1
    assert done.stderr == (
        "flashckpt-launch: no_such_script.py: no such script; give the path of a .py file, or -m "
        "and the name of a module\n"
    )
