"""The end of a job: its last save is awaited, for so long, and is not lost when that runs out."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flashckpt import run_id
from megatron_flashckpt.checkpointer import Checkpointer, SaveRequest
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import ConfigError
from megatron_flashckpt.layout import names
from megatron_flashckpt.layout.records import Coordinates
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.verification import verify
from tests.agent.conftest import Node
from tests.agent.test_persist import stored
from tests.agent.trainer import eventually, held_back, is_alive

RUN = "0123abcd"


def test_a_drain_that_runs_out_is_a_failure_with_its_setting_and_the_agent_goes_on(
    node: Node,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank without a model: what it saves is its side state."""
    monkeypatch.setattr(parallel, "coordinates", Coordinates)
    monkeypatch.setattr(run_id, "from_store", lambda root: RUN)
    config = Config(runtime_dir=str(node.runtime_dir), drain_timeout_s=0.3)
    job = Checkpointer(str(root), config)
    request = SaveRequest(
        iteration=1,
        chunks=[],
        optimizer=None,
        rank_state=lambda _: {"seed": 1},
        common_state=lambda: {"iteration": 1},
        description={},
    )
    with held_back(root / names.iteration_dir(1) / names.shard_name(0, f"{RUN}0000")) as let_go:
        job.save(request)
        (outcome,) = job.wait()
        assert (outcome.iteration, job.pending) == (1, False)
        assert "not committed within 0 s; the agent goes on trying; raise 'drain_timeout_s'" in (
            outcome.error or ""
        )
        (agent,) = node.agents()
        job.close()
        assert is_alive(agent)
        let_go()
        eventually("the end of the agent", lambda: not is_alive(agent))
    assert (root / names.TRACKER).read_text() == "1"
    assert verify(stored(root, 1)) == []


def test_a_save_directory_that_is_none_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"s3://bucket/job: .*mount it"):
        Checkpointer("s3://bucket/job", Config())
    assert list(tmp_path.iterdir()) == []
