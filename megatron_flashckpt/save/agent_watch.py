"""Decides in every iteration, without a request, whether this rank must ask its agent."""

from __future__ import annotations

import time

from megatron_flashckpt.agent.client import AgentClient
from megatron_flashckpt.memory.slab import Slab

#: Seconds without a round of the agent's main loop after which the agent is asked. A round takes
#: 0.2 s. A stopped agent does not answer; then `AgentClient` replaces it.
_SILENT_S = 2.0


class AgentWatch:
    """The facts from one rank's last request to its agent. Used on the training thread.

    The agent is asked if its answer may differ from the last one, if it may be gone, or if the last
    answer did not account for all saves that this rank has handed over.
    """

    def __init__(self) -> None:
        #: The connection and slab of the following values; others make them worthless.
        self._shared: tuple[AgentClient, Slab] | None = None
        self._news = self._beats = -1
        self._beat_at = 0.0
        self._pending = 0

    def must_ask(self, shared: tuple[AgentClient, Slab] | None, handed_over: int) -> bool:
        """Return whether to send a request now; 2 us.

        The counters are read before the request. What the agent adds after that read makes the next
        call return True, whether the answer has included it or not.

        Args:
            shared: the connection and the slab that both processes have; None: always ask.
            handed_over: number of this rank's open saves that an agent has accepted.
        """
        if shared is None:
            return True
        client, slab = shared
        now, news, beats = time.monotonic(), slab.signals.news, slab.signals.beats
        is_same = self._shared == shared
        is_quiet = is_same and news == self._news
        if not is_same or beats != self._beats:
            self._beat_at = now
        is_silent = now - self._beat_at > _SILENT_S
        if is_silent:  # if the agent answers, the next request waits as long
            self._beat_at = now
        self._shared, self._news, self._beats = shared, news, beats
        return not is_quiet or is_silent or handed_over > self._pending or client.has_hung_up()

    def answered(self, pending: int) -> None:
        """Note the number of saves whose results the agent still owes."""
        self._pending = pending
