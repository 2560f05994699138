"""`agent.on_durable`: the user's command after each commit, at least once; it hurts no save."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from megatron_flashckpt.agent import durable_commands
from megatron_flashckpt.agent.durable_commands import DurableCommands, announce
from megatron_flashckpt.agent.janitor import Janitor
from megatron_flashckpt.agent.node import Node as AgentNode
from megatron_flashckpt.agent.node import options_of
from megatron_flashckpt.agent.settings import settings_of
from megatron_flashckpt.catalog.lineage import History, Save
from megatron_flashckpt.config import Retention
from megatron_flashckpt.file_format.file_names import save_name
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.agent.conftest import Node
from tests.support.histories import committed_save
from tests.support.stored import stored
from tests.support.trainer import FakeTrainer, eventually, is_alive, kill_agent


def start(node: Node, root: Path, command: str | None, **more: object) -> FakeTrainer:
    config = node.config(on_durable=command)
    trainer = node.trainer(root, config=config, **more)
    trainer.open_run()
    return trainer


def commands_of(node: Node, root: Path, command: str, timeout_s: float) -> DurableCommands:
    config = node.config(on_durable=command, on_durable_timeout_s=timeout_s)
    options = options_of(settings_of(config), str(root), foreground=False)
    return DurableCommands(AgentNode(options))


def committed(node: Node, root: Path) -> Save:
    """Return a checkpoint of a job without a command."""
    trainer = node.trainer(root)
    save = Save(1, trainer.new_save_id())
    assert trainer.save(*save).error is None
    return save


def marks(root: Path) -> list[str]:
    return [path.parent.name for path in root.rglob("*.due")]


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_the_command_gets_path_iteration_and_metrics_once_per_checkpoint(
    node: Node, root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    fields = "$DURABLE_PATH|$DURABLE_ROOT|$DURABLE_ITERATION|$DURABLE_SAVE|$DURABLE_METRICS"
    command = f'ls "$DURABLE_PATH"/*.end && echo "{fields}" >> {out}'
    trainer = start(node, root, command)
    trainer.metrics = {"loss": 2.5}
    for iteration in (10, 20):
        assert trainer.save(iteration).error is None
    eventually("both commands", lambda: len(lines(out)) == 2 and not marks(root))
    for line, iteration in zip(lines(out), (10, 20), strict=True):
        path, place, shown, save_id, metrics = line.split("|")
        assert (Path(path), Path(place)) == (root / f"iter_{iteration:07d}", root)
        assert shown == str(iteration)
        assert save_id == stored(root, iteration).manifest.save_id
        assert json.loads(metrics) == {"loss": 2.5}
    log = node.log(root).read_text()
    assert f"on_durable: {root}/iter_0000010/" in log
    late = commands_of(node, root, command, 10.0)
    late.add(PosixStore(root), Save(20, save_id))  # as a listing from before its end shows
    eventually("the end of that work", lambda: not late.are_due())
    assert len(lines(out)) == 2
    late.close()


def test_a_killed_agent_s_command_runs_again_and_its_checkpoint_stays(
    node: Node, root: Path, tmp_path: Path
) -> None:
    """Retention has no rule for iteration 10 once 20 and 30 are there, but for its command."""
    begun, go_on = tmp_path / "begun", tmp_path / "go-on"
    command = f"echo $DURABLE_ITERATION >> {begun}; while [ ! -e {go_on} ]; do sleep 0.05; done"
    rules = Retention(latest=1)
    first = start(node, root, command, retention=rules)
    assert first.save(10).error is None
    eventually("the command", lambda: lines(begun) == ["10"])
    kill_agent(first.client.agent_pid)
    assert marks(root) == ["iter_0000010"]
    first.hang_up()
    again = node.trainer(root, config=node.config(on_durable=command), retention=rules)
    assert first.run is not None
    again.open_run(Save(10, save_name(first.run.name, 1)), first.run.ancestors)
    again.make_slab()
    eventually("the command again", lambda: lines(begun) == ["10", "10"])
    for iteration in (20, 30):
        assert again.save(iteration).error is None, "no save waits for the command"
    eventually("30's mark", lambda: len(marks(root)) == 3)
    go_on.touch()
    eventually("all commands", lambda: lines(begun) == ["10", "10", "20", "30"])
    eventually("no mark", lambda: not marks(root))
    assert again.save(40).error is None

    def kept() -> list[str]:
        return [path.parent.name for path in root.rglob("*.safetensors")]

    eventually("what rules keep", lambda: kept() == ["iter_0000040"])


def test_a_command_does_not_delay_the_write_of_what_only_memory_holds(
    node: Node, root: Path, tmp_path: Path
) -> None:
    go_on = tmp_path / "go-on"
    trainer = start(node, root, f"while [ ! -e {go_on} ]; do sleep 0.05; done")
    assert trainer.save(10).error is None
    assert trainer.keep(20).kept
    trainer.hang_up(leave=True)
    eventually("20 in storage", lambda: list(root.glob("iter_0000020/*.end")))
    assert "iter_0000010" in marks(root)
    go_on.touch()
    eventually("the end of the agent", lambda: not node.agents())
    assert not marks(root)


def test_only_a_run_without_the_command_forgets_the_marks_of_former_ones(
    node: Node, root: Path
) -> None:
    """The job was killed with its agent; `flashckpt prune` comes next, then another run."""
    first = start(node, root, "sleep 1000")
    assert first.save(10).error is None
    eventually("the mark", lambda: marks(root))
    kill_agent(first.client.agent_pid)
    first.hang_up()
    run = first.run
    assert run is not None
    durable = Save(10, save_name(run.name, 1))
    history = History(run.name, run.ancestors)
    Janitor().tidy(committed_save(PosixStore(root), durable, history, Retention(latest=1)))
    assert marks(root) == ["iter_0000010"]
    trainer = node.trainer(root)
    trainer.open_run(durable, run.ancestors)
    trainer.make_slab()
    eventually("no mark", lambda: not marks(root))
    assert stored(root, 10).manifest.iteration == 10


def test_a_second_sigterm_ends_the_command_and_keeps_its_mark(
    node: Node, root: Path, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    trainer = start(
        node, root, f"sh -c 'trap : TERM; echo $$ > {pid}; while :; do sleep 1; done'; true"
    )
    assert trainer.save(10).error is None
    trainer.hang_up(leave=True)
    eventually("the command", lambda: lines(pid))
    agent = trainer.client.agent_pid
    for _ in range(2):
        os.kill(agent, signal.SIGTERM)
        time.sleep(0.3)
    eventually("the end of the agent", lambda: not is_alive(agent))
    eventually("the end of the command", lambda: not is_alive(int(pid.read_text())))
    assert marks(root) == ["iter_0000010"]


def test_a_command_is_not_spared_like_its_agent_when_memory_runs_out(
    node: Node, root: Path
) -> None:
    save = committed(node, root)
    own = Path("/proc/self/oom_score_adj")
    command = f"until [ $(cat {own}) = 0 ]; do sleep 0.01; done"
    commands = commands_of(node, root, command, timeout_s=10.0)
    former = own.read_text()
    try:
        own.write_text("300")
        commands.add(PosixStore(root), save)
        eventually("the end of the command", lambda: not commands.are_due(), 8)
    finally:
        own.write_text(former)
        commands.close()


@pytest.mark.parametrize(
    ("command", "reason"),
    [("exit 3", "has failed (exit status 3)"), ("sleep 1000", "was ended after 1 s")],
    ids=["fails", "is too slow"],
)
def test_a_command_that_fails_is_tried_three_times(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    node: Node,
    root: Path,
    command: str,
    reason: str,
) -> None:
    monkeypatch.setattr(durable_commands, "_RETRIES_S", (0.01, 0.01))
    out, save, store = tmp_path / "out", committed(node, root), PosixStore(root)
    commands = commands_of(node, root, f"echo >> {out}; {command}", timeout_s=1.0)
    announce(store, save)
    commands.add(store, save)
    commands.add(store, save)
    eventually("all attempts", lambda: not commands.are_due())
    commands.close()
    assert len(lines(out)) == 3
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 3
    assert all(reason in error for error in errors)
    assert errors[-1].endswith("; given up")
    assert not marks(root)
