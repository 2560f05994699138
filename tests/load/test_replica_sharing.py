"""Shared reads of replicas on real gloo ranks: the same bytes, and one read per chunk.

Cases on GPUs run on `tests.simulated_gpu`, one simulated node per rank; the bytes still travel over
gloo, as in a job whose process group has no NCCL.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.layout.piece import Piece
from tests.support.checkpoints import expected, make
from tests.support.forked.job import run_forked

REPO = Path(__file__).resolve().parents[2]
RANKS = 3
#: The first two pieces share a shard, and a chunk of it.
PIECES = [
    [
        Piece("a", "master", "F32", (10_000_000,), (0,), (10_000_000,), 0, 10_000_000),
        Piece("b", "weight", "BF16", (3, 5_000_001), (0, 0), (3, 5_000_001), 0, 15_000_003),
    ],
    [Piece("c", "weight", "U8", (20_000_001,), (0,), (20_000_001,), 0, 20_000_001)],
]
FLAT = [piece for held in PIECES for piece in held]
CASES = [
    {"name": "always", "mode": "always"},
    {"name": "never", "mode": "never"},
    {"name": "tight", "mode": "always", "memory_mib": 1},
    {"name": "partly", "mode": "always", "wanted": [[0, 1], [1, 2], [2]]},
    {"name": "idle", "mode": "always", "wanted": [[0, 1, 2], [], [0]]},
    {
        "name": "slow disk",
        "mode": "auto",
        "slow_read_s": 0.5,
        "first_send_s": 9.0,
        "memory_mib": 48,
    },
    {"name": "slow network", "mode": "auto", "slow_send_s": 3.0, "memory_mib": 48},
    {"name": "many", "mode": "auto", "slow_send_s": 0.5, "memory_mib": 48, "many": RANKS},
    {"name": "unequal", "mode": "always", "memory_mib": [1, 96, 24]},
    {"name": "on GPUs", "mode": "always", "gpu": True},
    {"name": "slow GPU in reads", "mode": "auto", "gpu_read_s": 0.5, "memory_mib": 48},
    {
        "name": "slow GPU in sends",
        "mode": "auto",
        "slow_read_s": 0.1,
        "gpu_send_s": 3.0,
        "memory_mib": 48,
    },
]


#: Cases whose checkpoint has a damaged chunk.
DAMAGED = [{"name": f"damaged, {mode}", "mode": mode} for mode in ("always", "auto")]


def run_cases(tmp_path: Path, cases: list[dict[str, Any]]) -> dict[str, list[dict]]:
    """Run the cases; return the traced events of each rank by case."""
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPO),
        "TRACE_DIR": str(tmp_path),
        "CASES": str(tmp_path / "cases.json"),
    }
    log = tmp_path / "log"
    status = run_forked(
        [str(REPO / "tests/support/jobs/replica_reads.py")],
        *([environment], RANKS),
        cwd=tmp_path,
        log=log,
        max_restarts=0,
        timeout_s=240,
    )
    assert status == 0, log.read_text()[-4000:]
    events: dict[str, list[dict]] = {case["name"]: [] for case in cases}
    for rank in range(RANKS):
        for line in (tmp_path / f"rank_{rank}.jsonl").read_text().splitlines():
            event = json.loads(line)
            events[event["event"]].append(event)
    return events


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    where = tmp_path_factory.mktemp("replicas")
    made, damaged = (make(where / name, ranks=PIECES) for name in ("save", "damaged"))
    with open(damaged.shard(0), "r+b") as file:
        file.seek(-1000, 2)
        file.write(b"\0flip\0")
    pairs = [(case, made) for case in CASES] + [(case, damaged) for case in DAMAGED]
    return run_cases(where, [{**case, "root": str(save.root)} for case, save in pairs])


@pytest.fixture(scope="module")
def digests() -> list[str]:
    return [hashlib.sha256(tensor.numpy().data).hexdigest() for tensor in expected(FLAT)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_every_replica_receives_every_wanted_byte(
    traced: dict[str, list[dict]], digests: list[str], case: dict[str, Any]
) -> None:
    wanted = case.get("wanted", [range(len(FLAT))] * RANKS)
    for rank, event in enumerate(traced[case["name"]]):
        assert event["digests"] == [digests[n] for n in wanted[rank]]


def test_chunks_that_only_one_replica_needs_are_not_sent(traced: dict[str, list[dict]]) -> None:
    """Rank 0 needs the first shard, rank 1 its second half; ranks 1 and 2 need the other shard."""
    of_rank = traced["partly"]
    whole = sum(piece.nbytes for piece in FLAT)
    of_rank_0_alone = FLAT[0].nbytes // CHUNK_NBYTES * CHUNK_NBYTES
    assert sum(event["read_nbytes"] for event in of_rank) == whole
    assert of_rank[0]["read_nbytes"] >= of_rank_0_alone
    assert sum(event["received_nbytes"] for event in of_rank) == whole - of_rank_0_alone


def test_memory_is_bounded_by_the_setting(traced: dict[str, list[dict]]) -> None:
    reader = CHUNK_NBYTES
    for event in traced["always"]:
        assert event["memory_nbytes"] <= reader + 96 * 2**20
    for event in traced["tight"]:
        # The minimum is one chunk and the smallest possible rounds.
        assert event["memory_nbytes"] <= reader + CHUNK_NBYTES + 2 * RANKS * 2**20


@pytest.mark.parametrize("case", DAMAGED, ids=lambda case: case["name"])
def test_a_damaged_chunk_raises_on_every_replica(
    traced: dict[str, list[dict]], case: dict[str, Any]
) -> None:
    last = (FLAT[0].nbytes + FLAT[1].nbytes) // CHUNK_NBYTES
    errors = [event["error"] for event in traced[case["name"]]]
    assert all(f"chunk {last} (bytes " in error and "digest " in error for error in errors)
    assert sum(error.startswith("CorruptCheckpointError: ") for error in errors) >= 1


@pytest.mark.parametrize(
    ("name", "is_shared"),
    [
        ("slow disk", True),
        ("slow network", False),
        # Without sharing, each replica opens all files; the first round does not measure that cost.
        ("many", True),
        # Time on a GPU counts for the read or send that caused it.
        ("slow GPU in reads", True),
        ("slow GPU in sends", False),
    ],
)
def test_auto_shares_if_reads_are_slow_and_stops_if_sends_are_slow(
    traced: dict[str, list[dict]], name: str, is_shared: bool
) -> None:
    assert [event["shared"] for event in traced[name]] == [is_shared] * RANKS


def test_replicas_that_share_read_each_chunk_once(traced: dict[str, list[dict]]) -> None:
    whole = sum(piece.nbytes for piece in FLAT)
    for name in ("always", "tight", "idle", "unequal", "on GPUs", "slow disk"):
        assert sum(event["read_nbytes"] for event in traced[name]) == whole, name
    assert sum(event["read_nbytes"] for event in traced["slow network"]) > whole
    for event in traced["never"]:
        assert (event["read_nbytes"], event["received_nbytes"]) == (whole, 0)
