"""The entry points, swapped imports (our patch) and the launcher, train exactly as stock Megatron.

One stock job and one job per entry point run with the same seed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.megatron_jobs import (
    Result,
    patched_megatron,
    run_job,
    succeeded,
    tensors,
)

MODEL = [
    *("--num-layers", "2", "--bf16", "--tensor-model-parallel-size", "2"),
    *("--use-distributed-optimizer", "--untie-embeddings-and-output-weights"),
]
RANKS = 2


def arguments(save: Path) -> list[str]:
    return [*MODEL, "--train-iters", "4", "--save", str(save), "--save-interval", "2"]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("entry_points")


@pytest.fixture(scope="module")
def stock(where: Path) -> Result:
    job = [*MODEL, "--train-iters", "4"]
    return succeeded(run_job(where, "stock", job, ranks=RANKS, entry_point="stock"))


@pytest.fixture(scope="module")
def swapped(where: Path) -> Result:
    options = {"entry_point": "swap", "env": {"CONTROL": "1"}}
    return succeeded(run_job(where, "swap", arguments(where / "swap"), ranks=RANKS, **options))


@pytest.fixture(scope="module")
def launched(where: Path) -> Result:
    return succeeded(run_job(where, "launch", arguments(where / "launch"), ranks=RANKS))


def test_both_entry_points_train_exactly_as_stock(
    where: Path, stock: Result, swapped: Result, launched: Result
) -> None:
    assert sorted(stock.losses()) == [1, 2, 3, 4]
    assert swapped.losses() == stock.losses()
    assert launched.losses() == stock.losses()
    one, other = tensors(where / "swap", 4), tensors(where / "launch", 4)
    assert one.keys() == other.keys()
    state = [name for name in one if not name[1].startswith("rank_state/")]
    assert [name for name in state if not torch.equal(one[name], other[name])] == []


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
        # Agent and slab are begun before the data loaders, although these jobs load nothing.
        assert "[after dataloaders are built]" in rest
        assert "[after dataloaders are built]" not in start


def test_a_save_does_not_communicate_and_the_counter_detects_calls(swapped: Result) -> None:
    saves, controls = swapped.named("save"), swapped.named("control")
    assert len(saves) == len(controls) == RANKS * 2
    assert [save["calls"] for save in saves] == [[]] * RANKS * 2
    for control in controls:
        assert {"all_reduce", "barrier"} <= set(control["calls"])
        assert any("allreduce" in call for call in control["calls"]), "seen by the dispatcher"


def test_the_console_script_refuses_a_missing_script() -> None:
    launcher = Path(sys.executable).parent / "flashckpt-launch"
    done = subprocess.run([launcher, "no_such_script.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "flashckpt-launch: no_such_script.py: no such script; give the path of a .py file, or -m "
        "and the name of a module\n"
    )
