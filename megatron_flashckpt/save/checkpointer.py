"""The saves of one rank to one directory; `Checkpointer.save` lists the steps of a save."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import time

import torch

from megatron_flashckpt.agent.protocol import Outcome
from megatron_flashckpt.collectives import reduce_int, this_rank, world_size
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import (
    AgentError,
    AgentRefusedError,
    FlashCkptError,
    UnsupportedError,
)
from megatron_flashckpt.megatron_lm import optimizer_state
from megatron_flashckpt.megatron_lm.enumeration import Enumeration
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.memory.slot import Slot
from megatron_flashckpt.metrics import reported
from megatron_flashckpt.save import equal_settings
from megatron_flashckpt.save.copy_figures import CopyFigures
from megatron_flashckpt.save.hand_over import HandOver
from megatron_flashckpt.save.node_link import NodeLink
from megatron_flashckpt.save.peer_setup import connect_agents
from megatron_flashckpt.save.pending_saves import PendingSaves
from megatron_flashckpt.save.planner import Planner, SavePlan
from megatron_flashckpt.save.request import SaveReport, SaveRequest
from megatron_flashckpt.save.run_opener import RunOpener
from megatron_flashckpt.save.slot_acquisition import WAIT_SLICE_S, SlotAcquisition
from megatron_flashckpt.save.step_hook import StepHook
from megatron_flashckpt.storage.opening import absolute, refuse_unusable
from megatron_flashckpt.tracing import SAVE, Recorder, phase, recorder

_BUSY = (
    "previous saves are still being written and 'busy' is 'skip'; save less often or set "
    "'busy: wait'"
)
_NOT_BEGUN = "a rank could not begin this save, and 'busy' is 'skip'; that rank's error says why"


class _SkipReason(enum.IntEnum):
    """Reasons why a rank takes no part in a save. Of several ranks' reasons the greatest counts."""

    BUSY = 1
    """All slots of the rank hold saves that are being written, and `busy` is `skip`."""
    FAILED = 2


@dataclasses.dataclass(frozen=True)
class _PlannedSave:
    """The tensors that a save copies, their places, and the slot that receives them."""

    tensors: list[torch.Tensor]
    places: SavePlan
    slot: Slot


class Checkpointer:
    """Saves one rank's part of a job under `root`. Holds no global state.

    Every rank calls every method, on the training thread. Only `start_run`, methods of `runs`, and
    `save` under `busy: skip` communicate with other ranks.
    """

    def __init__(self, root: str, config: Config) -> None:
        """Set up saves under `root`: a directory shared by all nodes, which need not exist.

        Raises:
            ConfigError: no job can save to `root`.
        """
        refuse_unusable(root)
        self.root = absolute(root)
        self.config = config
        self.rank, self.world_size = this_rank(), world_size()
        self.model_state = ModelState(config.replicated, config.weights)
        self.link = NodeLink(self.root, self.rank, config)
        self.hook = StepHook(self.link.stager.before_change)
        self.runs = RunOpener(self.root, self.rank, self.world_size, self.link, config)
        #: True once `start_run` was called.
        self._has_begun = False
        self.planner = Planner(self.rank, self.world_size, self.link, self.model_state)
        self.saves = PendingSaves(self.root, self.rank, self.link)
        self._slots = SlotAcquisition(
            self.root, self.rank, self.world_size, config, self.link, self.saves
        )
        #: Identity of the last saved state, see `_state_identity`.
        self._last: tuple[int, int, bool] | None = None
        #: The last save and its number of steps, if that save does not go to storage.
        self._unwritten: tuple[SaveRequest, int] | None = None
        self._copies_hang = False

    # ------------------------------------------------------------------ before the first save

    def start_run(self) -> None:
        """Start the agent, and agree on an id of this start; later calls do nothing. Collective.

        With `redundancy` the agents of all nodes are also introduced to each other. This runs in a
        load or before the first step, so that no save needs a collective.

        Raises:
            ConfigError: settings that must be equal differ between ranks; on all ranks.
        """
        if self._has_begun:
            return
        if not self.runs.has_waited:  # otherwise a load has checked
            equal_settings.check(self.config)
        self._has_begun = True
        self.runs.agree()
        if self.config.redundancy == "none":
            self.link.prepare(None)
        else:
            connect_agents(self.link, self.rank, self.config)

    def dry_run(self, job: JobState) -> None:
        """Enumerate and plan as a save does; copy nothing. The first save then finds warm caches.

        The caches are the model's geometry, the plan, the imported modules, and a slab of the right
        size. Call this after the first training step, which creates the optimizer's state. A later
        change of the job is safe, because a plan is looked up by all that it covers. Waits while
        agent and memory are being prepared.

        Raises:
            UnsupportedError: the job holds state that cannot be saved.
        """
        # If the agent is gone, the save connects to another one.
        with contextlib.suppress(AgentError):
            nbytes, plan_nbytes = self.planner.dry_run(job, self.runs.run.name)
            self.link.make_room(nbytes, plan_nbytes)

    # ------------------------------------------------------------------ save

    def save(self, request: SaveRequest) -> SaveReport:
        """Stage this rank's part; return when training may continue. Start to read a save here.

        The steps stand in `_save`: enumerate this rank's pieces, plan, acquire a slot, copy. After
        the last copy, the copy thread hands the slot to the agent (`HandOver`), which persists and
        commits it. Tensors that only `optimizer.step()` changes may still be copied when this
        returns; the step waits for them. Later failures are reported as outcomes
        (`PendingSaves.poll`) on every rank of the node.

        Raises:
            UnsupportedError: the job holds state that cannot be saved; nothing was staged.
        """
        # The training loop's recorder also measures what Megatron does around this call. If the
        # loop waits until the save is durable, the record is sent before the loop continues.
        of_loop = None if request.must_wait else recorder()
        own = of_loop or Recorder()
        own.restart()
        with own.recording(), own.phase(SAVE):
            return self._save(request, own)

    def _save(self, request: SaveRequest, record: Recorder) -> SaveReport:
        if self._is_repeat(request):
            return SaveReport(request, record, is_repeat=True)
        save_id = self._begin(request)
        plan = self._planned(request, save_id)
        self._last = self._state_identity(request)
        if (refusal := self._skipped_by_all(request, plan)) is not None:
            return SaveReport(request, record, refusal=refusal)
        if isinstance(plan, _SkipReason):
            return SaveReport(request, record)
        if not request.memory_only:
            reported.clear()
        self.saves.begin(save_id, request.iteration)
        copies = self._stage(request, plan, record)
        if self._is_blocking(request):
            self.link.stager.wait_copied()
        return SaveReport(request, record, save_id, copies)

    def _state_identity(self, request: SaveRequest) -> tuple[int, int, bool]:
        """Return the identity of the state that `request` saves."""
        return request.iteration, self.hook.steps, request.memory_only

    def _is_repeat(self, request: SaveRequest) -> bool:
        """Return whether this state was saved before: Megatron may save its last state twice."""
        mark = self._state_identity(request)
        is_saved = self._last in (mark, (*mark[:2], False))
        return is_saved and request.rerun is None  # a step to rerun has more state

    def _begin(self, request: SaveRequest) -> str:
        """Wait for the copies of the last save; return the id of this save."""
        self.link.stager.wait()
        self.saves.process_failures()
        # Also if the optimizer is not saved: its steps change the weights.
        inner = optimizer_state.inner_optimizers(request.job.saved_optimizer)
        self.hook.install(request.job.optimizer, inner)
        self.runs.ensure_alone()
        save_id = self.runs.run.new_save_id(request.iteration, memory_only=request.memory_only)
        self.saves.expect(save_id, memory_only=request.memory_only)
        self._unwritten = (request, self.hook.steps) if request.memory_only else None
        return save_id

    def _planned(self, request: SaveRequest, save_id: str) -> _PlannedSave | _SkipReason:
        """Return the planned copies, or the reason to skip. A failure is recorded as an outcome.

        Raises:
            UnsupportedError: as `save`; the other ranks are informed.
        """
        try:
            return self._place(request, self.planner.enumerated(request), save_id)
        except Exception as error:
            if isinstance(error, UnsupportedError) or not isinstance(error, FlashCkptError):
                self._withdraw(request, save_id, error)
                raise
            self.saves.fail(request.iteration, save_id, str(error))
            return _SkipReason.FAILED

    def _withdraw(self, request: SaveRequest, save_id: str, error: Exception) -> None:
        """Let the other ranks end the save for which this rank raises `error`."""
        if self._may_skip(request):
            reduce_int(_SkipReason.FAILED, "max")  # the other ranks wait in this collective
        elif not request.memory_only:
            reason = f"{type(error).__name__}: {error}"
            self.saves.call_off(request.iteration, save_id, reason)

    def _skipped_by_all(self, request: SaveRequest, plan: _PlannedSave | _SkipReason) -> str | None:
        """Return why all ranks skip this save, or None. Collective under `busy: skip`."""
        if not self._may_skip(request):
            return None
        # A failed rank takes part, too: the others wait for it.
        reason = reduce_int(plan if isinstance(plan, _SkipReason) else 0, "max")
        if not reason:
            return None
        # The next call for this state saves it, on all ranks. It overwrites a slot that this call
        # left STAGING before any complete one.
        self._last, self._unwritten = None, (request, self.hook.steps)
        return _BUSY if reason == _SkipReason.BUSY else _NOT_BEGUN

    def _may_skip(self, request: SaveRequest) -> bool:
        return self.config.busy == "skip" and not request.must_wait

    def _is_blocking(self, request: SaveRequest) -> bool:
        return request.blocking or self.config.staging == "blocking"

    def _place(
        self, request: SaveRequest, enumeration: Enumeration, save_id: str
    ) -> _PlannedSave | _SkipReason:
        """Plan and acquire a slot; if the agent is gone, from its successor."""
        may_skip = self._may_skip(request)
        for client in (self.link.current, None):
            try:
                plan = self.planner.plan(enumeration)
                with phase("acquire slot"):
                    slot = self._slots.acquire(
                        *(request, plan.layout, save_id, self.runs.run.ancestors), may_skip=may_skip
                    )
            except AgentRefusedError:
                raise  # the agent still holds earlier saves, which another agent would not have
            except AgentError as error:
                if client is None:
                    raise
                self.saves.replace_lost_agent(client, error)
            else:
                if slot is None:
                    return _SkipReason.BUSY
                return _PlannedSave(enumeration.tensors, plan, slot)
        raise AssertionError

    def _stage(self, request: SaveRequest, plan: _PlannedSave, record: Recorder) -> CopyFigures:
        """Begin to copy; the copy thread hands over the slot after the last copy."""
        blocking = self._is_blocking(request)
        hand_over = HandOver(
            rank=self.rank,
            saves=self.saves,
            client=self.link.client(),
            slot=plan.slot,
            header=plan.slot.header,
            recorder=record,
            plan=self.planner.plans.take_origin(),
            memory_only=request.memory_only,
        )
        # Training waits for early copies, so this thread makes them: no other has to wake up.
        early, late = plan.places.early, plan.places.late
        if blocking:
            early, late = [*early, *late], []
        return self.link.stager.stage(
            *(plan.tensors, early, late, hand_over), data_offset=plan.slot.data_offset
        )

    # ------------------------------------------------------------------ after a save

    def write_last(self) -> SaveReport | None:
        """Save the last state to storage at the end of training, if the last save did not.

        The last save was skipped, or was for memory only. Returns None if there is nothing to do,
        or the model has changed since. Every rank calls this; it is not collective.

        Raises:
            UnsupportedError: as `save`.
        """
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is None or unwritten[1] != self.hook.steps:
            return None
        request = unwritten[0]
        if request.memory_only and not self.config.agent.persist_on_leave:
            return None
        self._slots.ends_at = time.monotonic() + self.config.drain_timeout_s
        if not self.link.stager.wait(self.config.drain_timeout_s):
            return None  # a GPU hangs; `wait` reports this
        return self.save(dataclasses.replace(request, memory_only=False, must_wait=True))

    def end_saves(self) -> None:
        """Wait until no save is pending; `wait` and `saves.poll` report the outcomes later.

        A load that training continues from calls this first.
        """
        if self.pending:
            self.saves.put_back(self.wait())

    def wait(self, timeout_s: float | None = None) -> list[Outcome]:
        """Wait until no save is pending; return the outcomes.

        A save that is pending after `timeout_s` (default: `drain_timeout_s`) becomes a failure.
        """
        timeout_s = self.config.drain_timeout_s if timeout_s is None else timeout_s
        deadline = min(time.monotonic() + timeout_s, self._slots.ends_at)
        self._slots.ends_at = math.inf
        self._copies_hang = not self.link.stager.wait(max(deadline - time.monotonic(), 0.0))
        outcomes = self.saves.poll()
        while self.saves:
            left = deadline - time.monotonic()
            if left <= 0:
                return outcomes + self.saves.give_up(timeout_s)
            outcomes += self.saves.poll(min(left, WAIT_SLICE_S))
        return outcomes

    @property
    def pending(self) -> bool:
        """True while a save of this rank has no outcome."""
        return bool(self.saves)

    def close(self, *, leave: bool = True) -> bool:
        """Disconnect. With `leave` the agent frees this rank's memory; else it serves a restart.

        Call `wait` first: pending outcomes are lost here, the saves are not.

        Returns:
            True if there is an agent, which finishes the staged saves.
        """
        if self._copies_hang:
            has_agent = self.link.current is not None
            self.abandon()
            return has_agent
        self.saves.close()
        return self.link.close(leave=leave)

    def abandon(self) -> None:
        """Disconnect after a crash of training, within seconds, even if the GPU hangs.

        What this rank knows of failed saves is told before.
        """
        try:
            self.saves.close()
        finally:
            self.link.abandon()
