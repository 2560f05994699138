"""An agent without pyzmq: it refuses to open peers, gives the reason, and continues to serve."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_flashckpt.agent.protocol import OpenPeers
from megatron_flashckpt.errors import AgentRefusedError
from tests.agent.conftest import Node

#: A meta path finder; the agent's interpreter runs this file when it starts.
BLOCKER = """\
import sys
class Blocker:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "zmq":
            raise ModuleNotFoundError("No module named 'zmq'", name=name)
sys.meta_path.insert(0, Blocker())
"""


def test_an_agent_without_pyzmq_refuses_to_open_peers_and_names_the_extra(
    node: Node, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = tmp_path / "blocker"
    blocker.mkdir()
    (blocker / "sitecustomize.py").write_text(BLOCKER)
    path = filter(None, (str(blocker), os.environ.get("PYTHONPATH")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    trainer = node.trainer(root)
    expected = r"cannot import \(No module named 'zmq'\).*'megatron_flashckpt\[redundancy\]'"
    for _ in range(2):
        with pytest.raises(AgentRefusedError, match=expected):
            trainer.client.open_peers(OpenPeers("127.0.0.1", 1))
    assert trainer.save(1).error is None
    assert [offer.iteration for offer in trainer.take()] == [1]
