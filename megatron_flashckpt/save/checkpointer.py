"""The facade: stage, hand over, poll, wait, close. One object per save directory and rank.

DESIGN's "Saving, step by step" is `Checkpointer.save`, line by line; what follows it runs in the
copy thread (`_hand_over`) and in the agent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import time
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from megatron_flashckpt.agent.protocol import Outcome
from megatron_flashckpt.collectives import reduce_int
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import (
    AgentError,
    AgentRefusedError,
    ConfigError,
    FlashCkptError,
    SaveFailedError,
    UnsupportedError,
)
from megatron_flashckpt.failpoints import reach
from megatron_flashckpt.layout.template import Layout, PlanCache, PlanCounters
from megatron_flashckpt.megatron_lm import optimizer_state, parallel, side_state
from megatron_flashckpt.megatron_lm.copy_check import Comparison, CopyCheck
from megatron_flashckpt.megatron_lm.cutting import LocalPiece
from megatron_flashckpt.megatron_lm.job_description import describe
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.memory.runs import Copy
from megatron_flashckpt.memory.slot import EMPTY_HEADER, EncodedMeta, Slot, SlotHeader, SlotState
from megatron_flashckpt.metrics import reported
from megatron_flashckpt.save import claiming, run_id
from megatron_flashckpt.save.agent_link import NodeLink
from megatron_flashckpt.save.gc_pause import held_off
from megatron_flashckpt.save.outcomes import Outstanding
from megatron_flashckpt.save.peer_setup import introduce
from megatron_flashckpt.save.reports import level_on
from megatron_flashckpt.save.request import SaveReport, SaveRequest
from megatron_flashckpt.save.shared_templates import SharedTemplates
from megatron_flashckpt.save.step_hook import StepHook
from megatron_flashckpt.tracing import SAVE, OpenTraces, Recorder, phase

logger = logging.getLogger(__name__)

_WAIT_SLICE_S = 5.0
#: Seconds that a staged slot waits for the training loop, so that its record has the loop's wait.
#: The loop continues within milliseconds, unless other ranks are late.
_LOOP_S = 1.0
_BUSY = (
    "previous saves are still being written and 'busy' is 'skip'; save less often or set "
    "'busy: wait'"
)
_NOT_BEGUN = "a rank could not begin it, and 'busy' is 'skip'; the error of that rank says why"


class Checkpointer:
    """Saves one rank's part of a job under `root`. A context manager; no globals.

    Every method is called by every rank, on the training thread; none communicates, except
    `start_run`, and `save` under `busy: skip`.
    """

    def __init__(self, root: str, config: Config) -> None:
        """Args: `root`: a directory, shared by all nodes; need not exist.

        Raises:
            ConfigError: it is something else.
        """
        if "://" in str(root):  # Megatron's own tests give paths
            # It would become a directory of that name, on a disk of each node.
            raise ConfigError(
                f"{root}: is not a path, and there is no object store to save to yet; mount it, "
                "or save to a shared file system"
            )
        self.root = os.path.abspath(root)
        self.config = config
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.model_state = ModelState(config.replicated, config.weights)
        self.link = NodeLink(self.root, self.rank, config)
        self.hook = StepHook(self.link.stager.before_change)
        self.run = run_id.Run()
        #: Whether `claim`, and `start_run`, were called.
        self._has_claimed = self._has_begun = False
        self._templates = SharedTemplates(self.link)
        self._plans = PlanCache(self._templates.fetch, self._templates.publish)
        self._outstanding = Outstanding(self.root, self.rank, self.link)
        self._copy_check = CopyCheck(self.model_state, self.rank)
        self._last: tuple[int, int, bool] | None = None
        #: The last save and the steps until then, if nothing of it goes to storage.
        self._unwritten: tuple[SaveRequest, int] | None = None
        self._copies_hang = False
        #: When the job's end stops waiting for saves; `time.monotonic`. Infinite: it goes on.
        self._ends_at = math.inf

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counters(self) -> PlanCounters:
        """How often this rank's layouts were cached, shared through the agent, or computed."""
        return self._plans.counters

    @property
    def traces(self) -> OpenTraces:
        """What this rank recorded of the saves whose outcomes are still to be told."""
        return self._outstanding.traces

    # ------------------------------------------------------------------ before the first save

    def claim(self) -> None:
        """Become the writer of the save directory, unless that was done. Collective.

        Raises:
            OtherWriterError: another run writes there.
        """
        if not self._has_claimed:
            known = self.run.id
            run = claiming.begin(self.link, self.root, self.config, known)
            self._has_claimed = True
            if run != known:
                self.run.begin(run)

    def agree(self) -> str:
        """Return the id of this run, on which all ranks agree in the first call. Collective.

        The id tells this run's commit records from those of an earlier one.
        """
        if self.run.id is None:
            self.run.begin(run_id.agreed())
        assert self.run.id is not None
        return self.run.id

    def start_run(self) -> None:
        """Start the agent, and agree on the id of this run, unless that was done. Collective.

        With `redundancy` the agents of all nodes get to know each other, too. A load and the first
        iteration are the occasions, so that no save has to talk.
        """
        if self._has_begun:
            return
        self._has_begun = True
        self.agree()
        if self.config.redundancy == "none":
            self.link.prepare(None)
        else:
            introduce(self.link, self.rank, self.config)

    def dry_run(self, chunks: list[Any], optimizer: Any, args: Any) -> bool:
        """Enumerate and plan as a save does, so that the first save finds what this leaves.

        It leaves the model's geometry, the plan, what Python imports on the way, and a slab with
        enough room. It comes after the first training step, which makes the optimizer's state. If
        the job has changed by then, the save sees that: a plan is looked up by all that it covers.

        Returns:
            False if agent and memory are still being made ready; ask again.

        Raises:
            UnsupportedError: the job holds state that cannot be saved.
        """
        if self.link.is_preparing:
            return False
        ordered = self._ordered(chunks, optimizer, args, rerun=None)
        over_nodes = self._templates.over_nodes(self.run.id)
        # If the agent is gone, the save finds another one.
        with contextlib.suppress(AgentError), held_off(), over_nodes:
            layout = self._plans.layout([local.piece for local in ordered])
            self.link.make_room(layout.nbytes, len(layout.encoded_template))
        return True

    # ------------------------------------------------------------------ save

    def save(self, request: SaveRequest) -> SaveReport:
        """Stage this rank's part; return when training may go on.

        What only `optimizer.step()` changes may still be copied: the step waits for it. Failures
        after (and of) the hand-over are reported by `poll`, on every rank of the node.

        Raises:
            UnsupportedError: the job holds state that cannot be saved; nothing was staged.
        """
        trace = Recorder(in_loop=request.in_loop)
        with trace.recording(), trace.phase(SAVE):
            return self._save(request, trace)

    def _save(self, request: SaveRequest, trace: Recorder) -> SaveReport:
        mark = (request.iteration, self.hook.steps, request.memory_only)
        if self._last in (mark, (*mark[:2], False)):
            # Megatron may save the same iteration twice (at the interval and at the end).
            return SaveReport(request.iteration, 0.0, 0, trace, skipped=True, is_repeat=True)
        self.link.stager.wait()
        self._outstanding.settle()
        self.hook.install(request.optimizer, optimizer_state.inner_optimizers(request.optimizer))
        if self.run.id is None:
            self.run.begin(run_id.from_store(self.root))
        save_id = self.run.new_save_id()
        self._outstanding.expect(save_id, memory_only=request.memory_only)
        self._unwritten = (request, self.hook.steps) if request.memory_only else None
        slot: Slot | None = None
        comparison: Comparison | None = None
        failed = False
        try:
            # 1. Tensors are enumerated afresh; only layouts are cached.
            ordered, comparison = self._enumerated(request)
            # 2. The plan. 3. A free slot.
            layout, slot = self._place(request, ordered, comparison, save_id)
        except Exception as error:
            if isinstance(error, UnsupportedError) or not isinstance(error, FlashCkptError):
                self._withdraw(request, save_id, error)
                raise
            failed = True
            self._outstanding.fail(request.iteration, save_id, str(error))
        self._last = mark
        # A rank that failed takes part too, or the others would wait for it.
        if self._may_skip(request) and (why := reduce_int((slot is None) + failed, "max")):
            if slot is not None:
                slot.set_header(EMPTY_HEADER)
            # All ranks alike: if training saves this state again, it is saved.
            self._last, self._unwritten = None, (request, self.hook.steps)
            refusal = _BUSY if why == 1 else _NOT_BEGUN
            return SaveReport(request.iteration, trace.age_s, 0, trace, True, refusal)
        if slot is None:
            return SaveReport(request.iteration, trace.age_s, 0, trace, skipped=True)
        if not request.memory_only:
            reported.clear()
        self._outstanding.begin(save_id, request.iteration, trace)
        # 4. Stage.
        self._stage(ordered, comparison, layout, slot, request, trace)
        if self._is_blocking(request):
            self.link.stager.wait_copied()
        return SaveReport(request.iteration, trace.age_s, layout.nbytes, trace)

    def write_last(self) -> SaveReport | None:
        """Save to storage what the last save has not put there, because training ends here.

        That save was skipped, or was for memory only. Returns None if there is nothing to do, or
        the model has changed since. Every rank calls it, without a collective.

        Raises:
            UnsupportedError: as `save`.
        """
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is None or unwritten[1] != self.hook.steps:
            return None
        request = unwritten[0]
        if request.memory_only and not self.config.agent.persist_on_leave:
            return None
        self._ends_at = time.monotonic() + self.config.drain_timeout_s
        if not self.link.stager.wait(self.config.drain_timeout_s):
            return None  # a GPU hangs; `wait` says so
        return self.save(
            dataclasses.replace(request, memory_only=False, must_wait=True, in_loop=False)
        )

    def _withdraw(self, request: SaveRequest, save_id: str, error: Exception) -> None:
        """Let the other ranks end a save that this rank raises `error` of."""
        if self._may_skip(request):
            reduce_int(2, "max")  # they wait in it
        elif not request.memory_only:
            said = f"rank {self.rank}: {type(error).__name__}: {error}"
            self._outstanding.call_off(request.iteration, save_id, said)

    def _may_skip(self, request: SaveRequest) -> bool:
        return self.config.busy == "skip" and not request.must_wait

    def _is_blocking(self, request: SaveRequest) -> bool:
        return request.blocking or self.config.staging == "blocking"

    def _enumerated(self, request: SaveRequest) -> tuple[list[LocalPiece], Comparison | None]:
        """Return all pieces that this rank saves, in layout order, and what it sums up.

        Raises:
            UnsupportedError: the job holds state that cannot be saved.
            SaveFailedError: CUDA has no memory for a temporary copy, or fails.
        """
        try:
            with phase("enumerate"):
                ordered = self._ordered_of(request)
                with held_off():
                    begun = self._copy_check.begin(request.chunks, request.optimizer, ordered)
                return ordered, begun
        except (torch.AcceleratorError, torch.OutOfMemoryError) as error:
            raise SaveFailedError(f"rank {self.rank}: not staged: {error}") from error

    def _ordered_of(self, request: SaveRequest) -> list[LocalPiece]:
        rerun = None
        if request.has_rerun_machine:
            rerun = side_state.rerun_state(request.data_iterator)
        return self._ordered(request.chunks, request.optimizer, request.args, rerun)

    def _ordered(
        self, chunks: list[Any], optimizer: Any, args: Any, rerun: Any
    ) -> list[LocalPiece]:
        """Return all that this rank saves, in layout order."""
        with held_off():
            geometry = self.model_state.geometry(chunks)
            pieces = self.model_state.owned(geometry, chunks, optimizer)
            save_rng = not getattr(args, "no_save_rng", False)
            own = side_state.rank_state(chunks, geometry, optimizer, rerun, save_rng=save_rng)
            pieces.append(side_state.frame(own, self.rank, self.world_size))
            return [pieces[i] for i in self._plans.order([local.piece for local in pieces])]

    def _place(
        self,
        request: SaveRequest,
        ordered: list[LocalPiece],
        comparison: Comparison | None,
        save_id: str,
    ) -> tuple[Layout, Slot | None]:
        """Return the plan and a slot; if the agent turns out to be gone, another agent's."""
        for client in (self.link.current, None):
            try:
                with phase("plan"), held_off():
                    layout = self._plans.layout([local.piece for local in ordered])
                with phase("acquire slot"):
                    return layout, self._acquire(request, layout, comparison, save_id)
            except AgentRefusedError:
                raise  # another agent would not have what this one was given
            except AgentError as error:
                if client is None:
                    raise
                self._outstanding.lose_agent(client, error)
        raise AssertionError

    def _acquire(
        self, request: SaveRequest, layout: Layout, comparison: Comparison | None, save_id: str
    ) -> Slot | None:
        """Return a slot that says what it will hold; None if all are busy and 'busy' is 'skip'."""
        common = self._common_state(request) if self.rank == 0 else b""
        meta = msgspec.msgpack.encode(
            EncodedMeta(
                root=self.root,
                rank=self.rank,
                world_size=self.world_size,
                coordinates=parallel.coordinates(),
                template_fingerprint=layout.template_fingerprint,
                template=msgspec.Raw(layout.encoded_template),
                placement=layout.placement,
                common=common,
                description=describe(request.args),
                retain_interval=getattr(request.args, "save_retain_interval", None),
                retention=self.config.retention,
                metrics=reported.current(),
                differing=self.model_state.differing_here(request.chunks),
                sums=None if comparison is None else comparison.room,
            )
        )
        slab = self.link.ensure_slab(layout.nbytes, len(meta))
        self._outstanding.settle()
        client = self.link.client()
        index = client.acquire(request.iteration, save_id, 0.0)
        while index < 0:
            if self._may_skip(request):
                return None
            level = level_on(self.rank, logging.INFO)
            logger.log(level, "iteration %d: waiting for a free slot", request.iteration)
            self._outstanding.put_back(self.poll())  # for what it logs
            left_s = self._ends_at - time.monotonic()
            if left_s <= 0:
                raise SaveFailedError(
                    f"no slot became free within {self.config.drain_timeout_s:g} s: earlier "
                    "saves are still being written; raise 'drain_timeout_s' to wait longer"
                )
            index = client.acquire(request.iteration, save_id, min(left_s, _WAIT_SLICE_S))
        slot = slab.slots[index]
        reach("save.granted")
        slot.set_header(
            SlotHeader(SlotState.STAGING, request.iteration, save_id, len(meta), layout.nbytes)
        )
        slot.set_meta(meta)
        reach("save.staging")
        return slot

    @staticmethod
    def _common_state(request: SaveRequest) -> bytes:
        state = side_state.common_state(
            request.args,
            request.iteration,
            request.scheduler if request.optimizer is not None else None,
            request.floating_point_operations,
        )
        return side_state.encode_common(state)

    def _stage(
        self,
        ordered: list[LocalPiece],
        comparison: Comparison | None,
        layout: Layout,
        slot: Slot,
        request: SaveRequest,
        trace: Recorder,
    ) -> None:
        client = self.link.client()
        staging = slot.header
        save_id = staging.save_id
        data_offset = slot.data_offset
        # What training waits for anyhow is copied here: no other thread has to wake up for it.
        blocking = self._is_blocking(request)
        plan = self._plans.take_origin()
        with held_off():
            copies = [
                Copy(local.tensor, data_offset + item.byte_offset, blocking or local.early)
                for local, item in zip(ordered, layout.template.items, strict=True)
            ]

        def hand_over(seconds: float, error: BaseException | None) -> None:
            # 5. Header, then doorbell: the agent does the rest (6 and 7).
            try:
                if error is not None:
                    raise SaveFailedError(f"copying to host memory failed: {error}") from error
                reach("stage.copied")
                if slot.header != staging:
                    raise SaveFailedError(
                        "the agent discarded the slot during the copy; this rank had hung up"
                    )
                if comparison is not None:
                    comparison.write(slot, layout)
                state = SlotState.KEPT if request.memory_only else SlotState.STAGED
                slot.set_header(msgspec.structs.replace(staging, state=state))
                reach("stage.staged")
                staged_s = trace.age_s
                trace.await_loop(_LOOP_S)
                cost = trace.staged_cost(staged_s, plan, blocking=blocking)
                with phase("doorbell"):
                    client.staged(slot.index, cost, trace.first_sent())
                self._outstanding.handed_over(save_id)
                reach("stage.rung")
                logger.log(
                    level_on(self.rank, logging.INFO),
                    "rank %d: staged iteration %d, %d bytes in %.3f s",
                    self.rank,
                    request.iteration,
                    layout.nbytes,
                    seconds,
                )
            except AgentRefusedError as failure:
                slot.set_state(SlotState.FAILED)
                self._outstanding.broke(save_id, failure)
            except AgentError as failure:
                # Staged all the same: the next agent takes it over.
                self._outstanding.found_silent(client, failure)
                self._outstanding.handed_over(save_id)
            except FlashCkptError as failure:
                self._outstanding.broke(save_id, failure)
            except Exception as failure:
                # No agent may take over what all ranks are told has failed.
                slot.set_state(SlotState.FAILED)
                # Whatever it is: the drain at exit would wait for a save without an outcome.
                said = f"not handed to the agent ({type(failure).__name__}: {failure})"
                self._outstanding.broke(save_id, SaveFailedError(said))
                raise

        if comparison is None:
            self.link.stager.stage(copies, hand_over)
        else:
            self.link.stager.stage(copies, hand_over, comparison.aside)

    # ------------------------------------------------------------------ after a save

    def poll(self, wait_s: float = 0.0) -> list[Outcome]:
        """Return what became of saves since the last call; never raises for a failed save.

        An agent that is gone is replaced in the background, and goes on with what is staged.
        """
        outcomes = self._outstanding.poll(wait_s)
        for outcome in outcomes:
            if outcome.compared:
                self._copy_check.learn(outcome.iteration, outcome.differing)
        return outcomes

    def wait(self, timeout_s: float | None = None) -> list[Outcome]:
        """Return the outcomes of all saves, when none is pending any more.

        What is still pending after `timeout_s` (default: `drain_timeout_s`) becomes a failure.
        """
        timeout_s = self.config.drain_timeout_s if timeout_s is None else timeout_s
        deadline = min(time.monotonic() + timeout_s, self._ends_at)
        self._ends_at = math.inf
        self._copies_hang = not self.link.stager.wait(max(deadline - time.monotonic(), 0.0))
        outcomes = self.poll()
        while self._outstanding:
            left = deadline - time.monotonic()
            if left <= 0:
                said = (
                    f"not committed within {timeout_s:.0f} s; the agent goes on trying; raise "
                    "'drain_timeout_s' to wait longer"
                )
                failed = (self.rank,) if self._copies_hang else ()
                return outcomes + self._outstanding.give_up(said, timeout_s, failed)
            outcomes += self.poll(min(left, _WAIT_SLICE_S))
        return outcomes

    @property
    def pending(self) -> bool:
        """Whether a save of this rank has no outcome yet."""
        return bool(self._outstanding)

    def close(self, *, leave: bool = True) -> bool:
        """Hang up. With `leave` the agent frees this rank's memory; else it keeps it for a restart.

        Call `wait` before, or pending outcomes are lost (the saves are not).

        Returns:
            Whether there is an agent, which ends what is staged.
        """
        if self._copies_hang:
            has_agent = self.link.current is not None
            self.abandon()
            return has_agent
        return self.link.close(leave=leave)

    def abandon(self) -> None:
        """Hang up after a crash of training, within seconds, even if the GPU hangs."""
        self.link.abandon()
