"""The object in which `flashckpt save-now` asks the ranks of a run for a save after one iteration.

The command names an iteration far enough ahead that every agent has read the object by then. Each
agent passes the iteration to its ranks through their slabs, so no rank asks another one. A rank
that hears of it too late makes that one save fail; it names later saves as the others do (`Run`).
"""

from __future__ import annotations

import logging
import time
from typing import Annotated

import msgspec

from megatron_flashckpt.agent.alive import Alive
from megatron_flashckpt.agent.node import Node
from megatron_flashckpt.errors import UNDECODABLE, FlashCkptError
from megatron_flashckpt.file_format.file_names import REQUESTS, request_file
from megatron_flashckpt.storage.store import Store

logger = logging.getLogger(__name__)

_NBYTES = 2**12


class SaveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `flashckpt/requests/<run>`. The newest request of a run replaces the others."""

    iteration: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
    """The ranks save when they have trained this iteration."""


def put(store: Store, run: str, request: SaveRequest) -> None:
    """Ask the ranks of a run for a save."""
    store.put(request_file(run), msgspec.json.encode(request))


def read(store: Store, run: str) -> SaveRequest | None:
    """Return the request to a run; None if there is none, or a damaged one."""
    # As other nodes see it: a file system may have cached that the name is missing.
    if run not in store.present(REQUESTS, [run]):
        return None
    try:
        return msgspec.json.decode(store.get(request_file(run), 0, _NBYTES), type=SaveRequest)
    except (FileNotFoundError, *UNDECODABLE):
        return None


class SaveRequests:
    """Looks for a request to the newest run of a node, and announces that run's progress.

    Used by the thread of `Heartbeat`.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._next_at = 0.0
        self._trouble = ""
        #: The last iteration that rank 0 has shown, when it was seen, and seconds per iteration.
        self._trained, self._trained_at, self._step_s = 0, 0.0, 0.0

    def announced(self, sign: Alive) -> Alive:
        """Return a sign of life with what a request needs: how far rank 0 has trained, how fast."""
        with self._node.changed:
            every_s, rank = self._interval_s(), self._node.ranks.get(0)
            slots = None if rank is None else rank.slots
            trained = 0 if slots is None else slots.slab.signals.trained
        now, steps = time.monotonic(), trained - self._trained
        if steps:
            if steps > 0 and self._trained:
                self._step_s = (now - self._trained_at) / steps
            self._trained, self._trained_at = trained, now
        return msgspec.structs.replace(
            sign, trained=trained, step_s=self._step_s, looks_every_s=every_s
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
        if run is None or not every_s or time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + every_s
        try:
            request, trouble = read(self._node.store, run.name), ""
        except (FlashCkptError, OSError) as error:
            request, trouble = None, str(error)
        if trouble and trouble != self._trouble:
            logger.warning("a request to save would not be heard of: %s", trouble)
        self._trouble = trouble
        with self._node.changed:
            if request is None or self._node.run != run:
                return
            if request.iteration != self._node.save_at:
                logger.info("a save of iteration %d is requested", request.iteration)
            self._node.save_at = request.iteration
