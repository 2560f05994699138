"""Memory of a node, which all its ranks share: slabs that fit alone may not fit together."""

from __future__ import annotations

import dataclasses
import errno
import resource
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.memory.host_memory import Limit, ProcessLimit, limits, process_limits
from megatron_flashckpt.save import node_memory
from megatron_flashckpt.save.new_slab import slab_nbytes
from megatron_flashckpt.save.node_memory import (
    Need,
    check,
    ranks_of_same_agent,
    tightest_limit,
)

GIB = 2**30
BEGIN = (
    "the 2 checkpoint slots of each rank do not fit into host memory, so saves would fail or "
    "the kernel would kill processes:\n  "
)
REMEDY = (
    "\nfree memory on these nodes, lower 'slots', use more nodes, or raise the memory limit of the "
    "job's pod or batch job"
)


def need(
    host: str,
    gib: float,
    left_gib: float,
    *groups: tuple[str, float],
    held: float = 0,
    is_there: bool = False,
) -> Need:
    machine = Limit(f"boot of {host}", "the machine", int(left_gib * GIB))
    inner = [Limit(f"{host} {key}", f"control group {key}", int(n * GIB)) for key, n in groups]
    return Need(host, int(gib * GIB), int(held * GIB), is_there, (machine, *inner))


def pod(name: str, left_gib: float, *, machine_gib: float = 500) -> Need:
    return need("n0", 60, machine_gib, (name, left_gib))


def held_by_agent(needed: Need) -> Need:
    return dataclasses.replace(needed, holder=HELD)


def refusal(needs: list[Need]) -> str:
    with pytest.raises(StorageError) as raised:
        check(needs, 2)
    assert raised.value.errno == errno.ENOMEM
    assert raised.value.strerror.startswith(BEGIN)
    assert raised.value.strerror.endswith(REMEDY)
    return raised.value.strerror[len(BEGIN) : -len(REMEDY)]


HELD = "agent 77 holds 30.00 GiB: 30.00 GiB of rank 2 (iteration 5, being written)"
TWO = "n0: 2 ranks (0 to 1) need 120.0 GiB;"
FITTING: dict[str, list[Need]] = {
    "alone": [need("n0", 60, 100)],
    "together": [need("n0", 50, 100), need("n0", 50, 101)],
    "on two nodes": [need(host, 60, 130) for host in ("n0", "n0", "n1", "n1")],
    "each in its group": [pod("/a", 61), pod("/b", 62)],
    "with copies for others": [need("n0", 60, 100, held=40)],
    "there already": [need("n0", 60, 0.5, held=60, is_there=True)] * 2,
    "one there already": [need("n0", 60, 70, is_there=True), need("n0", 60, 70)],
}
REFUSED: dict[str, list[Need]] = {
    f"{TWO} the machine has 90.0 GiB left": [need("n0", 60, 100), need("n0", 60, 90)],
    "n0: rank 1 needs 60.0 GiB; control group /b has 59.0 GiB left": [pod("/a", 61), pod("/b", 59)],
    f"{TWO} control group /a has 100.0 GiB left": [pod("/a", 100), pod("/a", 100), pod("/b", 62)],
    f"{TWO} the machine has 110.0 GiB left": [
        pod(name, 61, machine_gib=110) for name in ("/a", "/b")
    ],
    f"{TWO} control group /job has 90.0 GiB left": [need("n0", 60, 110, ("/job", 90), ("/", 100))]
    * 2,
    "n0: rank 0 needs 120.0 GiB, 60.0 GiB of it for other nodes; the machine has 100.0 GiB left": [
        need("n0", 60, 100, held=60)
    ],
    f"{TWO} the machine has 50.0 GiB left; {HELD}\n"
    "  n2: rank 3 needs 9.0 GiB; the machine has 8.5 GiB left": [
        *[held_by_agent(need("n0", 60, 50))] * 2,
        need("n1", 60, 130),
        need("n2", 9, 8.5),
    ],
}


@pytest.mark.parametrize("needs", FITTING.values(), ids=FITTING)
def test_slabs_that_fit_are_accepted(needs: list[Need]) -> None:
    check(needs, 2)


@pytest.mark.parametrize(("reason", "needs"), REFUSED.items())
def test_slabs_that_do_not_fit_together_are_refused_by_node_and_tightest_limit(
    reason: str, needs: list[Need]
) -> None:
    assert refusal(needs) == reason


def test_a_refusal_lists_ten_nodes_and_suggests_no_fewer_than_one_slot() -> None:
    lines = refusal([need(f"n{number}", 60, 50) for number in range(12)]).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "  and 2 more"
    job = [need("n0", 60, 110, ("/job", 90), ("/", 100))] * 2
    assert tightest_limit(job, 1).place == "control group /job"
    with pytest.raises(StorageError) as raised:
        check([need("n0", 60, 50)], 1)
    assert "the checkpoint slot of each rank does not fit" in raised.value.strerror
    assert "lower 'slots'" not in raised.value.strerror


def test_a_rank_reports_its_need_with_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_memory.platform, "node", lambda: "n7")
    link = SimpleNamespace(reclaim=lambda: None, has_slab=True)
    config = Config(redundancy="copy")
    checkpointer: Any = SimpleNamespace(root="/ckpt", config=config, link=link)
    expected: Any = SimpleNamespace(nbytes=GIB, plan_nbytes=0)
    (own,) = node_memory._needs(checkpointer, expected)
    slab = slab_nbytes(config.slots, GIB, 0)
    assert (own.host, own.slab_nbytes, own.held_nbytes, own.is_there) == ("n7", slab, slab, True)
    assert [limit[:2] for limit in own.limits] == [limit[:2] for limit in limits()]


def test_a_process_limit_refuses_a_slab_unless_the_slab_exists() -> None:
    needs = [need("n0", 6, 100) for _ in range(12)]
    bound = ProcessLimit("file size limit (ulimit -f)", 5 * GIB)
    needs[1:] = [dataclasses.replace(entry, process_limits=(bound,)) for entry in needs[1:]]
    with pytest.raises(StorageError) as raised:
        check(needs, 2)
    assert raised.value.errno == errno.EFBIG
    lines = raised.value.strerror.splitlines()
    assert lines[0].startswith("the 2 checkpoint slots of a rank exceed a limit of its process")
    assert lines[1] == (
        "  n0: rank 1 needs 6.0 GiB in one piece; its file size limit (ulimit -f) leaves 5.0 GiB"
    )
    assert lines[11:] == [
        "  and 1 more",
        "raise that limit where the job is started, lower 'slots', or use more ranks",
    ]
    check([dataclasses.replace(entry, is_there=True) for entry in needs], 2)


def test_process_limits_come_from_the_kernel() -> None:
    """Address space in use does not count as left."""
    limit = 2**44
    former = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, former[1]))
    try:
        left = {bound.name: bound.left_nbytes for bound in process_limits()}
    finally:
        resource.setrlimit(resource.RLIMIT_AS, former)
    assert 0 < left["address space limit (ulimit -v)"] < limit


def test_ranks_of_one_host_and_agent_are_neighbours() -> None:
    places = [("n0", "/run/a"), ("n0", "/run/b"), ("n1", "/run/a"), ("n0", "/run/a")]
    needs = [dataclasses.replace(need(host, 1, 2), agent=agent) for host, agent in places]
    assert [ranks_of_same_agent(needs, rank) for rank in range(4)] == [(0, 3), (1,), (2,), (0, 3)]
