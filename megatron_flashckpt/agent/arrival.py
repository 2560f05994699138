"""A slot that is written while it fills: how far its trainer has come, and whose turn it is.

Whoever writes it waits here for the bytes that it needs next, and at the end for the doorbell: what
it has written does not count before. A trainer may also never get there, because it died or could
not copy: then the slot is withdrawn, and what was written of it goes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from megatron_flashckpt.agent.pending import PendingSave
from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.layout.cost import RankCost
from megatron_flashckpt.memory.slot import SlotHeader, SlotMeta
from megatron_flashckpt.tracing import phase


class WithdrawnError(FlashCkptError):
    """A slot will not be handed over."""


class Turns:
    """How many shards may be written at a time, beside those whose writers wait for a trainer.

    A trainer may be stopped in the middle of its copies, and the others' shards must not wait.
    """

    def __init__(self, number: int) -> None:
        self.free = number
        self.changed = threading.Condition()
        """Guards all that is said of arrivals, too."""


class Arrival:
    """What is there of one slot, for the one that writes it."""

    def __init__(self, header: SlotHeader, meta: SlotMeta, turns: Turns) -> None:
        self.header = header
        self.meta = meta
        self.save: PendingSave | None = None
        """What it is part of, once it is handed over."""
        self.is_withdrawn = False
        self.waited_s = 0.0
        """For how long its writer has waited for more."""
        self._turns = turns
        self._has_turn = False
        self._nbytes = 0

    @property
    def is_filling(self) -> bool:
        """Whether its trainer may still be copying."""
        return self.save is None

    @property
    def cost(self) -> RankCost | None:
        """What the save has taken on this rank until it was handed over, if that is known."""
        return None if self.save is None else self.save.costs.get(self.meta.rank)

    def reach(self, nbytes: int) -> None:
        """Let the first `nbytes` of the data be read."""
        with self._turns.changed:
            self._nbytes = max(self._nbytes, nbytes)
            self._turns.changed.notify_all()

    def hand_over(self, save: PendingSave) -> None:
        """Let all be read, and what is written of it count."""
        with self._turns.changed:
            self.save = save
            self._turns.changed.notify_all()

    def withdraw(self) -> None:
        """Have its writer stop, unless it was handed over before."""
        with self._turns.changed:
            self.is_withdrawn = self.save is None
            self._turns.changed.notify_all()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Write inside the context, when it is this slot's turn.

        Raises:
            WithdrawnError: there is nothing to write any more.
        """
        with self._turns.changed:
            self._take_turn(lambda: True)
        try:
            yield
        finally:
            with self._turns.changed:
                self._end_turn()

    def wait(self, nbytes: int) -> None:
        """Return when the first `nbytes` of the data may be read, and it is this slot's turn.

        Raises:
            WithdrawnError: they never may.
        """
        self._wait(lambda: self._nbytes >= nbytes)

    def wait_handed_over(self) -> None:
        """Return when all is there, and may count, and it is this slot's turn.

        Raises:
            WithdrawnError: it never will be.
        """
        self._wait(lambda: False)

    def _wait(self, is_there: Callable[[], bool]) -> None:
        def may_go_on() -> bool:
            return self.save is not None or is_there()

        with self._turns.changed:
            if self.is_withdrawn or not may_go_on():
                self._end_turn()
                started = time.monotonic()
                with phase("await copies"):
                    self._take_turn(may_go_on)
                self.waited_s += time.monotonic() - started

    def _take_turn(self, may_go_on: Callable[[], bool]) -> None:
        self._turns.changed.wait_for(
            lambda: self.is_withdrawn or (self._turns.free > 0 and may_go_on())
        )
        if self.is_withdrawn:
            raise WithdrawnError(
                f"iteration {self.header.iteration}: rank {self.meta.rank} has not staged it"
            )
        self._turns.free -= 1
        self._has_turn = True

    def _end_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._turns.free += 1
            self._turns.changed.notify_all()
