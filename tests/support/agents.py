"""An agent that serves trainers from a thread of the test's process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from megatron_flashckpt.agent.node import AgentOptions
from megatron_flashckpt.agent.place import AgentSocket, PlaceTakenError
from megatron_flashckpt.agent.saves import Saves
from megatron_flashckpt.agent.server import Agent
from tests.agent.conftest import Node
from tests.support.trainer import PATIENCE_S, eventually


def _listener(node: Node, root: Path | str) -> AgentSocket:
    """Return the socket of an agent; the kernel frees the name of a killed one a little later."""
    made: list[AgentSocket] = []

    def begin() -> bool:
        with contextlib.suppress(PlaceTakenError):
            made.append(AgentSocket(node.place(root)))
        return bool(made)

    eventually("the name of the agent before", begin)
    made[0].listen()
    return made[0]


@contextlib.contextmanager
def agent_here(node: Node, root: Path | str, **options: float) -> Iterator[Agent]:
    """Serve trainers of `root` from a thread of this process, with any settings of theirs."""
    values = {"commit_timeout_s": 60.0, "slow_save_s": 60.0, "grace_s": 60.0, **options}
    values = {"sigterm_timeout_s": 0.0, "persist_on_leave": True, **values}
    values |= {"write_threads": 2, "write_mib_per_s": None, "writer_nice": 0, "direct_io": "always"}
    listener = _listener(node, root)
    agent = Agent(listener, AgentOptions(root=str(root), persist_threads=2, **values))
    server = threading.Thread(target=agent.serve)
    server.start()
    try:
        with mock.patch.object(Saves, "configure", return_value=()):
            yield agent
    finally:
        agent.end_soon()
        server.join(PATIENCE_S)
        listener.leave(keep_log=False)
        assert not server.is_alive(), "an agent with hanging storage still ends"
