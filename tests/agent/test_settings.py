"""Settings of an agent that an earlier run started: those of the newest run apply."""

from __future__ import annotations

import logging
import os
import platform
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.agent.log import path_in
from megatron_flashckpt.agent.settings import by_name, differences, settings_of
from megatron_flashckpt.agent.state import AgentOptions
from megatron_flashckpt.agent.state import Node as AgentNode
from megatron_flashckpt.config import AgentConfig, Config, Trace
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.file_names import HISTORY
from megatron_flashckpt.save import peer_setup
from tests.agent.conftest import Node
from tests.support.trainer import (
    FakeTrainer,
    blocked_open,
    eventually,
    is_alive,
    new_save_id,
)

#: Settings of the section `agent` that trainers use, each run its own.
OF_TRAINERS = {"start_timeout_s", "answer_timeout_s", "environment"}
#: Settings that an agent gets with the addresses of its peers. `peer_timeout_s` changes with each
#: run; `introduce` reports which others stay.
OF_PEERS = {"address", "peer_timeout_s", "peer_threads"}

Second = Callable[..., FakeTrainer]


def config_of(node: Node, values: dict[str, Any]) -> Config:
    """Return a configuration with these values of agent settings."""
    values = dict(values)
    trace = Trace(
        directory=values.pop("trace_directory", None) or None, keep=values.pop("trace_keep", 20)
    )
    history = values.pop("history", 1000)
    return msgspec.structs.replace(node.config(**values), history=history, trace=trace)


def writes_two_shards_at_a_time(node: Node, root: Path, second: Second) -> None:
    trainers, save_id = [second(0, 2), second(1, 2)], new_save_id()
    directory = root / file_names.iteration_dir(1)
    with blocked_open(directory / file_names.shard_name(0, save_id)):
        for trainer in trainers:
            trainer.stage(1, save_id)
        record = directory / file_names.record_name(range(1, 2), save_id)
        eventually("rank 1 does not wait for rank 0", record.exists)


def keeps_the_rate_limit(node: Node, root: Path, second: Second) -> None:
    trainer = second(numel=5 * 2**20 // 6)
    trainer.stage(1, new_save_id())
    assert trainer.outcome().seconds > 1.0, "the second chunk waits 4 seconds for the first one"


def has_a_lower_priority(node: Node, root: Path, second: Second) -> None:
    trainer = second()
    assert trainer.save(1).error is None
    agent = trainer.client.agent_pid
    tasks = [int(task.name) for task in Path(f"/proc/{agent}/task").iterdir()]
    nice = {os.getpriority(os.PRIO_PROCESS, task) for task in tasks}
    assert max(nice) == min(19, os.getpriority(os.PRIO_PROCESS, agent) + 5)


def has_a_lower_session(node: Node, root: Path, second: Second) -> None:
    group = Path(f"/proc/{second().client.agent_pid}/autogroup")
    assert not group.exists() or group.read_text().endswith(" nice 4\n")


def runs_on_the_first_cpu(node: Node, root: Path, second: Second) -> None:
    trainer = second()
    assert trainer.save(1).error is None
    tasks = Path(f"/proc/{trainer.client.agent_pid}/task").iterdir()
    assert {cpu for task in tasks for cpu in os.sched_getaffinity(int(task.name))} == {0}


def leaves_at_once(node: Node, root: Path, second: Second) -> None:
    trainer = second()
    trainer.hang_up()
    eventually("the end of the agent", lambda: not node.agents())


def leaves_without_a_failed_save(node: Node, root: Path, second: Second) -> None:
    trainer = second()
    directory = root / file_names.iteration_dir(1)
    directory.parent.mkdir(exist_ok=True)
    directory.write_text("in the way")
    assert trainer.save(1).error is not None
    trainer.hang_up(leave=True)
    eventually("the end of the agent", lambda: not node.agents())


def gives_up_at_once(node: Node, root: Path, second: Second) -> None:
    trainer = second(0, 2)
    trainer.stage(1, new_save_id())
    assert "gave up after 1 s" in (trainer.outcome().error or "")


def reports_slow_saves_at_once(node: Node, root: Path, second: Second) -> None:
    trainer = second(0, 2)
    trainer.stage(1, new_save_id())
    eventually("a notice", lambda: trainer.client.poll().notices)


def ends_at_once_after_sigterm(node: Node, root: Path, second: Second) -> None:
    agent = second().client.agent_pid
    os.kill(agent, signal.SIGTERM)
    eventually("the end of the agent", lambda: not is_alive(agent))


def writes_what_is_in_memory_only(node: Node, root: Path, second: Second) -> None:
    trainer = second()
    trainer.keep(1)
    trainer.hang_up(leave=True)
    eventually("the commit", (root / file_names.TRACKER).exists)


def has_a_history(node: Node, root: Path, second: Second) -> None:
    assert second().save(1).error is None
    eventually("the history", (root / HISTORY).exists)


def logs_in_the_save_directory(node: Node, root: Path, second: Second) -> None:
    assert second().save(1).error is None
    log = path_in(str(root), platform.node())
    eventually("a line", lambda: log.exists() and "settings changed" in log.read_text())


def has_traces(node: Node, root: Path, second: Second) -> None:
    trainer = second()
    assert trainer.save(1).error is None
    eventually("a trace", lambda: list((root / "traces").glob("*.json")))


def keeps_one_trace(node: Node, root: Path, second: Second) -> None:
    trainer = second()
    for iteration in (1, 2):
        assert trainer.save(iteration).error is None
        trainer.client.poll()
    newest = file_names.iteration_dir(2)
    eventually("the second trace", lambda: list((root / "traces").glob(f"{newest}*.json")))
    eventually(
        "the removal of the first trace", lambda: len(list((root / "traces").glob("*.json"))) == 1
    )


def is_there_for_the_next_save(node: Node, root: Path, second: Second) -> None:
    """Show only that the agent still saves; `test_a_node_applies_settings_that_no_save_shows`
    looks inside."""
    assert second().save(1).error is None


TRACED = {"trace_directory": "traces"}
#: The values of the first and second run, and a check that the second ones apply, by setting.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Node, Path, Second], None]]] = {
    "grace_s": ({"grace_s": 600.0}, {"grace_s": 0.2}, leaves_at_once),
    "keep_unwritten_s": (
        {},
        {"keep_unwritten_s": 0.2, "grace_s": 0.2},
        leaves_without_a_failed_save,
    ),
    "persist_threads": (
        {"persist_threads": 1},
        {"persist_threads": 2},
        writes_two_shards_at_a_time,
    ),
    "write_threads": ({"write_threads": 1}, {"write_threads": 3}, is_there_for_the_next_save),
    "write_mib_per_s": ({}, {"write_mib_per_s": 1.0, "write_threads": 1}, keeps_the_rate_limit),
    "writer_nice": ({"writer_nice": 0}, {"writer_nice": 5}, has_a_lower_priority),
    "session_nice": ({}, {"session_nice": 4}, has_a_lower_session),
    "cpus": ({"cpus": "all"}, {"cpus": 0}, runs_on_the_first_cpu),
    "direct_io": ({"direct_io": "always"}, {"direct_io": "never"}, is_there_for_the_next_save),
    "commit_timeout_s": ({}, {"commit_timeout_s": 1.0}, gives_up_at_once),
    "slow_save_s": ({}, {"slow_save_s": 0.0}, reports_slow_saves_at_once),
    "sigterm_timeout_s": ({}, {"sigterm_timeout_s": 0.2}, ends_at_once_after_sigterm),
    "persist_on_leave": (
        {"persist_on_leave": False},
        {"persist_on_leave": True},
        writes_what_is_in_memory_only,
    ),
    "log_in_save_directory": (
        {},
        {"log_in_save_directory": True},
        logs_in_the_save_directory,
    ),
    "history": ({"history": 0}, {"history": 5}, has_a_history),
    "trace_directory": ({}, TRACED, has_traces),
    "trace_keep": ({**TRACED, "trace_keep": 5}, {**TRACED, "trace_keep": 1}, keeps_one_trace),
}


def test_every_agent_setting_has_a_test_or_is_listed() -> None:
    names = {name.removeprefix("agent.") for name in by_name(settings_of(Config()))}
    assert set(CHANGES) == {name.replace(".", "_") for name in names}
    agent = set(AgentConfig.__struct_fields__)
    assert agent <= set(CHANGES) | OF_TRAINERS | OF_PEERS


@pytest.mark.parametrize("setting", CHANGES)
def test_the_settings_of_the_newest_run_apply(node: Node, root: Path, setting: str) -> None:
    before, after, shows = CHANGES[setting]
    first = node.trainer(root, config=config_of(node, before))
    agent = first.client.agent_pid
    first.hang_up()

    def second(rank: int = 0, world_size: int = 1, **more: Any) -> FakeTrainer:
        trainer = node.trainer(root, rank, world_size, config=config_of(node, after), **more)
        assert trainer.client.agent_pid == agent
        return trainer

    shows(node, root, second)


def test_an_agent_reports_no_change_for_the_settings_of_its_own_run(
    node: Node, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent gets the settings of its own run from the command line."""
    values = {name: value for _, after, _ in CHANGES.values() for name, value in after.items()}
    with caplog.at_level(logging.INFO, "megatron_flashckpt"):
        node.trainer(root, config=config_of(node, {**values, "grace_s": 60.0}))
    assert "changed its settings" not in caplog.text


def test_both_logs_name_changed_settings(
    node: Node, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = node.trainer(root, config=config_of(node, {"grace_s": 60.0}))
    first.hang_up()
    with caplog.at_level(logging.INFO, "megatron_flashckpt"):
        node.trainer(root, config=config_of(node, {"grace_s": 61.5, "history": 7}))
    changes = "agent.grace_s from 60.0 to 61.5, history from 1000 to 7"
    assert f"changed its settings to this run's: {changes}" in caplog.text
    assert f"settings changed: {changes}" in node.log(root).read_text()


def test_a_node_applies_settings_that_no_save_shows(tmp_path: Path) -> None:
    """These are the threads that write one shard, and O_DIRECT."""
    former = settings_of(Config(agent=AgentConfig(write_threads=1, direct_io="always")))
    made = AgentNode(AgentOptions(root=str(tmp_path), **msgspec.structs.asdict(former)))
    rate_limit = made.flow.rate_limit
    new = settings_of(Config(agent=AgentConfig(write_threads=3, direct_io="never")))
    with made.changed:
        changed = made.configure(new)
    assert changed == (
        "agent.write_threads from 1 to 3",
        "agent.direct_io from 'always' to 'never'",
    )
    assert made.flow.threads == 3
    assert made.flow.rate_limit is rate_limit, "shards under way share the rate limit"
    file = tmp_path / "file"
    file.touch()
    with open(file, "rb") as opened:
        assert made.direct_io.of(opened.fileno(), file).open(file) == -1
    assert differences(new, new) == ()


def test_settings_that_cannot_change_are_named(caplog: pytest.LogCaptureFixture) -> None:
    opened = p.PeersOpened(p.Identity("public", "secret"), "10.0.0.1", 7, threads=2)
    peer_setup._warn_of_kept_settings(3, opened, "10.0.0.1", Config())
    assert caplog.text == ""
    config = Config(agent=AgentConfig(peer_threads=4))
    peer_setup._warn_of_kept_settings(3, opened, "10.0.0.2", config)
    assert "rank 3: the agent of this node, which an earlier run started, keeps" in caplog.text
    assert "agent.address '10.0.0.1', not '10.0.0.2' and agent.peer_threads 2, not 4" in caplog.text
    assert "end the agents of all nodes before the job starts" in caplog.text
