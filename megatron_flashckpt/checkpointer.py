"""Checkpoints of a training loop of its own, on megatron-core alone.

`megatron_flashckpt.Checkpointer` is this module's class. It needs neither `megatron.training` nor
Megatron's args: everything that it saves is passed to it.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import sys
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from megatron_flashckpt import exit_status, forks
from megatron_flashckpt.agent.protocol import Outcome
from megatron_flashckpt.config import load_config
from megatron_flashckpt.errors import SaveFailedError, in_words_of_loop
from megatron_flashckpt.file_format.file_names import RELEASE
from megatron_flashckpt.load import resume, training_state
from megatron_flashckpt.load.load_policy import LoadPolicy
from megatron_flashckpt.load.loader import LoadedCheckpoint
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.job_state import JobState, unwrapped
from megatron_flashckpt.megatron_lm.side_state import OWN_STATE
from megatron_flashckpt.save import equal_settings
from megatron_flashckpt.save.checkpointer import Checkpointer as _RankSaves
from megatron_flashckpt.save.open_checkpointer import OpenCheckpointer, reports_on
from megatron_flashckpt.save.request import SaveRequest
from megatron_flashckpt.save.save_reports import say
from megatron_flashckpt.save.startup import Startup
from megatron_flashckpt.storage.opening import absolute, refuse_unusable
from megatron_flashckpt.waits import wait_of

logger = logging.getLogger(__name__)

#: Checkpointers of this process with an optimizer, by save directory.
_training: weakref.WeakValueDictionary[str, Checkpointer] = weakref.WeakValueDictionary()


@dataclasses.dataclass(frozen=True)
class Resumed:
    """The checkpoint from which a loop resumes."""

    iteration: int
    """The iteration that was saved; 0 with `weights_only`."""
    side: dict[str, Any]
    """The side state that `save` was given; empty with `weights_only`."""
    source: Literal["memory", "storage"]


@dataclasses.dataclass(frozen=True)
class SaveResult:
    """Result of a save."""

    iteration: int
    error: str | None
    """Reason of a failure, with place and remedy; None for a success."""
    seconds: float
    """Time from staged on this node until the save was durable or had failed."""
    in_memory_only: bool
    """True for a save with `memory_only`."""


class Checkpointer:
    """Saves and loads the model of this rank in `directory`; each has its own state.

    All ranks make it after megatron-core's parallel state, and call its methods in the same order.
    Only `load`, and `save` under `busy: skip`, communicate. Used as a context manager it is closed
    at the end; after an exception it leaves its last save in memory to the restarted job. If it was
    not closed, and the same process begins to train again with another one for `directory`, the
    other one takes its place in the same way.
    """

    def __init__(
        self,
        directory: str,
        model: Sequence[Any],
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        save_optimizer: bool = True,
    ) -> None:
        """Set up; nothing is read from `directory` except the newest checkpoint's name, on rank 0.

        Args:
            directory: shared by all nodes, or a URL; need not exist.
            model: this rank's chunks, with or without megatron-core's wrappers.
            optimizer: megatron-core's; None for a model that is not trained.
            scheduler: megatron-core's, or any object with `state_dict` and `load_state_dict`.
            save_optimizer: False saves weights only.

        Raises:
            ConfigError: a setting is wrong, or no job can save to `directory`.
        """
        self._config = load_config()
        self._model = list(model)
        self._optimizer, self._scheduler = optimizer, scheduler
        self._saves_optimizer = save_optimizer
        saves = _RankSaves(directory, self._config)
        if optimizer is not None:
            former = _training.get(saves.root)
            if former is not None and former._leave():
                former._saves.close(leave=False)
            _training[saves.root] = self
        self._saves: _RankSaves = saves
        self._open = OpenCheckpointer(
            saves,
            reports_on(saves.root, saves.rank),
            Startup(saves, saves.model_state.note_nodes),
        )
        #: Results that a save has waited for; the next `poll` returns them.
        self._unreturned: list[SaveResult] = []
        #: True from the load until a dry run has prepared the first save.
        self._is_dry_run_due = False
        self._is_closed = False
        self._fork_depth = forks.depth()
        exit_status.watch()
        atexit.register(self._end)

    @in_words_of_loop()
    def load(
        self,
        directory: str | None = None,
        *,
        step: int | None = None,
        weights_only: bool = False,
        strict: bool = True,
        timeout_s: float | None = None,
    ) -> Resumed | None:
        """Fill model, optimizer, scheduler and random state. Collective; call it before training.

        It loads the newest checkpoint that all ranks still have in host memory, else the newest in
        storage, under any parallel layout. A loop calls it in a fresh start, too: it also checks
        that the job can be saved, and prepares the first save.

        Args:
            directory: load from another one than that of the saves, which do not continue its
                history.
            step: load this iteration and no other.
            weights_only: begin a new training with these weights.
            strict: False keeps the values of missing state, and leaves out unexpected state.
            timeout_s: of the job's collectives; retries of storage end before.

        Returns:
            None if there is no checkpoint.

        Raises:
            FlashCkptError: on every rank, with the same class; no file was changed.
        """
        job, startup = self._job({}), self._open.startup
        trains = self._optimizer is not None
        directory = self._saves.root if directory is None else directory
        refuse_unusable(directory)
        directory = absolute(directory)
        self.wait_until_staged()
        if trains:
            startup.check(job)
        else:
            equal_settings.check(self._config)
        result = resume.load(
            resume.LoadCall(
                job=job,
                directory=directory,
                policy=LoadPolicy(
                    step=step,
                    weights_only=weights_only,
                    strict=strict,
                    timeout_s=timeout_s,
                ),
                config=self._config,
                model_state=self._saves.model_state,
                saves=self._saves,
                resumes=trains and directory == self._saves.root,
                announce=self._say_loading,
                apply=self._apply,
            )
        )
        resumed = None if result.loaded is None else self._resumed(result.loaded, result.policy)
        if trains:
            startup.prepare(job)
            self._is_dry_run_due = True
        return resumed

    def save(
        self, iteration: int, side: Mapping[str, Any] | None = None, *, memory_only: bool = False
    ) -> None:
        """Stage a checkpoint of this rank, and return when training may continue.

        It returns later if the setting `wait` or `megatron_flashckpt.waiting` demands that. The
        agent makes the checkpoint durable; `poll` reports it. Until the copies have ended, only
        `optimizer.step()` may change tensors (see `wait_until_staged`).

        Args:
            iteration: equal on all ranks.
            side: the loop's own state: numbers, text, tensors, and lists and dicts of them. It must
                be equal on all ranks; rank 0 saves it.
            memory_only: keep the save in host memory.

        Raises:
            SaveFailedError: the call waited for a save that failed, and a setting stops training.
            UnsupportedError: the job or `side` holds what this release does not save.
        """
        wait = wait_of(self._config.wait)
        until_durable = wait == "durable" and not memory_only
        job = self._job(side or {})
        self._open.startup.check_alone(job)
        # Without an optimizer, no step would wait for the copies.
        blocking = wait == "staged" or self._optimizer is None
        request = SaveRequest(
            iteration, job, memory_only=memory_only, blocking=blocking, must_wait=until_durable
        )
        report = self._saves.save(request)
        self._open.saved(report)
        if until_durable:
            self._unreturned = self._settle(blocking=True)

    def poll(self) -> list[SaveResult]:
        """Log and return the results since the last call. Call it after every step; never waits.

        Raises:
            SaveFailedError: a save failed, and `on_failure`, `failures_in_a_row` or
                `stop_on_failed_first_save` stops training.
        """
        if self._is_dry_run_due:
            self._is_dry_run_due = not self._open.startup.dry_run(self._job({}))
        return self._settle(blocking=False)

    def save_requested(self, iteration: int) -> bool:
        """Note that `iteration` is trained; return whether `flashckpt save-now` wants it saved.

        Call it after every step, on all ranks; it costs microseconds. A rank may hear of a request
        too late, so a loop must not wait for other ranks, or for the commit, after such a save:
        always False under `wait: durable`.
        """
        if self._config.wait == "durable":
            return False
        return self._saves.link.save_requested(iteration)

    def wait_until_staged(self) -> None:
        """Wait until all copies have ended, so that tensors may change outside the step."""
        self._saves.link.stager.wait_copied()

    def wait_until_durable(self) -> list[SaveResult]:
        """Wait until no save is pending; return as `poll`. A save ends after `drain_timeout_s`.

        Raises:
            SaveFailedError: as `poll`.
        """
        return self._settle(blocking=True)

    def close(self) -> None:
        """Make the last save durable, and free the host memory. Later calls do nothing.

        Raises:
            SaveFailedError: as `poll`; or the last save is not durable, and
                `exit_nonzero_unless_durable` is set.
        """
        if not self._leave():
            return
        try:
            self._open.write_last()
            self._settle(blocking=True, last=True)
        finally:
            self._open.close(leave=True)
        failure = self._open.reports.last_failure()
        if failure is not None and self._config.exit_nonzero_unless_durable:
            held = self._open.reports.where_held(self._config.agent, None)
            raise SaveFailedError(f"{failure}{held}")

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        elif self._leave():
            # Other ranks may be dead, and this rank's GPU may hang: do not wait.
            self._saves.abandon()

    # ------------------------------------------------------------------

    def _job(self, side: Mapping[str, Any]) -> JobState:
        tensor, pipeline, expert = parallel.model_sizes()
        return JobState(
            chunks=unwrapped(self._model),
            wrapped=self._model,
            optimizer=self._optimizer,
            saves_optimizer=self._saves_optimizer,
            scheduler=self._scheduler,
            common={OWN_STATE: dict(side)},
            description={
                "world_size": self._saves.world_size,
                "tensor_model_parallel_size": tensor,
                "pipeline_model_parallel_size": pipeline,
                "expert_model_parallel_size": expert,
                "data_parallel_size": parallel.data_parallel()[0],
            },
            entry_point="through megatron_flashckpt.Checkpointer",
        )

    def _say_loading(self, directory: str | None, iteration: int) -> None:
        name = "the release" if iteration == RELEASE else f"iteration {iteration}"
        say(self._saves.rank, f"{name} is loaded from {directory}")

    def _apply(self, loaded: LoadedCheckpoint, policy: LoadPolicy) -> None:
        """Set all state outside of tensors, except for `side`."""
        rank = self._saves.rank
        model_state = self._saves.model_state
        for change in training_state.apply(self._job({}), policy, model_state, loaded):
            say(rank, f"{change}, as the checkpoint says")
        if training_state.takes_weights_only(policy, loaded):
            return
        if loaded.side.rank_state is None:
            say(
                rank,
                "tensor or pipeline parallel size differs from the checkpoint's: the random "
                "generators keep the states of this job's seed",
            )
        training_state.apply_random_state(policy, loaded)

    def _resumed(self, loaded: LoadedCheckpoint, policy: LoadPolicy) -> Resumed:
        origin, common = loaded.origin, loaded.side.common
        say(
            self._saves.rank,
            f"iteration {origin.iteration} was restored from {origin.source}: "
            f"{resume.summary(loaded)}",
        )
        if origin.source == "storage":
            self._open.reports.note_durable(origin.iteration)
        if training_state.takes_weights_only(policy, loaded):
            return Resumed(0, {}, origin.source)
        return Resumed(common["iteration"], common.get(OWN_STATE, {}), origin.source)

    def _settle(self, *, blocking: bool, last: bool = False) -> list[SaveResult]:
        """Report the outcomes since the last call; return all results that no caller has."""
        outcomes = self._open.collect(blocking=blocking)
        reason = self._open.report(outcomes, last=last)
        if reason is not None:
            raise SaveFailedError(reason)
        results = [*self._unreturned, *map(_result, outcomes)]
        self._unreturned = []
        return results

    def _leave(self) -> bool:
        """Return True once, in the process that made this object; a forked child has no agent."""
        if self._is_closed or forks.depth() != self._fork_depth:
            return False
        self._is_closed = True
        atexit.unregister(self._end)
        return True

    def _end(self) -> None:
        """Close at the exit of a process that has not."""
        if getattr(sys, "last_value", None) is not None:
            if self._leave():
                self._saves.abandon()
            return
        try:
            self.close()
        except SaveFailedError as error:
            logger.error("%s", error)
            if self._config.exit_nonzero_unless_durable and exit_status.is_success():
                exit_status.fail()


def _result(outcome: Outcome) -> SaveResult:
    return SaveResult(outcome.iteration, outcome.error, outcome.seconds, outcome.kept)
