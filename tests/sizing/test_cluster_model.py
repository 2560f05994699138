"""Cluster model: plausible limits, and the examples of Young and Daly."""

from __future__ import annotations

import json
import math
import re

import msgspec
import pytest

from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.cli.console import human_size, human_time
from megatron_flashckpt.cli.plan import sizes_of
from megatron_flashckpt.config import Redundancy
from megatron_flashckpt.errors import ConfigError
from megatron_flashckpt.sizing import cluster_model
from megatron_flashckpt.sizing.cluster_model import (
    Cluster,
    PerParameter,
    Sizes,
    daly,
    host_memory,
    plan,
    young,
)
from megatron_flashckpt.sizing.gpt_size import RankPart

MODEL = (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
    "--group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --padded-vocab-size 128256 "
    "--untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4"
).split()


def sizes() -> Sizes:
    return sizes_of(MODEL, 1024, None)


def test_llama_3_70b_has_as_many_parameters_as_its_model_card_says() -> None:
    result = sizes()
    assert result.parameters == 70_553_706_496
    norms = (2 * 80 + 1) * 8192
    assert result.total_nbytes == 14 * (result.parameters + 7 * norms), "8 copies of norms"
    assert result.rank_nbytes >= result.total_nbytes / 1024
    assert result.rank_nbytes <= result.largest_nbytes < 1.001 * result.rank_nbytes
    alone = sizes_of(MODEL[: MODEL.index("--tensor-model-parallel-size")], 1, None)
    assert alone.rank_nbytes == alone.total_nbytes == alone.group_nbytes


def test_the_stage_with_the_most_experts_may_store_most() -> None:
    """Eight ranks share a dense parameter of either stage, and no ranks share an expert."""
    stages = [RankPart(1000, 0, 500, 1), RankPart(200, 0, 1000, 1)]
    result = cluster_model.sizes(stages, world=16, tp=1, ep=8, etp=1, stored=PerParameter(14, 14))
    assert result.rank_nbytes == 14 * (200 / 8 + 1000)
    assert result.group_nbytes == 14 * 1500


def test_only_a_gathering_save_stores_derived_weights() -> None:
    stored, derived = sizes(), sizes_of(MODEL, 1024, None, "derive")
    assert derived.total_nbytes * 14 == stored.total_nbytes * 12
    assert derived.gathered_nbytes == stored.gathered_nbytes == 14 * derived.parameters
    assert derived.largest_nbytes < stored.largest_nbytes
    assert plan(derived, Cluster()).gather == plan(stored, Cluster()).gather
    assert plan(derived, Cluster()).persist_s == pytest.approx(
        plan(stored, Cluster()).persist_s * 12 / 14
    )


def test_the_intervals_agree_with_young_and_daly() -> None:
    """In Daly's paper, both intervals agree for short saves, and the MTBF limits the interval."""
    assert young(10.0, 72_000.0) == pytest.approx(1200.0)
    assert daly(1e-6, 1e6) == pytest.approx(young(1e-6, 1e6), rel=1e-3)
    assert daly(2e4, 1e4) == 1e4
    # Daly's interval minimizes the complete model of the run time, which is flat near its minimum.
    cost, mtbf = 300.0, 6 * 3600.0

    def wall(interval: float) -> float:
        return mtbf * math.expm1((interval + cost) / mtbf) / interval

    best = min(range(60, 20_000, 10), key=wall)
    assert daly(cost, mtbf) == pytest.approx(best, rel=0.01)


def test_saves_are_never_more_frequent_than_storage_allows() -> None:
    slow = plan(sizes(), Cluster(storage_gb_s=1.0))
    assert slow.persist_s == pytest.approx(sizes().total_nbytes / 1e9)
    assert slow.ours.interval_s >= slow.ours.durable_s > slow.persist_s
    assert slow.memory_interval_iterations < slow.ours.interval_iterations
    assert slow.lost_s_per_day_with_memory < slow.ours.lost_s_per_day


@pytest.mark.parametrize("pcie_gb_s", [20.0, 0.1, 0.01])
def test_the_time_to_durable_is_copy_plus_write_plus_commit(pcie_gb_s: float) -> None:
    """A copy blocks for what the forward and backward pass does not hide; torch's for all of it."""
    cluster = Cluster(pcie_gb_s=pcie_gb_s, iteration_s=2.0)
    result = plan(sizes(), cluster)
    expected = result.stage_s + result.persist_s + 1024 * cluster.commit_s_per_rank
    assert result.ours.durable_s == result.torch_dist_async.durable_s == pytest.approx(expected)
    late_s = max(0.0, result.stage_s - 0.9 * cluster.iteration_s)
    assert (late_s > 0) == (pcie_gb_s < 1)
    assert result.ours.blocked_s == pytest.approx(cluster.blocked_s + late_s)
    blocked_s = cluster.async_blocked_s + result.stage_s
    assert result.torch_dist_async.blocked_s == pytest.approx(blocked_s)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(("redundancy", "times"), [("none", 1), ("copy", 2), ("xor", 1 + 1 / 4)])
def test_host_memory_includes_copies_for_other_nodes(
    slots: int, redundancy: Redundancy, times: float
) -> None:
    other_nbytes = 8 * 64e6
    alone = plan(sizes(), Cluster()).node_nbytes
    expected = pytest.approx(slots * times * alone + other_nbytes)
    held = host_memory(sizes(), Cluster(), slots, redundancy, 5)
    assert held.nbytes == expected
    chosen = Cluster(slots=slots, host_memory_gb=held.nbytes / 1e9 - 0.001)
    result = plan(sizes(), chosen, redundancy=redundancy, group=5)
    assert (result.host_memory_nbytes, result.fits) == (expected, False)


def test_the_command_prints_host_memory_over_gpus(capsys: pytest.CaptureFixture) -> None:
    words = ["plan", "--gpus", "16", "--parameters", "8e9", "--host-memory-gb", "100"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    begin = lines.index(
        "host memory per node, by slots and redundancy; !: more than the node's 100 GB"
    )
    rows = {line.split()[0]: re.split(r" {2,}", line.strip()) for line in lines[begin + 2 :]}
    assert list(rows) == ["4", "8", "16", "32", "64"]
    assert [cell.endswith("!") for cell in rows["16"][1:]] == [False] * 4 + [True] * 2
    assert [rows["8"][n] for n in (2, 3, 5, 6)] == ["-"] * 4, (
        "one node has no other node for copies"
    )
    assert main([*words, "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)["host_memory"]
    assert len(choices) == 2 * 2 + 3 * 6
    by_choice = {(row["gpus"], row["slots"], row["redundancy"]): row for row in choices}
    one, parity = by_choice[32, 1, "none"]["nbytes"], by_choice[32, 1, "xor"]["nbytes"]
    assert parity - 8 * 64e6 == pytest.approx((one - 8 * 64e6) * 8 / 7)
    assert all(row["fits"] == (row["nbytes"] <= 100e9) for row in choices)


@pytest.mark.parametrize("output", [[], ["--json"]], ids=["table", "json"])
def test_too_little_host_memory_is_status_1_after_the_figures(
    capsys: pytest.CaptureFixture, output: list[str]
) -> None:
    words = ["plan", "--gpus", "16", "--parameters", "8e9", "--host-memory-gb"]
    assert main([*words, "50", *output]) == 1
    printed = capsys.readouterr()
    assert "8.000 billion" in printed.out or '"parameters": 8000000000' in printed.out
    assert re.fullmatch(
        r"flashckpt: 2 slots of a node's ranks need .* GiB of host memory, more than "
        r"--host-memory-gb 50: .*\n",
        printed.err,
    )
    copies = [*words, "100", "--redundancy", "copy"]
    assert main(copies) == 1
    message = capsys.readouterr().err
    assert "2 slots of a node's ranks, with 'redundancy: copy', need" in message
    assert "(--slots 1, --redundancy xor, --weights derive)" in message
    assert main([*copies, "--slots", "1"]) == 0
    assert capsys.readouterr().err == ""
    assert main([*words, "100", "--redundancy-group", "1"]) == 2


def test_bytes_per_day_follow_from_the_recommended_interval() -> None:
    result = plan(sizes(), Cluster())
    for way, nbytes in (
        (result.ours, sizes().total_nbytes),
        (result.torch_dist_async, sizes().gathered_nbytes),
        (result.gather, sizes().gathered_nbytes),
    ):
        assert way.nbytes_per_day == pytest.approx(nbytes * 86400 / way.interval_s)
    # Storage limits the frequency of saves, so it is busy nearly all the time.
    slow = Cluster(storage_gb_s=1.0)
    assert 0.9 * 86400e9 < plan(sizes(), slow).ours.nbytes_per_day <= 86400e9


@pytest.mark.parametrize(
    ("field", "value", "range_"),
    [
        ("slots", -1, "give a number from 1e-09 to"),
        ("pcie_gb_s", 0, "give a number from 1e-09 to"),
        ("pcie_gb_s", float("nan"), "give a number from 1e-09 to"),
        ("iteration_s", float("inf"), r"give a number from 1e-09 to 1e\+12"),
        ("iteration_s", 1e-320, "give a number from 1e-09 to"),
        ("restart_s", -1, "give 0 or a number from"),
        ("memory_share", -1, "give 0 or a number from"),
        ("memory_share", 1.5, "from 0 to 1"),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_range(
    field: str, value: float, range_: str
) -> None:
    option = f"--{field.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"{option}: out of range; .*{range_}"):
        Cluster(**{field: value})


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "--gpus", "1024", "--", *MODEL]) == 0
    table = capsys.readouterr().out
    assert "70.554 billion" in table
    assert re.search(r"^flashckpt +.*^stock async +.*^gather +", table, re.MULTILINE | re.DOTALL)
    result = plan(sizes(), Cluster())
    per_day = human_size(int(result.ours.nbytes_per_day))
    (line,) = (line for line in table.splitlines() if line.startswith("--save-interval"))
    assert f" {result.ours.interval_iterations}: every {human_time(result.ours.interval_s)}" in line
    assert f" per hour, {per_day} per day" in line
    assert "'retention'" in line
    assert main(["plan", "--gpus", "1024", "--json", "--", *MODEL]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["plan"] == msgspec.to_builtins(plan(sizes(), Cluster()))
    assert printed["cluster"]["gpus_per_node"] == 8


def test_numbers_of_ranks_and_parameters_that_no_job_has_are_refused(
    capsys: pytest.CaptureFixture,
) -> None:
    assert main(["plan", "--gpus", "100", "--", *MODEL]) == 2
    assert "replicas of 32 ranks" in capsys.readouterr().err
    for number in ("0", "-1", "nan", "inf", "1e400", "many"):
        with pytest.raises(SystemExit) as ended:
            main(["plan", "--gpus", "8", f"--parameters={number}"])
        assert ended.value.code == 2
        assert f"'{number}' is not a number of parameters" in capsys.readouterr().err


def test_the_command_plans_for_fewer_than_four_gpus(capsys: pytest.CaptureFixture) -> None:
    for gpus in ("1", "2", "3"):
        assert main(["plan", "--gpus", gpus, "--slots", "1", "--parameters", "1e9"]) == 0
        table = capsys.readouterr().out
        assert re.search(rf"^{gpus} +[\d.]+ GiB ", table, re.MULTILINE)
        assert re.search(r"^per node .*, 1 node$", table, re.MULTILINE)
        assert "(1 slot, redundancy: none)" in table


def test_the_command_knows_the_setting_weights(capsys: pytest.CaptureFixture) -> None:
    words = ["plan", "--gpus", "8", "--parameters", "8e9", "--json", "--weights", "derive", "--"]
    assert main([*words, "--bf16", "--use-distributed-optimizer"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["sizes"]["total_nbytes"] == 12 * 8e9
    assert main([*words, "--bf16"]) == 2
    assert "needs --use-distributed-optimizer" in capsys.readouterr().err
