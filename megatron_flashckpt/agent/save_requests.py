"""Requests of `flashckpt save-now`: the ranks of a run are to save after one iteration.

The command names an iteration far enough ahead that every agent has seen the request by then. Each
agent passes the iteration to its ranks through their slabs, so no rank asks another one. A rank
that hears of it too late makes that one save fail: the ranks that have heard communicate for such a
save in no way, its agent ends the save at its next look, and later saves have the same names
everywhere (`Run`).
"""

from __future__ import annotations

import collections
import logging
import time

import msgspec

from megatron_flashckpt.agent.alive import Alive
from megatron_flashckpt.agent.committer import Committer
from megatron_flashckpt.agent.node import Node, Trainer
from megatron_flashckpt.agent.proposals import propose_failure
from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.file_format.end import Failure
from megatron_flashckpt.file_format.file_names import (
    ALIVE,
    first_sequence,
    parse_request_file,
    save_name,
)
from megatron_flashckpt.memory.slot import SlotState
from megatron_flashckpt.storage.store import Store

logger = logging.getLogger(__name__)

#: Measured intervals between renewals of which the fastest one counts, and the least number.
_WINDOWS, _LEAST_WINDOWS = 10, 2


def requests(store: Store, run: str) -> list[int]:
    """Return the iterations that a run is asked to save, in ascending order."""
    listed = [parse_request_file(entry.name) for entry in store.list(ALIVE, sizes=False)]
    return sorted(request[1] for request in listed if request and request[0] == run)


def first_after(asked: list[int], trained: int) -> int:
    """Return the first iteration that is still to be trained; 0: there is none."""
    return next((iteration for iteration in asked if iteration > trained), 0)


class Progress:
    """Measures the iterations that rank 0 has trained, and the time of one."""

    def __init__(self) -> None:
        self._of: object = None
        self._trained, self._at = 0, 0.0
        #: Seconds per iteration between two renewals.
        self._windows: collections.deque[float] = collections.deque(maxlen=_WINDOWS)

    def note(self, of: object, trained: int) -> None:
        """Note what rank 0 has trained.

        Args:
            of: the run and the memory that the number is of.
        """
        now = time.monotonic()
        if of != self._of or trained < self._trained:
            self._of, self._trained = of, 0
            self._windows.clear()
        if trained > self._trained:
            if self._trained:
                self._windows.append((now - self._at) / (trained - self._trained))
            self._trained, self._at = trained, now

    @property
    def step_s(self) -> float:
        """Shortest seconds per iteration of late, so that no pause counts; 0: unknown."""
        return min(self._windows) if len(self._windows) >= _LEAST_WINDOWS else 0.0


class SaveRequests:
    """Looks for a request to the newest run of a node, and announces that run's progress.

    Used by the thread of `Heartbeat`.
    """

    def __init__(self, node: Node, committer: Committer) -> None:
        self._node = node
        self._committer = committer
        #: The requests up to this iteration of that run are settled.
        self._judged_of, self._judged_until = "", 0
        self._progress = Progress()
        self._next_at = 0.0
        self._trouble = ""

    def announced(self, sign: Alive) -> Alive:
        """Return a sign of life with what a request needs: how far rank 0 has trained, how fast."""
        with self._node.changed:
            every_s, rank = self._interval_s(), self._node.ranks.get(0)
            slots, trained = (None, 0) if rank is None else (rank.slots, _trained(rank))
        self._progress.note((sign.run, id(slots)), trained)
        return msgspec.structs.replace(
            sign, trained=trained, step_s=self._progress.step_s, looks_every_s=every_s
        )

    def _interval_s(self) -> float:
        """Return the seconds between two looks; 0 while no rank trains. Lock held."""
        run = self._node.run
        if run is None:
            return 0.0
        trainers = self._node.ranks.values()
        ranks = sum(rank.connection is not None and rank.run == run.name for rank in trainers)
        return self._node.store.pace.idle_s(run.world_size / ranks) if ranks else 0.0

    def look(self) -> None:
        """Look for requests, if it is time for it: pass on the next one, and end those missed.

        Errors of storage are logged once; the next look comes as soon as without them.
        """
        with self._node.changed:
            run, every_s = self._node.run, self._interval_s()
            trained = self._trained_by_all("" if run is None else run.name)
        if run is None or not every_s or time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + every_s
        if run.name != self._judged_of:
            # An agent that comes later does not know of the saves before.
            self._judged_of, self._judged_until = run.name, trained
        trouble = ""
        try:
            asked = requests(self._node.store, run.name)
            with self._node.changed:
                if self._node.run == run:
                    # A rank with another slab has told no iteration yet.
                    self._node.save_at = first_after(asked, max(trained, self._judged_until))
            self._end_missed(run.name, asked)
        except (FlashCkptError, OSError) as error:
            trouble = str(error)
        if trouble and trouble != self._trouble:
            logger.warning("a request to save would not be heard of: %s", trouble)
        self._trouble = trouble

    def _trained_by_all(self, run: str) -> int:
        """Return the last iteration that all connected ranks of a run have completed. Lock held.

        Until then a request stays in the slabs: ranks complete an iteration one after the other.
        """
        ranks = self._node.ranks.values()
        of_run = (rank for rank in ranks if rank.run == run and rank.connection is not None)
        return min((_trained(rank) for rank in of_run if rank.slots is not None), default=0)

    def _end_missed(self, run: str, asked: list[int]) -> None:
        """End the requested saves that lack the part of a rank of this node, which heard too late.

        Otherwise the ranks that have heard would wait for it, and it for them in its next step.
        """
        with self._node.changed:
            trained = self._trained_by_all(run)
        for iteration in asked:
            if not self._judged_until < iteration < trained:
                continue
            save_id = save_name(run, first_sequence(iteration))
            late = self._without_part(run, save_id)
            if late is None:
                return
            if late:
                reason = f"rank {late[0]} heard of the request too late"
                failure = Failure(failed=reason, is_final=True)
                propose_failure(self._node.store, iteration, save_id, failure)
            self._judged_until = iteration

    def _without_part(self, run: str, save_id: str) -> list[int] | None:
        """Return the ranks of this node that have made no such save.

        Returns None while copies are being made, which does not tell.
        """
        late = []
        with self._node.changed:
            pending = self._committer.pending.get(save_id)
            for number, rank in self._node.ranks.items():
                states = set() if rank.slots is None else rank.slots.states(save_id)
                if SlotState.STAGING in states:
                    return None
                has_part = states or (pending and number in pending.metas)
                if rank.run == run and rank.connection is not None and not has_part:
                    late.append(number)
        return late


def _trained(rank: Trainer) -> int:
    return 0 if rank.slots is None else rank.slots.slab.signals.trained
