"""Start of a run: it becomes the writer of a save directory, or is refused.

Run by rank 0, before anything is changed. A run whose trainers are gone does not refuse the start:
its agent has a bounded time to write its staged saves, from which a restart wants to resume.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import time
from collections.abc import Callable, Collection
from typing import Literal

from megatron_flashckpt.agent import claim as claims
from megatron_flashckpt.agent.claim import ENDED, IDLE, TRAINING, Claim, RunKey
from megatron_flashckpt.agent.client import AgentClient
from megatron_flashckpt.agent.incarnations import process_with
from megatron_flashckpt.errors import CorruptCheckpointError, OtherWriterError
from megatron_flashckpt.storage.base import Storage

logger = logging.getLogger(__name__)

#: Values of `other_writer`.
Policy = Literal["refuse", "take_over"]

_LOOK_S = 0.1


def take(
    storage: Storage,
    run_id: str,
    connect: Callable[[], AgentClient],
    policy: Policy,
    wait_s: float,
) -> RunKey:
    """Claim a save directory for a run that starts; return the key of the run.

    Args:
        connect: returns the connection to the agent of this node, which renews the claim.
        policy: what to do about another run that still trains.
        wait_s: longest wait for such a run to end, or for the agent of an ended run to write its
            staged saves.

    Raises:
        OtherWriterError: another run writes there; nothing was changed.
    """
    former = _await_end(storage, connect, policy, wait_s)
    key = RunKey(1 if former is None else former.epoch + 1, run_id)
    client = connect()
    # Before the claim is written, because the agent may be writing saves of the former run.
    client.hold(key)
    agent = process_with(client.agent_pid)
    now = time.time()
    new_claim = Claim(
        state=TRAINING,
        renewed_at=now,
        claimed_at=now,
        interval_s=claims.INTERVAL_S,
        pid=client.agent_pid,
        started=0 if agent is None else agent.started,
        machine=claims.this_host(),
        epoch=key.epoch,
        host=platform.node(),
        run_id=run_id,
    )
    known = {key} if former is None else {key, former.key}

    def check() -> None:
        # Before each attempt: another run may have claimed while storage did not answer.
        with contextlib.suppress(CorruptCheckpointError):  # a damaged claim is replaced
            _refuse_others(storage, known)

    claims.put(storage, new_claim, check)
    _refuse_others(storage, {key})  # two runs may start at the same moment
    return key


def _refuse_others(storage: Storage, known: Collection[RunKey]) -> None:
    """Raise if the directory has the claim of a run that is not in `known`."""
    claim = claims.read(storage)
    if claim is not None and claim.key not in known:
        raise _refusal(storage, claim)


def is_live(storage: Storage) -> Claim | None:
    """Return the claim of a run that trains or writes now; None if none does.

    Takes as long as a renewal can take, or less if the state is certain earlier.
    """
    watch = _ClaimWatcher(storage)
    while True:
        claim = watch.current()
        if claim is None or claim.state in (IDLE, ENDED) or watch.is_dead(claim):
            return None
        if watch.renews:
            return claim
        time.sleep(_LOOK_S)


def _await_end(
    storage: Storage, connect: Callable[[], AgentClient], policy: Policy, wait_s: float
) -> Claim | None:
    """Return the claim that may be replaced; None if there is none.

    Raises:
        OtherWriterError: the run of the claim trains, and `policy` is `refuse`.
    """
    deadline = time.monotonic() + wait_s
    watch = _ClaimWatcher(storage)
    while True:
        claim = watch.current()
        if claim is None or claim.state in (IDLE, ENDED) or watch.is_dead(claim):
            return claim
        if claim.state == TRAINING and policy == "take_over":
            logger.warning(
                "%s: taken over from %s, which is training: its later saves fail",
                storage.place,
                claim.writer,
            )
            return claim
        # A restarted job finds its agent on the same node again, and that agent continues.
        if claim.machine == claims.this_host() and connect().agent_pid == claim.pid:
            return claim
        if not watch.has_waited:
            watch.has_waited = True
            logger.warning(
                "%s: %s may still write there; waiting for its end, at most %g s if it turns out "
                "to be alive",
                storage.place,
                claim.writer,
                wait_s,
            )
        if watch.renews and time.monotonic() > deadline:
            if claim.state == TRAINING:
                raise _refusal(storage, claim)
            logger.warning(
                "%s: %s has not written its staged saves within %g s and is taken over",
                storage.place,
                claim.writer,
                wait_s,
            )
            return claim
        time.sleep(_LOOK_S)


class _ClaimWatcher:
    """Reads a claim repeatedly, to see whether it is renewed, by the clock of this host.

    While storage does not answer this host, it may not answer the writer either. So the time of one
    read counts as silence of the writer for one interval of renewals at most.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._last: Claim | None = None
        self._read_at = 0.0
        self._silent_s = 0.0
        self.renews = False
        self.has_waited = False

    def current(self) -> Claim | None:
        """Return the current claim; None if there is none or it is damaged."""
        try:
            claim = claims.read(self._storage)
        except CorruptCheckpointError as error:
            logger.warning("%s; it is ignored", error)
            return None
        now = time.monotonic()
        if claim is None or claim != self._last:
            is_same = claim is not None and self._last is not None and claim.key == self._last.key
            self.renews = is_same
            self._last, self._silent_s = claim, 0.0
        else:
            self._silent_s += min(now - self._read_at, claim.interval_s)
        self._read_at = now
        return claim

    def is_dead(self, claim: Claim) -> bool:
        """Return whether the claim is no longer renewed."""
        return claim.is_of_dead_process or self._silent_s > claim.patience_s


def _refusal(storage: Storage, claim: Claim) -> OtherWriterError:
    doing = "trains" if claim.state == TRAINING else "writes"
    return OtherWriterError(
        f"{storage.place}: {claim.writer} {doing} and saves there; nothing was changed. End that "
        "job, or save elsewhere; 'other_writer: take_over' replaces it (its later saves fail)"
    )
