"""DLRover's files of real Megatron state hold what stock's legacy files of the same save hold."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megatron_flashckpt.convert.formats import open_source
from megatron_flashckpt.convert.options import Options
from megatron_flashckpt.errors import CorruptCheckpointError, UnsupportedError
from tests.convert.tensors import assert_equal, wholes
from tests.megatron.jobs import DECOUPLED, MUP, REPO, run_job, same, succeeded

LAYOUTS = {
    "tp2dp2-buckets": (
        *("--bf16", "--tensor-model-parallel-size", "2", "--swiglu", "--num-layers", "2"),
        *("--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "20000"),
        *(*DECOUPLED, *MUP),
    ),
    "pp2dp2-tied": ("--bf16", "--pipeline-model-parallel-size", "2", "--num-layers", "2"),
}
NOTE = "did not save the optimizer's step count; the iteration, 2, is taken for it"


@pytest.fixture(scope="module", params=LAYOUTS, ids=list(LAYOUTS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the same save twice: `stock` and `dlrover`."""
    tmp_path = tmp_path_factory.mktemp(request.param)
    job = [
        *(*LAYOUTS[request.param], "--use-distributed-optimizer", "--ckpt-format", "torch"),
        *("--train-iters", "2", "--save", str(tmp_path / "stock"), "--save-interval", "2"),
    ]
    env = {"DLROVER_DIR": str(tmp_path / "dlrover")}
    script = REPO / "tests/jobs/dlrover_gpt.py"
    succeeded(run_job(tmp_path, "double", job, door="stock", env=env, script=script))
    return tmp_path


def test_every_tensor_is_the_one_in_stocks_files(saved: Path) -> None:
    theirs = open_source(saved / "dlrover", None, Options())
    stocks = open_source(saved / "stock", None, Options())
    assert (theirs.format, stocks.format) == ("dlrover", "torch")
    tensors = wholes(theirs.contents)
    assert {kind for kind, _ in tensors} == {"weight", "master", "exp_avg", "exp_avg_sq"}
    assert_equal(tensors, wholes(stocks.contents))
    assert theirs.contents.common.keys() == stocks.contents.common.keys()
    assert same(theirs.contents.optimizer, stocks.contents.optimizer)
    assert theirs.contents.warnings == ()


def test_without_param_groups_those_of_the_args_are_taken_and_the_step_is_said_to_be_a_guess(
    saved: Path, tmp_path: Path
) -> None:
    """As DLRover wrote at first: no `optimizer` in the model files."""
    older = tmp_path / "older"
    shutil.copytree(saved / "dlrover", older)
    for file in older.rglob("model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        del state["optimizer"]
        torch.save(state, file)
    if getattr(open_source(saved / "stock", None, Options()).contents.args, "use_mup", False):
        with pytest.raises(UnsupportedError, match="did not save the optimizer's param groups"):
            open_source(older, None, Options())
        return
    guessed = open_source(older, None, Options()).contents
    (found,), (expected,) = (
        it.optimizer for it in (guessed, open_source(saved / "dlrover", None, Options()).contents)
    )
    assert [group["step"] for group in expected["param_groups"]] == [2, 2]
    assert found["step"] == 2
    # What the scheduler, which is saved, sets when it is loaded.
    scheduled = ("step", "lr", "weight_decay")
    kept = [
        [{key: value for key, value in group.items() if key not in scheduled} for group in groups]
        for groups in (found["param_groups"], expected["param_groups"])
    ]
    assert kept[0] == kept[1]
    assert [NOTE in warning for warning in guessed.warnings] == [True]


def test_ranks_without_optimizer_tensors_are_named_in_one_error(
    saved: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(saved / "dlrover", broken)
    torch.save({}, broken / "iter_0000002/rank_00001/distrib_optim.pt")
    (broken / "iter_0000002/rank_00002/distrib_optim.pt").unlink()
    torch.save([None], broken / "iter_0000002/rank_00003/distrib_optim.pt")
    with pytest.raises(CorruptCheckpointError) as caught:
        open_source(broken, None, Options())
    assert "3 of 4 ranks have no optimizer tensors" in str(caught.value)
    assert "rank_00001" in str(caught.value)
    assert "rank_00002" in str(caught.value)
    assert "rank_00003" in str(caught.value)
    assert "not in this checkpoint" in str(caught.value)
    assert "--weights-only" in str(caught.value)
    weights = open_source(broken, None, Options(weights_only=True)).contents
    assert {tensor.kind for tensor in weights.tensors} == {"weight"}


def test_a_directory_without_any_optimizer_state_is_refused(saved: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(saved / "dlrover", broken, ignore=shutil.ignore_patterns("rank_*"))
    with pytest.raises(CorruptCheckpointError, match="DLRover keeps it in rank_"):
        open_source(broken, None, Options())


def test_shards_of_two_ranks_that_were_swapped_are_noticed(saved: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(saved / "dlrover", broken)
    one, other = (broken / f"iter_0000002/rank_{rank:05d}" for rank in (0, 3))
    one.rename(broken / "aside")
    other.rename(one)
    (broken / "aside").rename(other)
    with pytest.raises(CorruptCheckpointError, match=r"shards of other sizes|are not what"):
        open_source(broken, None, Options())
