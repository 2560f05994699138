"""`flashckpt agent --foreground`: an agent that users start and that outlives all trainers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from megatron_flashckpt.agent.life import AgentFacts, EnclosingUnit, unit_of
from megatron_flashckpt.save import joining
from megatron_flashckpt.save.node_link import NodeLink
from tests.agent.conftest import Node
from tests.agent.test_survival import watched
from tests.support.stored import assert_intact
from tests.support.trainer import blocked_shard, eventually, is_alive, new_save_id

#: A long limit, because other tests may keep the machine busy.
PATIENCE_S = 60.0


class Foreground:
    """Runs `flashckpt agent` for one node."""

    def __init__(self, node: Node, root: Path) -> None:
        self._node = node
        self._root = root
        self._started: list[subprocess.Popen[str]] = []

    def command(
        self,
        how: str = "--foreground",
        *,
        stderr: int | None = None,
        container: tuple[str, ...] = (),
        **settings: str,
    ) -> subprocess.Popen[str]:
        """Start `flashckpt agent`, through the command `container` if given."""
        settings = {"runtime_dir": str(self._node.runtime_dir), **settings}
        variables = {f"FLASHCKPT_{name.upper()}": value for name, value in settings.items()}
        process = subprocess.Popen(
            [
                *(*container, sys.executable, "-m", "megatron_flashckpt.cli"),
                *("agent", "--save", str(self._root), how),
            ],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if stderr is None else stderr,
            text=True,
        )
        self._started.append(process)
        return process

    def agent(self, **settings: str) -> subprocess.Popen[str]:
        """Return an agent that answers, as `flashckpt agent --wait` reported."""
        agent = self.command(**settings)
        self.wait_for(agent.pid)
        return agent

    def wait_for(self, pid: int) -> None:
        waiting = self.command("--wait", agent__start_timeout_s=str(PATIENCE_S))
        out, err = waiting.communicate(timeout=PATIENCE_S)
        assert (out, waiting.returncode) == (f"agent {pid} serves {self._root}\n", 0), err

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def foreground(node: Node, root: Path) -> Iterator[Foreground]:
    made = Foreground(node, root)
    yield made
    made.close()


def ended(agent: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Return the exit status of an agent and the lines that it printed to stderr."""
    _, err = agent.communicate(timeout=PATIENCE_S)
    return agent.returncode, err.splitlines()


def test_a_foreground_agent_outlives_trainers_that_left_or_were_killed(
    node: Node, root: Path, foreground: Foreground
) -> None:
    agent = foreground.agent()
    trainer = node.trainer(root)
    assert trainer.client.agent_pid == agent.pid
    assert trainer.save(1).error is None
    trainer.hang_up(leave=True)
    log = node.log(root)
    eventually(
        "the log line of freed memory",
        lambda: "their memory is free" in log.read_text(),
        PATIENCE_S,
    )
    second = node.trainer(root)
    assert second.client.agent_pid == agent.pid
    assert second.take() == (), "the trainers before ended as planned"
    assert second.save(2).error is None
    second.hang_up()
    third = node.trainer(root)
    assert third.client.agent_pid == agent.pid
    assert [offer.iteration for offer in third.take()] == [2]
    third.hang_up()
    assert watched(agent.pid, 0.5)
    agent.terminate()
    status, lines = ended(agent)
    assert status == 0
    assert lines[0].endswith(
        f"agent {agent.pid} serves {root} until SIGTERM, or 600 s without trainers"
    )
    assert lines[-1].endswith(f"agent {agent.pid} ends")
    assert sum("committed iteration" in line for line in lines) == 2
    assert list(node.runtime_dir.iterdir()) == []


def test_the_exit_status_of_a_foreground_agent_reports_unfinished_saves(
    node: Node, root: Path, foreground: Foreground
) -> None:
    agent = foreground.agent(agent__sigterm_timeout_s="0.3")
    config, save_id = node.config(sigterm_timeout_s=0.3), new_save_id()
    trainer = node.trainer(root, config=config)
    with blocked_shard(root, 1, 0, save_id):
        trainer.stage(1, save_id)
        agent.send_signal(signal.SIGINT)
        status, lines = ended(agent)
    assert status == 1
    assert any("ended by a signal: iteration 1 is not durable: " in line for line in lines)
    assert lines[-1].endswith(f"agent {agent.pid} ends: a save is not in storage")
    assert "iteration 1 is not durable" in node.log(root).read_text()


def test_of_agents_that_start_together_one_remains(
    node: Node, root: Path, foreground: Foreground
) -> None:
    """The check of the name precedes the new program, so others may take the name in between."""
    agents = [foreground.command() for _ in range(3)]
    eventually(
        "one agent",
        lambda: [process.poll() for process in agents].count(None) == 1,
        within_s=PATIENCE_S,
    )
    (agent,) = [process for process in agents if process.poll() is None]
    foreground.wait_for(agent.pid)
    for other in [*agents, foreground.command()]:
        if other is not agent:
            status, (line,) = ended(other)
            assert status == 1
            assert line.startswith(f"flashckpt: agent {agent.pid} serves {root} on this node")
            assert f"'kill {agent.pid}'" in line
    assert is_alive(agent.pid)


def test_a_foreground_agent_without_a_directory_ends_with_one_line(
    node: Node, root: Path, foreground: Foreground
) -> None:
    node.runtime_dir.mkdir()
    node.runtime_dir.chmod(0o777)
    status, (line,) = ended(foreground.command())
    assert status == 1
    assert line.startswith(f"flashckpt: {node.runtime_dir}: other users can reach it")


def test_a_foreground_agent_waits_the_grace_time_for_first_and_later_trainers(
    node: Node, root: Path, foreground: Foreground
) -> None:
    assert ended(foreground.command(agent__grace_s="0.5"))[0] == 0
    assert list(node.runtime_dir.iterdir()) == []
    # This starts without `flashckpt agent --wait`, which may take longer on a busy machine.
    agent = foreground.command(agent__grace_s="5")
    eventually("a socket", node.place(root).listener, PATIENCE_S)
    trainer = node.trainer(root, config=node.config(grace_s=5.0))
    assert trainer.client.agent_pid == agent.pid
    assert trainer.keep(3).error is None
    trainer.hang_up()
    assert ended(agent)[0] == 0
    assert_intact(root, 3, [trainer])  # written before it left, for want of trainers


def test_an_agent_serves_trainers_of_another_container(
    node: Node, root: Path, foreground: Foreground
) -> None:
    """Neither container sees the processes of the other."""
    container = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    if subprocess.run([*container, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no pid namespaces")
    agent = foreground.command(container=container)
    out, _ = foreground.command(
        "--wait", agent__start_timeout_s=str(PATIENCE_S), container=container
    ).communicate(timeout=PATIENCE_S)
    assert out == f"an agent serves {root}\n"
    other = node.process(
        root, iterations=[1], save_id=new_save_id(), stop="committed", inside=container
    )
    other.stopped()
    other.kill()
    trainer = node.trainer(root)
    assert [offer.iteration for offer in trainer.take()] == [1], (
        "the slot of a killed trainer is offered"
    )
    assert trainer.client.facts.life.kind == "container"
    trainer.hang_up(leave=True)
    (pid,) = node.agents()
    os.kill(pid, signal.SIGTERM)
    assert ended(agent)[0] == 0


def test_an_agent_whose_stderr_is_not_read_still_serves(
    node: Node, root: Path, foreground: Foreground
) -> None:
    """A log driver may hang, or a terminal may be stopped."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, b"x" * 4096)
    os.set_blocking(writes, True)
    agent = foreground.command(stderr=writes)
    foreground.wait_for(agent.pid)
    trainer = node.trainer(root, config=node.config(answer_timeout_s=PATIENCE_S))
    for iteration in (1, 2):
        assert trainer.save(iteration).error is None
    assert "committed iteration 2" in node.log(root).read_text()
    trainer.hang_up()
    agent.terminate()
    assert agent.wait(PATIENCE_S) == 0
    os.close(writes)
    os.close(reads)


def test_a_wait_for_a_missing_agent_ends_with_an_error(node: Node, foreground: Foreground) -> None:
    status, (line,) = ended(foreground.command("--wait", agent__start_timeout_s="0.2"))
    assert status == 1
    assert "no agent for" in line
    assert not node.runtime_dir.exists(), "no agent came"


def test_rank_0_names_the_agent_that_it_joined_and_its_slots(
    node: Node, root: Path, foreground: Foreground, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = foreground.agent()
    others, save_id = [node.trainer(root, rank, 2) for rank in (0, 1)], new_save_id()
    for trainer in others:
        trainer.stage(7, save_id)
    assert others[0].outcome().error is None
    others[0].hang_up()
    for rank in (0, 1):
        link = NodeLink(str(root), rank, node.config())
        link.client()
        link.abandon()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"  flashckpt: agent {agent.pid} of this node, a foreground one")
    assert line.endswith("; its memory holds iteration 7")
    since = line.partition("has run since ")[2].partition(";")[0]
    assert abs(time.time() - time.mktime(time.strptime(since, "%Y-%m-%d %H:%M:%S"))) < 600


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("Slurm step", "'srun --overlap flashckpt agent --save /s --foreground'"),
        ("container", "'flashckpt agent --save /s --foreground' runs in a container"),
        ("systemd unit", "'flashckpt agent --save /s --foreground' runs in a u"),
    ],
)
def test_an_agent_that_would_end_with_its_ranks_is_named_with_the_remedy(
    kind: str, remedy: str
) -> None:
    life = EnclosingUnit(kind, "a name")
    facts = AgentFacts(0.0, False, life, (2, 4))
    first, second = joining.lines(5, facts, life, "/s")
    assert first.endswith("its memory holds iterations 2, 4")
    assert second.startswith(f"agent 5 ends with the {life} that this rank runs in")
    assert remedy in second
    for apart in (EnclosingUnit(kind, "another"), EnclosingUnit()):
        assert len(joining.lines(5, facts, apart, "/s")) == 1
    own = joining.lines(5, msgspec.structs.replace(facts, foreground=True), EnclosingUnit(), "/s")
    assert len(own) == 1
    assert f"a foreground one in {life}," in own[0]


MACHINE = 0xEFFFFFFC


@pytest.mark.parametrize(
    ("cgroups", "namespace", "expected"),
    [
        # Recorded from steps of Slurm 22.05 with control groups of version 1.
        ("6:freezer:/slurm_node1/uid_0/job_1/step_0\n0::/", MACHINE, "Slurm step 1.0"),
        (
            "0::/system.slice/slurmstepd.scope/job_12/step_batch/user/task_0",
            5,
            "Slurm step 12.batch",
        ),
        ("0::/system.slice/slurmd.service", MACHINE, " "),
        ("0::/", 4026532201, "container host"),
        ("0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-ab.scope", MACHINE, None),
        ("1:name=systemd:/docker/0123\n0::/", MACHINE, "container 0123"),
        ("0::/system.slice/train.service", MACHINE, "systemd unit train.service"),
        ("0::/user.slice/user-1000.slice/session-3.scope", MACHINE, " "),
    ],
)
def test_the_control_groups_of_a_process_show_what_ends_it(
    cgroups: str, namespace: int, expected: str | None
) -> None:
    life = unit_of(cgroups, namespace, {"HOSTNAME": "host"})
    assert str(life) == (expected or "container cri-containerd-ab.scope")
