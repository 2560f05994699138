"""Renews the claim of a run, on the agent of its rank 0, with the run's present state."""

from __future__ import annotations

import functools
import logging
import os
import platform
import threading
import time

import msgspec

from megatron_flashckpt.agent import claim as claims
from megatron_flashckpt.agent.claim import ENDED, FINISHING, IDLE, TRAINING, Claim
from megatron_flashckpt.agent.commit_thread import Committer
from megatron_flashckpt.agent.incarnations import process_with
from megatron_flashckpt.agent.state import Node
from megatron_flashckpt.error_classes import may_pass
from megatron_flashckpt.errors import FlashCkptError, OvertakenError

logger = logging.getLogger(__name__)

#: Longest wait of a leaving agent for storage to accept its last renewal.
_LAST_S = 2.0
#: Pauses before the last renewal is repeated after a transient error.
_LAST_RETRIES_S = (0.1, 0.3, 0.6)


class ClaimKeeper:
    """Renews the claim in a thread of its own, so that hung storage blocks no other work."""

    def __init__(self, node: Node, committer: Committer) -> None:
        self._node = node
        self._committer = committer
        self._closing = False
        #: The claim as last renewed.
        self._own: Claim | None = None
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name="claim", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Write into the claim that the run has ended; give up if storage does not answer."""
        with self._node.changed:
            self._closing = True
            self._node.changed.notify_all()
        self._thread.join(_LAST_S)

    def _run(self) -> None:
        state: int | None = None
        while True:
            with self._node.changed:
                if state is not None:
                    is_news = functools.partial(self._differs_from, state)
                    self._node.changed.wait_for(is_news, claims.INTERVAL_S)
                state = ENDED if self._closing else self._state()
            error = self._try_to_renew(state)
            if state != ENDED:
                continue
            # Without this renewal the next start waits until the claim counts as silent.
            for pause_s in _LAST_RETRIES_S:
                if error is None or not may_pass(error):
                    break
                time.sleep(pause_s)
                error = self._try_to_renew(state)
            return

    def _try_to_renew(self, state: int) -> Exception | None:
        """Renew the claim; return the error of storage, which is logged once."""
        try:
            self._renew(state)
        except OvertakenError:
            pass  # the fence has logged it
        except (FlashCkptError, OSError) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.warning("the claim to the save directory is not renewed: %s", error)
            return error
        self._trouble = ""
        return None

    def _differs_from(self, state: int) -> bool:
        return self._closing or self._state() != state

    def _state(self) -> int:
        """Return the state of the newest run. The caller holds the lock."""
        run = self._node.fence.newest
        ranks = self._node.ranks.values()
        if any(rank.connection is not None and rank.run == run for rank in ranks):
            return TRAINING
        return FINISHING if self._committer.pending else IDLE

    def _renew(self, state: int) -> None:
        storage = self._node.storage
        if self._node.fence.newest is None:
            return  # an agent without trainers leaves the directory to any other run
        self._node.fence.check(storage)
        claim = claims.read(storage)
        if claim is None:
            if self._own is not None:
                claims.put(storage, self._renewed(self._own, state))  # the claim was removed
            return
        if not self._node.fence.may_renew(claim):
            return
        self._own = self._renewed(claim, state)
        claims.renew(storage, claim, self._own)

    def _renewed(self, claim: Claim, state: int) -> Claim:
        own_process = process_with(os.getpid())
        return msgspec.structs.replace(
            claim,
            state=state,
            renewed_at=time.time(),
            pid=os.getpid(),
            started=0 if own_process is None else own_process.started,
            machine=claims.this_host(),
            host=platform.node(),
        )
