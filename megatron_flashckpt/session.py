"""What the shims share within a process: the checkpointers, by save directory.

Stock Megatron's functions have no object to hang state on, so there is exactly one module-level
holder, here.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import operator
import os
import sys
from typing import Any

from megatron_flashckpt import forks
from megatron_flashckpt.agent.protocol import Outcome
from megatron_flashckpt.checkpointer import Checkpointer
from megatron_flashckpt.config import Config, load_config
from megatron_flashckpt.errors import SaveFailedError
from megatron_flashckpt.loop_timer import LoopTimer
from megatron_flashckpt.megatron_lm import around
from megatron_flashckpt.megatron_lm.stock import checkpointing
from megatron_flashckpt.megatron_lm.writers import write_scalars
from megatron_flashckpt.scalars import save_scalars

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Open:
    checkpointer: Checkpointer
    announced: dict[int, around.AnnouncedSave] = dataclasses.field(default_factory=dict)
    checked: tuple[Any, ...] = ()
    """Model chunks and optimizer that passed the self-check last."""
    failures_in_a_row: int = 0

    def why_stop(self, failed: Outcome, config: Config) -> str | None:
        """Return why training must stop after a failed save; None: it goes on."""
        if config.on_failure == "raise":
            return failed.error
        allowed = config.failures_in_a_row
        if allowed is None or self.failures_in_a_row < allowed:
            return None
        return (
            f"{self.failures_in_a_row} saves in a row have failed, and 'failures_in_a_row' is "
            f"{allowed}; the last one, iteration {failed.iteration}: {failed.error}"
        )


class Session:
    """The checkpointers of this process."""

    def __init__(self, config: Config) -> None:
        self.config = config
        #: Whether there was a training step, and the saving of what it made was rehearsed.
        self.has_stepped = False
        self.loop_timer = LoopTimer()
        self._open: dict[str, _Open] = {}
        #: Keys of tensors with copies, and of those that differ, by save directory that was closed.
        self._known_copies: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
        self._fork_depth = forks.depth()

    def checkpointer(self, root: str) -> Checkpointer:
        """Return the checkpointer for save directory `root`, made on first use."""
        given, root = root, os.path.abspath(root)
        if root not in self._open:
            around.ask_for_memory_saves(checkpointing().get_args(), self.config.memory_interval)
            made = Checkpointer(given, self.config)
            if root in self._known_copies:
                # Megatron ends asynchronous saves before it saves for the last time.
                state = made.model_state
                state.copied_keys, state.differing_keys = self._known_copies.pop(root)
            self._open[root] = _Open(made)
        return self._open[root].checkpointer

    def is_checked(self, root: str, chunks: list[Any], optimizer: Any) -> bool:
        """Return whether these passed the self-check, as `note_checked` was told."""
        checked, asked = self._open[os.path.abspath(root)].checked, (*chunks, optimizer)
        return len(checked) == len(asked) and all(map(operator.is_, checked, asked))

    def note_checked(self, root: str, chunks: list[Any], optimizer: Any) -> None:
        self._open[os.path.abspath(root)].checked = (*chunks, optimizer)

    def announced(self, root: str, save: around.AnnouncedSave) -> None:
        """Remember what to say when `save` is committed."""
        self._open[os.path.abspath(root)].announced[save.iteration] = save

    def wait_copied(self) -> None:
        """Return when nothing is being copied: the state of the model may change."""
        for each in self._open.values():
            each.checkpointer.link.stager.wait_copied()

    def finalize(self, *, blocking: bool) -> None:
        """Report what became of the saves; with `blocking`, of all of them.

        Raises:
            SaveFailedError: a save failed and `on_failure` is `raise`, or `failures_in_a_row` did.
        """
        failures = []
        for each in self._open.values():
            if blocking and each.checkpointer.pending:
                around.announce_drain(checkpointing().get_args())
            outcomes = each.checkpointer.wait() if blocking else each.checkpointer.poll()
            # Whoever follows the log or the latest artifact must end up with the newest.
            for outcome in sorted(outcomes, key=lambda outcome: outcome.iteration):
                if not self._report(each, outcome):
                    each.failures_in_a_row += 1
                    failures.append(each.why_stop(outcome, self.config))
                elif not outcome.kept:  # what went to memory says nothing of storage
                    each.failures_in_a_row = 0
        if reasons := [reason for reason in failures if reason]:
            raise SaveFailedError("; ".join(reasons))

    def _report(self, each: _Open, outcome: Outcome) -> bool:
        """Log one outcome; return whether it is a success."""
        rank = each.checkpointer.rank
        own = each.checkpointer.traces.end(outcome.save_id)
        failures = each.failures_in_a_row + 1 if outcome.error is not None else 0
        write_scalars(lambda: save_scalars(outcome, own, failures), outcome.iteration)
        if outcome.kept:
            if rank == 0:
                print(
                    f"  flashckpt: iteration {outcome.iteration} kept in host memory, not in "
                    f"storage, after {outcome.seconds:.3f} s",
                    flush=True,
                )
            return True
        save = each.announced.pop(outcome.iteration, None)
        if outcome.error is None:
            if save is not None:
                around.announce_committed(checkpointing().get_args(), save)
            if rank == 0:
                print(
                    f"  flashckpt: iteration {outcome.iteration} durable after "
                    f"{outcome.seconds:.3f} s",
                    flush=True,
                )
            return True
        logger.error(
            "rank %d: iteration %d was not saved: %s; training goes on, the previous checkpoint is "
            "intact",
            rank,
            outcome.iteration,
            outcome.error,
        )
        return False

    def close(self, *, leave: bool) -> None:
        """Hang up; with `leave`, give the host memory back (no restart is expected)."""
        for root, each in self._open.items():
            state = each.checkpointer.model_state
            self._known_copies[root] = (state.copied_keys, state.differing_keys)
            each.checkpointer.close(leave=leave)
        self._open.clear()

    def at_exit(self) -> None:
        """Wait for pending saves, so that a job that ends right after its last save commits it.

        After an unhandled exception wait for no save: other ranks may be dead, this rank's GPU may
        hang, and a restart waits for this process to end. The agent finishes alone and keeps the
        slots.
        """
        if forks.depth() != self._fork_depth:  # a child of a data loader, whose parent still trains
            return
        crashed = getattr(sys, "last_value", None) is not None
        try:
            self.finalize(blocking=not crashed)
        except SaveFailedError as error:
            logger.error("%s", error)
        if crashed:
            self.abandon()
        else:
            self.close(leave=True)

    def abandon(self) -> None:
        """Hang up after a crash; the agent keeps the slots for a restart."""
        for opened in self._open.values():
            opened.checkpointer.abandon()
        self._open.clear()


def _make() -> Session:
    # Settings are read when training starts: a wrong one must not show up at iteration 1,000.
    made = Session(load_config())
    atexit.register(made.at_exit)
    return made


session: Session = _make()
