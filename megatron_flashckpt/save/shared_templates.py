"""Templates shared between ranks: on a node by its agent, between nodes by the job's store.

Nothing here is collective. The store is that of the job's rendezvous. It is used outside of saves
only, so no save depends on another node.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_flashckpt.save.background_work import answer_within
from megatron_flashckpt.save.node_link import NodeLink

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

#: Longest wait for a template that a rank of another node computes, in seconds.
_COMPUTING_S = 30.0
#: Additional seconds for one reply: PyTorch's client waits without end for a store that hangs.
_ANSWER_S = 15.0
#: A larger value ends the connection to PyTorch's TCPStore (8 MiB at most).
_MOST_NBYTES = 4 * 2**20


class SharedTemplates:
    """The template store of this rank's node and, inside `over_nodes`, of the job."""

    def __init__(self, link: NodeLink) -> None:
        self._link = link
        self._store: _JobStore | None = None

    @contextlib.contextmanager
    def over_nodes(self, run_id: str | None) -> Iterator[None]:
        """Share templates with other nodes inside the context. Never used in a save.

        Args:
            run_id: equal on all ranks; None before the ranks have agreed: nodes share nothing.
        """
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if run_id is not None and dist.is_initialized() and local_ranks < dist.get_world_size():
            self._store = _JobStore(f"megatron_flashckpt/template/{run_id}")
        try:
            yield
        finally:
            self._store = None

    def fetch(self, fingerprint: str) -> bytes | None:
        """Return a template, or None if this rank must compute it.

        Raises:
            AgentError: the agent is gone.
        """
        encoded = self._link.client().fetch_template(fingerprint)
        if encoded is None and self._store is not None:
            encoded = self._store.fetch(fingerprint)
            if encoded is not None:
                self._link.client().publish_template(fingerprint, encoded)
        return encoded

    def publish(self, fingerprint: str, encoded: bytes) -> None:
        """Share a template that this rank has computed.

        Raises:
            AgentError: the agent is gone.
        """
        self._link.client().publish_template(fingerprint, encoded)
        if self._store is not None:
            self._store.publish(fingerprint, encoded)


class _JobStore:
    """Templates in the job's store. After an error of the store, ranks compute templates alone."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._me = str(dist.get_rank())
        self._hangs = False

    def fetch(self, fingerprint: str) -> bytes | None:
        """Return a template, or None if this rank must compute it."""
        key = f"{self._prefix}/{fingerprint}"

        def ask() -> bytes | None:
            if self._store.compare_set(f"{key}/computed_by", "", self._me).decode() == self._me:
                return None
            self._store.wait([key], datetime.timedelta(seconds=_COMPUTING_S))
            return zlib.decompress(self._store.get(key)) or None

        try:
            return self._within(_COMPUTING_S + _ANSWER_S, ask)
        except (RuntimeError, zlib.error) as error:
            logger.warning("this rank computes a plan without other nodes: %s", error)
            return None

    def publish(self, fingerprint: str, encoded: bytes) -> None:
        """Share a template that this rank has computed."""
        packed = zlib.compress(encoded, 1)
        if len(packed) > _MOST_NBYTES:
            packed = zlib.compress(b"")  # makes the others compute the template
        try:
            self._within(
                _ANSWER_S, lambda: self._store.set(f"{self._prefix}/{fingerprint}", packed)
            )
        except RuntimeError as error:
            logger.warning("a plan is not shared with other nodes: %s", error)

    def _within(self, seconds: float, ask: Callable[[], _Answer]) -> _Answer:
        """Run `ask` in a thread of its own and return its result.

        Raises:
            RuntimeError: the store failed, or did not answer in time; the thread keeps waiting.
        """
        if self._hangs:
            raise RuntimeError("the job's store does not answer")
        answer = answer_within(seconds, "flashckpt-store", ask)
        if not answer.done():
            self._hangs = True
            raise RuntimeError(f"the job's store did not answer within {seconds:.0f} s")
        return answer.result()
