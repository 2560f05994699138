"""The process of an agent: it drops the cores, NUMA policy and priority of the starting rank."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flashckpt import cpu_list
from megatron_flashckpt.agent import process
from tests.agent.conftest import Node
from tests.agent.test_foreground import Foreground, foreground
from tests.support.processes import status_of
from tests.support.trainer import eventually

__all__ = ["foreground"]
ALL = os.sched_getaffinity(0)
several_cpus = pytest.mark.skipif(len(ALL) < 2 or 0 not in ALL, reason="needs CPU 0 and another")
MPOL_DEFAULT, MPOL_INTERLEAVE = 0, 3


@contextlib.contextmanager
def bound(cpus: set[int]) -> Iterator[None]:
    """Bind this thread to CPUs, as a launcher binds a rank."""
    former = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, former)


def environment_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def log_of(node: Node, root: Path) -> str:
    return node.log(root).read_text()


@several_cpus
@pytest.mark.parametrize(
    ("cpus", "expected", "refusal"),
    [
        ("all", ALL, None),
        ("inherit", {0}, None),
        ("0", {0}, None),
        ("60000", {0}, "agent.cpus 60000: this process may run on none of these CPUs (Invalid"),
        (f"{max(ALL)},60000", {max(ALL)}, "this process may not run on 60000; it runs on "),
    ],
)
def test_an_agent_runs_on_the_cpus_of_the_setting_that_the_kernel_allows(
    node: Node, root: Path, cpus: str, expected: set[int], refusal: str | None
) -> None:
    with bound({0}):
        agent = node.trainer(root, config=node.config(cpus=cpus)).client.agent_pid
    assert status_of(agent, "Cpus_allowed_list") == cpu_list.shown(expected)
    log = log_of(node, root)
    assert log.count("agent.cpus") == log.count(refusal or "agent.cpus") == (refusal is not None)


@several_cpus
@pytest.mark.parametrize(
    ("allotted", "stays"), [(f"{len(ALL)}(x2)", False), ("1", True), (f"{len(ALL)}(x3),1", True)]
)
def test_an_agent_in_a_partial_slurm_allocation_keeps_the_cpus_of_its_ranks(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch, allotted: str, stays: bool
) -> None:
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", allotted)
    with bound({0}):
        agent = node.trainer(root).client.agent_pid
    assert status_of(agent, "Cpus_allowed_list") == cpu_list.shown({0} if stays else ALL)
    assert ("Slurm gave this job 1 CPUs of this node and no cpuset" in log_of(node, root)) is stays


def test_an_agent_has_the_default_numa_policy(node: Node, root: Path) -> None:
    number = process._SET_MEMPOLICY.get(os.uname().machine)
    if number is None or not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel has no NUMA policies")
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    nodes = ctypes.c_ulong(1)
    if syscall(number, MPOL_INTERLEAVE, ctypes.byref(nodes), ctypes.c_ulong(64)):
        pytest.skip(f"set_mempolicy: {os.strerror(ctypes.get_errno())}")
    try:
        agent = node.trainer(root).client.agent_pid
        assert "interleave:0" in Path("/proc/self/numa_maps").read_text()
    finally:
        assert syscall(number, MPOL_DEFAULT, None, ctypes.c_ulong(0)) == 0
    policies = {
        line.split()[1] for line in Path(f"/proc/{agent}/numa_maps").read_text().splitlines()
    }
    assert policies == {"default"}


@pytest.mark.parametrize(("nice", "of_session"), [(7, 7), (25, 19)])
def test_the_session_of_an_agent_has_a_lower_priority(
    node: Node, root: Path, nice: int, of_session: int
) -> None:
    """If the kernel first shares CPUs between sessions, the priority of threads has no effect."""
    agent = node.trainer(root, config=node.config(session_nice=nice)).client.agent_pid
    group = Path(f"/proc/{agent}/autogroup")
    if not group.exists():
        pytest.skip("this kernel does not group processes by session")
    assert group.read_text().endswith(f" nice {of_session}\n")
    assert group.read_text() != Path("/proc/self/autogroup").read_text()
    again = node.trainer(root, 1, config=node.config(session_nice=3))
    assert again.client.agent_pid == agent
    assert group.read_text().endswith(" nice 3\n"), "the setting of the newest run applies"


def test_a_foreground_agent_does_not_lower_a_session_that_it_shares(
    node: Node, root: Path, foreground: Foreground
) -> None:
    before = Path("/proc/self/autogroup")
    if not before.exists():
        pytest.skip("this kernel does not group processes by session")
    former = before.read_text()
    agent = foreground.agent(agent__session_nice="7")
    assert os.getsid(agent.pid) == os.getsid(0)
    assert Path(f"/proc/{agent.pid}/autogroup").read_text() == former


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a priority")
def test_an_agent_does_not_inherit_a_raised_priority(node: Node, root: Path) -> None:
    """A rank may have raised its own priority. A priority lowered for the whole job stays."""
    former = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, -3)
    try:
        agent = node.trainer(root).client.agent_pid
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, former)
    assert os.getpriority(os.PRIO_PROCESS, agent) == 0


def test_an_agent_gets_required_and_requested_variables(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("LC_ALL", "TZ", "FLASHCKPT_X", "HOME", "EBPYTHONPREFIXES", "CONDA_PREFIX")
    names += ("PYTHONUTF8", "NIX_PYTHONPATH", "SLURM_JOB_ID", "KRB5CCNAME", "LD_LIBRARY_PATH")
    kept = dict.fromkeys((*names, "FAULTY_CALLS", "COVERAGE_FILE"), "1")
    names = ("NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GOMP_CPU_AFFINITY")
    names += ("RANK", "TORCHELASTIC_RUN_ID", "NSYS_X", "MASTER_ADDR", "LD_PRELOAD")
    dropped = dict.fromkeys(names, "0")
    for name, value in (kept | dropped).items():
        monkeypatch.setenv(name, value)
    config = node.config(environment=("FAULTY_*", "COVERAGE_FILE"))
    environment = environment_of(node.trainer(root, config=config).client.agent_pid)
    assert {name: environment.get(name) for name in kept} == kept
    assert not environment.keys() & dropped.keys()


def test_an_agent_does_not_inherit_a_raised_oom_score(node: Node, root: Path) -> None:
    """A rank with a raised score starts the agent, which takes the lowest allowed score."""
    own = Path("/proc/self/oom_score_adj")
    former = own.read_text()
    own.write_text("300")
    try:
        agent = node.trainer(root).client.agent_pid
    finally:
        own.write_text(former)
    score = int(Path(f"/proc/{agent}/oom_score_adj").read_text())
    eventually(
        "the log line with the OOM score", lambda: f"oom_score_adj {score}\n" in log_of(node, root)
    )
    assert score <= int(former)


class Score:
    """A double of `/proc/PID/oom_score_adj` (see proc(5)) with a lowest value for the process."""

    def __init__(self, value: int, lowest: int) -> None:
        self.value, self._lowest = value, lowest

    def read_text(self) -> str:
        return f"{self.value}\n"

    def write_text(self, text: str) -> None:
        if int(text) < self._lowest:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        self.value = int(text)


@given(st.integers(-1000, 1000), st.integers(-1000, 1000))
def test_an_oom_score_becomes_the_lowest_allowed_and_is_never_raised(one: int, other: int) -> None:
    lowest, value = sorted((one, other))
    score = Score(value, lowest)
    assert process._spare_from_oom(score) == score.value
    assert score.value == min(value, max(lowest, -500))


@given(st.sets(st.integers(0, 300), min_size=1))
def test_a_shown_list_of_cpus_is_parsed_back(cpus: set[int]) -> None:
    assert cpu_list.parse(cpu_list.shown(cpus)) == cpus


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-9:0", "1,,2", "-1", "0-99999999999"])
def test_an_invalid_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a list of CPUs"):
        cpu_list.parse(text)
