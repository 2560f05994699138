"""Settings of an agent that an earlier run started: those of the newest run apply."""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.agent.log import path_in
from megatron_flashckpt.agent.node import AgentOptions
from megatron_flashckpt.agent.node import Node as AgentNode
from megatron_flashckpt.agent.settings import by_name, differences, settings_of
from megatron_flashckpt.config import AgentConfig, Config, LocalTier, Trace
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.save import peer_setup
from tests.agent.conftest import Node
from tests.support.histories import saves_in
from tests.support.trainer import FakeTrainer, blocked_shard, eventually, new_save_id

#: Settings of the section `agent` that trainers use, each run its own.
OF_TRAINERS = {"start_timeout_s", "answer_timeout_s", "environment"}
#: Settings that an agent gets with the addresses of its peers. `peer_timeout_s` changes with each
#: run; `introduce` reports which others stay.
OF_PEERS = {"address", "peer_timeout_s", "peer_threads"}


def config_of(node: Node, values: dict[str, Any]) -> Config:
    """Return a configuration with these values of agent settings."""
    values = dict(values)
    directory = values.pop("local_tier_directory", None)
    local_tier = LocalTier(
        directory=directory and str(node.runtime_dir.parent / directory),
        keep=values.pop("local_tier_keep", 2),
    )
    trace = Trace(
        directory=values.pop("trace_directory", None) or None, keep=values.pop("trace_keep", 20)
    )
    history = values.pop("history", 1000)
    return msgspec.structs.replace(
        node.config(**values), history=history, local_tier=local_tier, trace=trace
    )


#: The values of the first and of the second run, by setting.
BEFORE: dict[str, Any] = {
    "cpus": "all",
    "direct_io": "always",
    "history": 0,
    "persist_on_leave": False,
    "persist_threads": 1,
    "write_threads": 1,
    "writer_nice": 0,
}
AFTER: dict[str, Any] = {
    "commit_timeout_s": 77.0,
    "cpus": 0,
    "direct_io": "never",
    "grace_s": 0.2,
    "history": 5,
    "keep_unwritten_s": 0.2,
    "local_tier_directory": "disk",
    "local_tier_keep": 3,
    "log_in_save_directory": True,
    "on_durable": "true",
    "on_durable_timeout_s": 60.0,
    "persist_on_leave": True,
    "persist_threads": 2,
    "session_nice": 4,
    "sigterm_timeout_s": 7.0,
    "slow_save_s": 0.0,
    "trace_directory": "traces",
    "trace_keep": 1,
    "write_mib_per_s": 1000.0,
    "write_threads": 3,
    "writer_nice": 5,
}


def names_of_settings() -> list[str]:
    return list(by_name(settings_of(Config())))


def test_every_agent_setting_is_changed_here_or_is_listed() -> None:
    names = [name.removeprefix("agent.").replace(".", "_") for name in names_of_settings()]
    assert sorted(names) == sorted(AFTER)
    assert set(AgentConfig.__struct_fields__) <= set(AFTER) | OF_TRAINERS | OF_PEERS


def test_the_settings_of_the_newest_run_apply_and_both_logs_name_them(
    node: Node, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (node.runtime_dir.parent / "disk").mkdir()
    first = node.trainer(root, config=config_of(node, BEFORE))
    agent = first.client.agent_pid
    first.hang_up()
    with caplog.at_level(logging.INFO, "megatron_flashckpt"):
        ranks = [node.trainer(root, rank, 2, config=config_of(node, AFTER)) for rank in (0, 1)]
    assert {rank.client.agent_pid for rank in ranks} == {agent}
    (told,) = (text for text in caplog.messages if "changed its settings to this run's: " in text)
    changes = told.partition("this run's: ")[2]
    assert "history from 0 to 5" in changes
    assert [name for name in names_of_settings() if f"{name} from " not in changes] == []
    assert f"settings changed: {changes}" in node.log(root).read_text()

    save_id = new_save_id()
    with blocked_shard(root, 1, 0, save_id):
        for rank in ranks:
            rank.stage(1, save_id)
        name = file_names.record_name(range(1, 2), save_id)
        record = root / file_names.iteration_dir(1) / name
        eventually("rank 1 does not wait for rank 0", record.exists)
        eventually("the notice of a slow save", lambda: ranks[0].client.poll().notices)
    save(ranks, 2, new_save_id(), staged=save_id)

    eventually("the history", lambda: saves_in(root))
    shared = path_in(str(root), platform.node())
    eventually("the shared log", lambda: "committed iteration 2" in shared.read_text())
    assert list((node.runtime_dir.parent / "disk").rglob("iter_0000002/*.slot"))
    newest = file_names.iteration_dir(2)
    traces = root / "traces"
    eventually(
        "the newest trace alone",
        lambda: [path.name[: len(newest)] for path in traces.glob("*.json")] == [newest],
    )
    tasks = [int(task.name) for task in Path(f"/proc/{agent}/task").iterdir()]
    nice = {os.getpriority(os.PRIO_PROCESS, task) for task in tasks}
    assert max(nice) == min(19, os.getpriority(os.PRIO_PROCESS, agent) + 5)
    assert {cpu for task in tasks for cpu in os.sched_getaffinity(task)} == {0}
    group = Path(f"/proc/{agent}/autogroup")
    assert not group.exists() or group.read_text().endswith(" nice 4\n")

    save_id = new_save_id()
    for rank in ranks:
        assert rank.keep(3, save_id).kept
        rank.hang_up()
    eventually("the end of the agent", lambda: not node.agents())
    assert (root / file_names.TRACKER).read_text() == "3", "it wrote what was in memory only"


def save(ranks: list[FakeTrainer], iteration: int, save_id: str, staged: str) -> None:
    """Wait for the staged save, save again, and let the ranks send the ends of their traces."""
    for wanted in (staged, save_id):
        if wanted == save_id:
            for rank in ranks:
                rank.stage(iteration, save_id)
        for rank in ranks:
            outcome = rank.outcome()
            assert (outcome.save_id, outcome.error) == (wanted, None)
            rank.client.poll()


def test_an_agent_reports_no_change_for_the_settings_of_its_own_run(
    node: Node, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent gets the settings of its own run from the command line."""
    with caplog.at_level(logging.INFO, "megatron_flashckpt"):
        node.trainer(root, config=config_of(node, AFTER))
    assert "changed its settings" not in caplog.text


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
