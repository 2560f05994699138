"""Names that a newer Megatron may change, and unsupported state, are refused before the first step.

The tests guard against a silent loss: if a renamed method were looked up with `hasattr`, no
checkpoint would contain the shards of chained optimizers any more.
"""

from __future__ import annotations

import platform
import re

import pytest

from megatron_flashckpt.layout.completeness import Tally, tally
from megatron_flashckpt.layout.piece import Piece
from tests.support.megatron_jobs import REPO, Result, run_job, succeeded

RANKS = 2

#: case of tests/support/jobs/self_checks.py -> pattern of the refusal; None: the case is accepted
CASES: dict[str, list[str] | None] = {
    "as it is": None,
    "chained_optimizers": ["ChainedOptimizer has no 'chained_optimizers'"],
    "range map": ["DistributedOptimizer has no '_get_model_param_range_map' or 'get_model_"],
    "get_rerun_state_machine": ["checkpointing has no 'get_rerun_state_machine', though there is"],
    "maybe_save_dataloader_state": [
        "checkpointing has no 'maybe_save_dataloader_state', though there is 'ft_integration'"
    ],
    "expert ranks": ["parallel_state has no 'get_expert_model_parallel_rank'"],
    "train_data_iterator": ["save_checkpoint .* has no parameter 'train_data_iterator'"],
    "no_load_rng": ["args have no 'no_load_rng'"],
    "master left out": [
        "FusedAdam steps tensors that DistributedOptimizer does not list: a tensor of shape",
        r"DistributedOptimizer has no master or state for its part of: decoder\.",
    ],
    "master doubled": [r"DistributedOptimizer lists several times: decoder\."],
    "no buffer": [r"in no optimizer .*: decoder\.layers\.0\.mlp\.linear_fc2\.weight\n"],
    "trainable, unknown": ["in no optimizer of this rank, though it wants gradients: extra\n"],
    "not in the state dict": ["1 parameters are in no sharded state dict of the model.*: extra;"],
    "state dict fails": [
        r"GPTModel\.sharded_state_dict\(\) fails, .*: AssertionError: dict_keys\(.{290} \.\.\.\n"
    ],
    "frozen, unknown": None,
    "frozen": None,
    "left to another rank": [
        r"weight/decoder\.layers\.mlp\.linear_fc1\.weight: all ranks .* save \d+ of 32768 elements"
    ],
    "odd state": [r"FusedAdam keeps 'row_factor' \(of shape \(2,\)\), 'scale' \(of type float\)"],
    "flags": ["--use-megatron-fsdp: the optimizer keeps its state in a layout"],
    "ModelOpt": [
        r"ModelOpt has converted the model \(for quantization, pruning or distillation\)\n"
    ],
}
REMEDY = "Install a release of megatron_flashckpt that knows this Megatron-LM, or start with"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Result:
    where = tmp_path_factory.mktemp("self_check")
    job = ["--num-layers", "2", "--bf16", "--use-distributed-optimizer", "--train-iters", "2"]
    job += ["--save", str(where / "save"), "--save-interval", "2"]
    script = REPO / "tests/support/jobs/self_checks.py"
    return succeeded(run_job(where, "cases", job, ranks=RANKS, entry_point="stock", script=script))


def errors(ran: Result, name: str) -> list[list[str] | None]:
    events = ran.named(name)
    assert [event["rank"] for event in events] == list(range(RANKS))
    return [event["error"] for event in events]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_names_a_difference_and_accepts_everything_else(ran: Result, name: str) -> None:
    expected = CASES[name]
    for error in errors(ran, name):
        if expected is None:
            assert error is None
            continue
        assert error is not None, "the self-check accepted the case"
        assert error[0] == "UnsupportedError"
        assert REMEDY in error[1]
        for pattern in expected:
            assert re.search(pattern, error[1]), error[1]


def test_a_newer_megatrons_arguments_are_refused_except_at_their_defaults(
    ran: Result,
) -> None:
    assert errors(ran, "own group") == [None] * RANKS
    for error in errors(ran, "unknown arguments"):
        assert error is not None
        assert error[0] == "UnsupportedError"
        assert "called with pipeline_rank=3, expert_rank=0, dp_cp_group='grid', which" in error[1]


def test_a_save_without_a_load_or_step_before_checks_its_own_rank(ran: Result) -> None:
    for error in errors(ran, "save without a start"):
        assert error is not None
        assert "ChainedOptimizer has no 'chained_optimizers'" in error[1]


def test_unknown_state_is_refused_right_after_the_step_that_creates_it(
    ran: Result,
) -> None:
    """The refusal comes even if the process has trained and saved to the same directory before."""
    assert errors(ran, "earlier job") == [None] * RANKS
    assert len(ran.named("stepped")) == RANKS
    for error in errors(ran, "first step"):
        assert error is not None
        assert "FusedAdam keeps 'row_factor' (of shape (2,))" in error[1]


def test_rank_0_logs_schedule_sizes_and_self_check_at_the_start(ran: Result) -> None:
    lines = [line for line in ran.log.splitlines() if line.startswith("  flashckpt: ")]
    accepted = [name for name, expected in CASES.items() if expected is None]
    # The three lines: a start after a save, first steps of two jobs.
    assert errors(ran, "start after a save") == [None] * RANKS
    assert sum("self-check of" in line for line in lines) == len(accepted) + 3
    checked = next(n for n, line in enumerate(lines) if "self-check of" in line)
    start = "\n".join(lines[: checked + 1])
    for pattern in (
        r"called by the training script itself; megatron-core 0\.\d+\.\d+, torch",
        r"saves to /.*/save every 2 iterations; kept: all; redundancy: none",
        r"2 slots of [\d.]+ MiB on rank 0, at most [\d.]+ MiB per rank; [\d.]+ MiB on this node "
        r"\(2 ranks\) of [\d.]+ GiB available",
        r"self-check of \d+ pieces on rank 0 passed in \d+ ms; agent and memory are made ready",
    ):
        assert re.search(pattern, start), start


def test_a_node_without_memory_for_all_slabs_stops_the_job_at_start(
    ran: Result,
) -> None:
    """Each slab alone would fit into memory."""
    for error in errors(ran, "memory for one"):
        assert error is not None
        assert error[0] == "StorageError"
        need = f"{platform.node()}: 2 ranks (0 to 1) need 20.0 MiB; the machine has 15.0 MiB left"
        assert need in error[1]


def test_the_tally_of_all_ranks_shows_missing_elements() -> None:
    def piece(kind: str, offset: int, start: int, end: int) -> Piece:
        return Piece("w", kind, "F32", (4, 6), (offset, 0), (2, 6), start, end)

    first, rest = [piece("weight", 0, 0, 5), piece("weight", 2, 0, 12)], [piece("weight", 0, 5, 12)]
    one, other = tally(first, [("weight", "w", (4, 6))]), tally(rest, [])
    assert one["weight/w"].plus(other["weight/w"]) == Tally(24, 24)
    assert one["weight/w"] == Tally(17, 24)
    assert tally([], [("weight", "w", (4, 6))]) == {"weight/w": Tally(0, 24)}, "wholly missing"
    masters_may_lack = piece("master", 2, 0, 12)
    assert tally([masters_may_lack], []) == {}
