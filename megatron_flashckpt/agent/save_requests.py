"""Requests of `flashckpt save-now`: the ranks of a run are to save after one iteration.

The command names an iteration far enough ahead that every agent has seen the request by then. Each
agent passes the iteration to its ranks through their slabs, so no rank asks another one. A rank
that hears of it too late makes that one save fail, and nothing else: the ranks that have heard
communicate for such a save in no way, and later saves have the same names everywhere (`Run`).
"""

from __future__ import annotations

import collections
import logging
import time

import msgspec

from megatron_flashckpt.agent.alive import Alive
from megatron_flashckpt.agent.node import Node
from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.file_format.file_names import ALIVE, parse_request_file
from megatron_flashckpt.storage.store import Store

logger = logging.getLogger(__name__)

#: Measured intervals between renewals of which the fastest one counts, and the least number.
_WINDOWS, _LEAST_WINDOWS = 10, 2


def requested(store: Store, run: str, after: int) -> int:
    """Return the first iteration after `after` that is to be saved by a run; 0: none is."""
    listed = [parse_request_file(entry.name) for entry in store.list(ALIVE, sizes=False)]
    own = [request[1] for request in listed if request is not None and request[0] == run]
    return min((iteration for iteration in own if iteration > after), default=0)


class Progress:
    """How far and how fast rank 0 trains, as a sign of life tells it."""

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

    def __init__(self, node: Node) -> None:
        self._node = node
        self._progress = Progress()
        self._next_at = 0.0
        self._trouble = ""

    def announced(self, sign: Alive) -> Alive:
        """Return a sign of life with what a request needs: how far rank 0 has trained, how fast."""
        with self._node.changed:
            every_s, rank = self._interval_s(), self._node.ranks.get(0)
            slots = None if rank is None else rank.slots
            trained = 0 if slots is None else slots.slab.signals.trained
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
        """Look for a request, if it is time for it, and note it for `Node.beat`.

        Errors of storage are logged once; the next look comes as soon as without them.
        """
        with self._node.changed:
            run, every_s = self._node.run, self._interval_s()
            slots = [rank.slots for rank in self._node.ranks.values() if rank.slots is not None]
            trained = max((each.slab.signals.trained for each in slots), default=0)
        if run is None or not every_s or time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + every_s
        try:
            iteration, trouble = requested(self._node.store, run.name, trained), ""
        except (FlashCkptError, OSError) as error:
            iteration, trouble = 0, str(error)
        if trouble and trouble != self._trouble:
            logger.warning("a request to save would not be heard of: %s", trouble)
        self._trouble = trouble
        with self._node.changed:
            if not iteration or self._node.run != run:
                return
            if iteration != self._node.save_at:
                logger.info("a save of iteration %d is requested", iteration)
            self._node.save_at = iteration
