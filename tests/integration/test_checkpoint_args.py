"""`--use-checkpoint-args`: one rank per node reads, before torch.distributed is initialised."""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt import arguments
from megatron_flashckpt.errors import CorruptCheckpointError, NotCommittedError, StorageError
from megatron_flashckpt.file_format.file_names import TRACKER
from megatron_flashckpt.load import node_leader
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.megatron_jobs import (
    Result,
    await_no_agent,
    common_state,
    run_job,
    succeeded,
    truncated_copy,
)

LAYERS = 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the save directory of a job that saved iterations 1 and 2."""
    where = tmp_path_factory.mktemp("saved")
    flags = ["--num-layers", str(LAYERS), "--bf16", "--train-iters", "4", "--exit-interval", "2"]
    save = ["--save", str(where / "save"), "--save-interval", "1"]
    succeeded(run_job(where, "save", [*flags, *save], ranks=1))
    await_no_agent(where)
    return where / "save"


def resume(where: Path, saved: Path, **options: Any) -> Result:
    """Run a job of four ranks that takes the number of layers from the checkpoint alone."""
    flags = ["--bf16", "--train-iters", "4", "--load", str(saved), "--use-checkpoint-args"]
    env = {"EARLY_READS": "1", **options.pop("env", {})}
    return succeeded(run_job(where, "load", flags, ranks=4, env=env, **options))


def early_reads(result: Result) -> Counter[int]:
    """Return how often each rank has opened a manifest, common state or tracker."""
    return Counter(read["rank"] for read in result.named("early read"))


def losses(result: Result, iteration: int) -> int:
    return sum(loss["iteration"] == iteration for loss in result.named("loss"))


def test_one_rank_of_each_node_reads_again_after_a_torchrun_restart(
    tmp_path: Path, saved: Path
) -> None:
    result = resume(tmp_path, saved, nodes=2, max_restarts=1, env={"KILL": "3:4"}, torchrun=True)
    reads = result.named("early read")
    lives = {(read["rank"], read["pid"]) for read in reads}
    assert Counter(rank for rank, _ in lives) == {0: 2, 2: 2}
    assert sum(read["name"].endswith(".common.msgpack") for read in reads) == 4
    assert losses(result, 4) >= 4


def test_without_torchrun_each_rank_reads(tmp_path: Path, saved: Path) -> None:
    result = resume(tmp_path, saved)
    reads = early_reads(result)
    assert set(reads) == {0, 1, 2, 3}
    assert len(set(reads.values())) == 1
    assert losses(result, 4) == 4


@pytest.mark.parametrize("is_other", [False, True], ids=["equal", "different"])
def test_nodes_that_see_different_checkpoints_need_equal_arguments(
    tmp_path: Path, saved: Path, is_other: bool
) -> None:
    """A rank whose arguments differ from rank 0's does not start; the load fails on all ranks."""
    save = tmp_path / "save"
    shutil.copytree(saved, save)
    if is_other:
        flags = ["--bf16", "--train-iters", "4", "--exit-interval", "3", "--num-layers", "2"]
        places = ["--load", str(save), "--save", str(save), "--save-interval", "1"]
        other = [*flags, *places, "--attention-dropout", "0.25"]
        succeeded(run_job(tmp_path, "other", other, ranks=1))
        await_no_agent(tmp_path)
    flags = ["--bf16", "--train-iters", "4", "--load", str(save), "--use-checkpoint-args"]
    result = run_job(tmp_path, "load", flags, ranks=2, env={"STALE": "1:1"})
    own = "were taken from iteration 1 (save "
    refused = result.log.count(f"FlashCkptError: --use-checkpoint-args: arguments {own}")
    if not is_other:
        assert succeeded(result).named("loss")
        assert refused == 0
        return
    assert result.returncode != 0
    assert result.named("loss") == []
    assert "in --load, on rank 0 from iteration 3 (save " in result.log
    assert refused >= 2  # rank 1 raises the error, and rank 0 repeats it as rank 1's


def test_no_rank_starts_from_scratch_with_a_checkpoints_arguments(
    tmp_path: Path, saved: Path
) -> None:
    """Storage shows rank 1 a checkpoint that it shows neither to rank 0 nor to the load."""
    save = tmp_path / "save"
    shutil.copytree(saved, save)
    (save / TRACKER).unlink()
    layers = ["--num-layers", str(LAYERS)]
    flags = ["--bf16", "--train-iters", "4", "--load", str(save), "--use-checkpoint-args", *layers]
    result = run_job(tmp_path, "load", flags, ranks=2, env={"STALE": "1:1"})
    assert result.returncode != 0
    assert result.named("loss") == []
    # Rank 1 raises the error, and rank 0 repeats it as rank 1's.
    assert result.log.count("in --load, on rank 0 from no checkpoint") >= 2


def sent(
    _: str,
    read: Callable[[], Any],
    encode: Callable[[Any], bytes],
    decode: Callable[[bytes], Any],
) -> Any:
    """Return the state as a rank receives it from the rank that has read it."""
    return decode(encode(read()))


@pytest.fixture(params=["reads", "receives"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "receives":
        monkeypatch.setattr(node_leader, "read_once", sent)
    return str(request.param)


@pytest.mark.usefixtures("way")
def test_all_ranks_get_the_same_state(saved: Path, tmp_path: Path) -> None:
    state = common_state(str(saved), None)
    assert state is not None
    assert (state["iteration"], state["args"].num_layers) == (2, LAYERS)
    earlier = common_state(str(saved), 1)
    assert earlier is not None
    assert earlier["iteration"] == 1
    (tmp_path / "empty").mkdir()
    assert common_state(str(tmp_path / "empty"), None) is None


def test_all_ranks_refuse_a_checkpoint_with_the_same_error(
    saved: Path, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = truncated_copy(saved, tmp_path / "save", 1)
    (common,) = (save / "iter_0000001").glob("*.common.msgpack")
    common.write_bytes(common.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptCheckpointError, match=r"iter_0000001/\S+\.common\.msgpack.*digest"):
        common_state(str(save), None)
    with pytest.raises(NotCommittedError, match="iteration 7 was not committed"):
        common_state(str(save), 7)

    monkeypatch.setenv("RANK", "8")

    def refuse(self: PosixStore, name: str, *_: Any) -> bytes:
        raise StorageError(errno.EACCES, f"{self.place}/{name}: permission denied")

    monkeypatch.setattr(PosixStore, "get", refuse)
    with pytest.raises(StorageError, match="permission denied") as refused:
        common_state(str(save), 1)
    assert refused.value.errno == errno.EACCES
    assert str(refused.value).count("Errno") == 1
    assert ("rank 8: StorageError: " in str(refused.value)) == (way == "receives")


def test_an_unexpected_error_is_not_sent_to_other_ranks(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks then read the checkpoint themselves, as `load.node_leader` lets them."""
    monkeypatch.setattr(arguments, "_read", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        common_state(str(saved), None)
