"""`--use-checkpoint-args`: one rank per node reads, before torch.distributed is initialised."""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.errors import CorruptCheckpointError, NotCommittedError, StorageError
from megatron_flashckpt.load import node_leader
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.megatron_jobs import (
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


def test_one_rank_of_a_node_reads_again_after_a_torchrun_restart(
    tmp_path: Path, saved: Path
) -> None:
    flags = ["--bf16", "--train-iters", "4", "--load", str(saved), "--use-checkpoint-args"]
    options = {"max_restarts": 1, "torchrun": True}
    env = {"EARLY_READS": "1", "KILL": "1:4"}
    result = succeeded(run_job(tmp_path, "load", flags, ranks=2, env=env, **options))
    reads = result.named("early read")
    lives = {(read["rank"], read["pid"]) for read in reads}
    assert Counter(rank for rank, _ in lives) == {0: 2}
    assert sum(read["name"].endswith(".common.msgpack") for read in reads) == 2
    assert sum(loss["iteration"] == 4 for loss in result.named("loss")) >= 4


def test_nodes_that_see_different_checkpoints_need_equal_arguments(
    tmp_path: Path, saved: Path
) -> None:
    """A rank whose arguments differ from rank 0's does not start; the load fails on all ranks."""
    save = tmp_path / "save"
    shutil.copytree(saved, save)
    flags = ["--bf16", "--train-iters", "4", "--exit-interval", "3", "--num-layers", "2"]
    places = ["--load", str(save), "--save", str(save), "--save-interval", "1"]
    succeeded(run_job(tmp_path, "other", [*flags, *places, "--attention-dropout", "0.25"], ranks=1))
    await_no_agent(tmp_path)
    flags = ["--bf16", "--train-iters", "4", "--load", str(save), "--use-checkpoint-args"]
    result = run_job(tmp_path, "load", flags, ranks=2, env={"STALE": "1:1"})
    own = "were taken from iteration 1 (save "
    refused = result.log.count(f"FlashCkptError: --use-checkpoint-args: arguments {own}")
    assert result.returncode != 0
    assert result.named("loss") == []
    assert "in --load, on rank 0 from iteration 3 (save " in result.log
    assert refused >= 2  # rank 1 raises the error, and rank 0 repeats it as rank 1's


def sent(
    _: str,
    read: Callable[[], Any],
    encode: Callable[[Any], bytes],
    decode: Callable[[bytes], Any],
) -> Any:
    """Return the state as a rank receives it from the rank that has read it."""
    return decode(encode(read()))


def spoil_common(save: Path, iteration: int) -> None:
    (common,) = (save / f"iter_{iteration:07d}").glob("*.common.msgpack")
    common.write_bytes(common.read_bytes()[:-1] + b"?")


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
    damaged = tmp_path / "save"
    shutil.copytree(saved, damaged)
    spoil_common(damaged, 2)
    assert common_state(str(damaged), None)["iteration"] == 1, "the newest one that is intact"
    with pytest.raises(CorruptCheckpointError, match=r"iter_0000002/\S+\.common\.msgpack.*digest"):
        common_state(str(damaged), 2)


def test_all_ranks_refuse_a_checkpoint_with_the_same_error(
    saved: Path, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = truncated_copy(saved, tmp_path / "save", 1)
    spoil_common(save, 1)
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
