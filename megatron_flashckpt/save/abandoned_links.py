"""Links to the node's agent that this process has left while they copied or prepared."""

from __future__ import annotations

import logging
import os
from typing import Protocol

logger = logging.getLogger(__name__)


class Link(Protocol):
    """The part of a `NodeLink` that an abandoned one needs."""

    def wait_idle(self, wait_s: float | None = None) -> bool:
        """Wait until neither copies nor background work run; return False after `wait_s` each."""

    def close(self, *, leave: bool) -> bool:
        """End the threads, which are idle."""


_links: list[Link] = []
os.register_at_fork(after_in_child=_links.clear)  # a child has none of their threads


def keep(link: Link) -> None:
    """Keep a link that copies or prepares, until `end`."""
    _links.append(link)


def end() -> None:
    """Close the kept links; wait until their work has ended. Called before a link is made."""
    while _links:
        link = _links[-1]
        if not link.wait_idle(0.0):
            logger.warning(
                "waiting for the copies and preparations of a checkpointer that this process has "
                "left; if they do not end, this rank's GPU hangs: end the job"
            )
            link.wait_idle()
        link.close(leave=False)
        _links.pop()  # last: whoever interrupts the wait leaves the link to the next one
