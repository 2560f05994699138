"""A start becomes the writer of a save directory, or is refused because another run writes there.

Run by rank 0, before anything is changed. A run whose trainers are gone is no obstacle: its agent
has a bounded time to write what was staged, which is what a restart wants to resume from.
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

#: What `other_writer` may be.
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
        policy: what to do about a run that still trains.
        wait_s: longest wait for such a run to end, and for the agent of one that has ended to
            write what was staged.

    Raises:
        OtherWriterError: another run writes there; nothing was changed.
    """
    former = _await_end(storage, connect, policy, wait_s)
    key = RunKey(1 if former is None else former.epoch + 1, run_id)
    client = connect()
    # Before the claim is put: the agent may be writing what the run before has staged.
    client.hold(key)
    agent = process_with(client.agent_pid)
    now = time.time()
    made = Claim(
        state=TRAINING,
        renewed_at=now,
        claimed_at=now,
        interval_s=claims.INTERVAL_S,
        pid=client.agent_pid,
        started=0 if agent is None else agent.started,
        machine=claims.here(),
        epoch=key.epoch,
        host=platform.node(),
        run_id=run_id,
    )
    known = {key} if former is None else {key, former.key}

    def check() -> None:
        # Before each attempt: another run may have claimed while storage was away for a moment.
        with contextlib.suppress(CorruptCheckpointError):  # it is replaced: `_Watch.look`
            _refuse_others(storage, known)

    claims.put(storage, made, check)
    _refuse_others(storage, {key})  # both have started at the same moment
    return key


def _refuse_others(storage: Storage, known: Collection[RunKey]) -> None:
    """Raise if the directory has the claim of another run than those that are known."""
    found = claims.read(storage)
    if found is not None and found.key not in known:
        raise _refusal(storage, found)


def is_live(storage: Storage) -> Claim | None:
    """Return the claim of a run that trains or writes now; None if none does.

    Looks for as long as a renewal can take, unless it is certain earlier.
    """
    watch = _Watch(storage)
    while True:
        found = watch.look()
        if found is None or found.state in (IDLE, ENDED) or watch.is_dead(found):
            return None
        if watch.renews:
            return found
        time.sleep(_LOOK_S)


def _await_end(
    storage: Storage, connect: Callable[[], AgentClient], policy: Policy, wait_s: float
) -> Claim | None:
    """Return the claim that may be replaced; None if there is none.

    Raises:
        OtherWriterError: the run of the claim trains, and `policy` is `refuse`.
    """
    deadline = time.monotonic() + wait_s
    watch = _Watch(storage)
    while True:
        found = watch.look()
        if found is None or found.state in (IDLE, ENDED) or watch.is_dead(found):
            return found
        if found.state == TRAINING and policy == "take_over":
            logger.warning("%s: taken over from %s, which trains", storage.place, found.writer)
            return found
        # A job that is restarted finds its agent on the same node again, which goes on.
        if found.machine == claims.here() and connect().agent_pid == found.pid:
            return found
        if not watch.has_waited:
            watch.has_waited = True
            logger.warning(
                "%s: %s may still write there; waiting until it ends, for %g s at most once it is "
                "seen to live",
                storage.place,
                found.writer,
                wait_s,
            )
        if watch.renews and time.monotonic() > deadline:
            if found.state == TRAINING:
                raise _refusal(storage, found)
            logger.warning(
                "%s: %s has not written what was staged within %g s, and is taken over",
                storage.place,
                found.writer,
                wait_s,
            )
            return found
        time.sleep(_LOOK_S)


class _Watch:
    """Looks at a claim again and again, to see whether it is renewed, by the clock of this host."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._last: Claim | None = None
        self._since = 0.0
        self.renews = False
        self.has_waited = False

    def look(self) -> Claim | None:
        """Return the claim of now; None if there is none that counts."""
        try:
            found = claims.read(self._storage)
        except CorruptCheckpointError as error:
            logger.warning("%s; it is replaced", error)
            return None
        if found != self._last:
            is_same = found is not None and self._last is not None and found.key == self._last.key
            self.renews = is_same
            self._last, self._since = found, time.monotonic()
        return found

    def is_dead(self, found: Claim) -> bool:
        """Return whether nobody renews the claim any more."""
        silent_s = time.monotonic() - self._since
        return found.is_of_dead_process or silent_s > found.patience_s


def _refusal(storage: Storage, found: Claim) -> OtherWriterError:
    doing = "trains" if found.state == TRAINING else "writes"
    return OtherWriterError(
        f"{storage.place}: {found.writer} {doing} and saves there; nothing was changed. End that "
        "job, or save elsewhere; 'other_writer: take_over' takes its place (its later saves fail)"
    )
