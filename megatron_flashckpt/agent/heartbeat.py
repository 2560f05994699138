"""Renews the sign of life of a run, on the agent of its rank 0; see `agent.alive`.

While the run trains, its other files in `flashckpt/` are kept there, too.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time

import msgspec

from megatron_flashckpt.agent import alive
from megatron_flashckpt.agent.alive import INTERVAL_S, State
from megatron_flashckpt.agent.committer import Committer
from megatron_flashckpt.agent.node import Node
from megatron_flashckpt.agent.own_files import OwnFiles
from megatron_flashckpt.agent.save_requests import SaveRequests
from megatron_flashckpt.error_classes import may_pass
from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.file_format.run_object import RunObject

logger = logging.getLogger(__name__)

#: Longest wait of a leaving agent for storage to delete its sign of life.
_LAST_S = 2.0
#: Pauses before the deletion is repeated after a transient error.
_LAST_RETRIES_S = (0.1, 0.3, 0.6)


class Heartbeat:
    """Puts the object in a thread of its own, so that hung storage blocks no other work.

    Deletes it while the agent has nothing to do but to keep memory for a restart. Looks for
    requests to save, too.
    """

    def __init__(self, node: Node, committer: Committer) -> None:
        self._node = node
        self._committer = committer
        self._closing = False
        #: The last run that was opened here. Its rank 0 put its object before it told this agent.
        self._led = ""
        #: Runs whose objects this agent has to delete.
        self._to_delete: set[str] = set()
        self._own_files = OwnFiles()
        self._requests = SaveRequests(node, committer)
        self._renewed = 0
        self._trouble = ""
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Delete the object; give up if storage does not answer."""
        with self._node.changed:
            self._closing = True
            self._node.changed.notify_all()
        self._thread.join(_LAST_S)

    def _beat(self) -> None:
        shown: tuple[RunObject, State] | None = None
        while not self._closing:
            with self._node.changed:
                self._node.changed.wait_for(
                    functools.partial(self._differs_from, shown), INTERVAL_S
                )
                shown = self._to_show()
            self._try_to_show(shown)
            self._requests.look()
        for pause_s in _LAST_RETRIES_S:
            # Otherwise the next start waits until the run counts as silent.
            error = self._try_to_show(None)
            if error is None or not may_pass(error):
                return
            time.sleep(pause_s)

    def _differs_from(self, shown: tuple[RunObject, State] | None) -> bool:
        return self._closing or self._to_show() != shown

    def _to_show(self) -> tuple[RunObject, State] | None:
        """Return the run that this agent renews, and its state; None without one. Lock held."""
        run = self._node.run
        if run is None or not self._node.leads:
            return None
        ranks = self._node.ranks.values()
        if any(rank.connection is not None and rank.run == run.name for rank in ranks):
            return run, "training"
        return (run, "finishing") if self._committer.pending else None

    def _try_to_show(self, shown: tuple[RunObject, State] | None) -> Exception | None:
        """Put or delete the object; return the error of storage, which is logged once."""
        try:
            self._show(shown)
        except (FlashCkptError, OSError) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.warning("a start may take this run for dead: %s", error)
            return error
        self._trouble = ""
        return None

    def _show(self, shown: tuple[RunObject, State] | None) -> None:
        self._add_led()
        name = "" if shown is None else shown[0].name
        for run_name in self._to_delete - {name}:
            alive.forget(self._node.store, run_name)
            self._to_delete.remove(run_name)
        if shown is not None:
            run, state = shown
            self._renewed += 1
            self._to_delete.add(name)
            with self._node.changed:
                rank = self._node.ranks.get(0)
                trainer = None if rank is None or rank.left else rank.incarnations.served
            sign = alive.sign_of_life(name, state, os.getpid(), self._renewed, trainer)
            sign = msgspec.structs.replace(sign, is_saving=bool(self._committer.pending))
            alive.put(self._node.store, self._requests.announced(sign))
            if state == "training":
                self._own_files.keep(self._node.store, run)

    def _add_led(self) -> None:
        """Take over the object of a run, also if its trainers have left before it was renewed."""
        with self._node.changed:
            run = self._node.run
            if run is not None and self._node.leads and run.name != self._led:
                self._led = run.name
                self._to_delete.add(run.name)
