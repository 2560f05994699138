"""`megatron_flashckpt.Checkpointer` in training loops without `megatron.training`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.forked.nursery import REPO
from tests.support.rank_processes import run_ranks

BLOCKED = REPO / "tests/support/jobs/without_training.py"
EXAMPLE = REPO / "examples/own_loop.py"


def run(script: Path, where: Path, ranks: int, *arguments: object, **more: str) -> tuple[str, int]:
    """Run `script` where `megatron.training` cannot be imported, as `run_ranks` does."""
    return run_ranks([BLOCKED, script, *arguments], where, ranks, **more)


def losses(output: str) -> list[str]:
    """Return the lines of the example with the exact loss of every iteration."""
    return re.findall(r"^iteration \d+ loss \S+ tokens \d+$", output, re.MULTILINE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The losses of a run on two ranks that nobody kills."""
    where = tmp_path_factory.mktemp("whole")
    output, status = run(EXAMPLE, where, 2, where / "save")
    assert status == 0, output
    assert len(losses(output)) == 12, output
    return losses(output)


def test_the_example_is_killed_twice_and_resumes_bit_for_bit(
    whole: list[str], tmp_path: Path
) -> None:
    """It is killed in the save of iteration 12, and resumes from memory, then on one rank."""
    save = tmp_path / "save"
    killed, status = run(EXAMPLE, tmp_path, 2, save, FLASHCKPT_FAULT="rank0:save.staging:3")
    assert status == -9, killed
    assert losses(killed) == whole[:11]
    killed, status = run(EXAMPLE, tmp_path, 2, save, FLASHCKPT_FAULT="rank0:save.staging:1")
    assert status == -9, killed
    assert "iteration 8 was restored from memory" in killed
    assert losses(killed) == whole[8:11]
    resumed, status = run(EXAMPLE, tmp_path, 1, save)
    assert status == 0, resumed
    assert "iteration 8 was restored from storage" in resumed
    assert losses(resumed) == whole[8:]


def test_several_checkpointers_of_one_process_keep_their_saves_apart(tmp_path: Path) -> None:
    """The process ends with 1, because its last save has failed and it has not called `close`."""
    script = REPO / "tests/support/jobs/several_checkpointers.py"
    output, status = run(script, tmp_path, 1, tmp_path)
    assert status == 1, output
    assert f"{tmp_path}/fourth/iter_0000006" in output
    found = dict(re.findall(r"^found ([^:]+): (.*)$", output, re.MULTILINE))
    first, second = "{'name': 'first', 'step': 2}", "{'name': 'second', 'step': 2}"
    assert found == {
        "a fresh start": "[None, None]",
        "durable": "[[(1, None), (2, None)], [(2, None)]]",
        "polled after a durable save": "[(3, None)]",
        "in storage at once": "['iter_0000001', 'iter_0000002', 'iter_0000003']",
        # The last save was for memory only, so the end of the job writes it.
        "after close": "['iter_0000001', 'iter_0000002', 'iter_0000003', 'iter_0000004']",
        "newest": f"(2, {second}, [1.75])",
        "a named step": f"(2, {first}, [0.75])",
        "weights": "(0, {}, [1.75])",
        "a missing step": "NotCommittedError choose another iteration with step=N",
        "after exit": "['iter_0000005']",
        "in place of an unclosed one": "(7, 'memory', 1)",
    }
