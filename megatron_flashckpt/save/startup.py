"""Preparation of a rank for its first save to a directory: check, reserve, agree, dry run."""

from __future__ import annotations

import operator
import os
import platform
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from megatron_flashckpt.agent.held_directory import ensure
from megatron_flashckpt.agent.place import place_of
from megatron_flashckpt.collectives import gather_objects, reduce_largest, run_and_agree
from megatron_flashckpt.config import Config
from megatron_flashckpt.megatron_lm import parallel, self_check, side_state
from megatron_flashckpt.megatron_lm.accounting import has_states
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.size_estimate import SizeEstimate, expect
from megatron_flashckpt.save import coverage_check, equal_settings, probe
from megatron_flashckpt.save.checkpointer import Checkpointer
from megatron_flashckpt.save.node_memory import check_memory
from megatron_flashckpt.save.start_message import print_start
from megatron_flashckpt.storage.opening import open_store


class Startup:
    """Runs the phases that precede the first save to one directory.

    1. `check`: the job's state can be saved completely; no other run saves to the directory.
    2. reserve: the nodes have the memory, and storage accepts saves.
    3. agree: all ranks know the run, and the agents of all nodes. Slabs are made in the
       background from then on.
    4. `dry_run`: a save without copies after the first step, so that the first save waits for
       nothing.

    A load calls `check` before it reads, and `prepare` (phases 1 to 3) afterwards. A job without a
    load calls `prepare` when model and optimizer are built. A save before both calls `check_alone`.
    Each phase runs once for a model and its optimizer. All phases but `check_alone` are collective.
    """

    def __init__(
        self, checkpointer: Checkpointer, note_nodes: Callable[[Sequence[Hashable]], None]
    ) -> None:
        """Set up the phases for `checkpointer`; `note_nodes` receives the node of every rank."""
        self.checkpointer = checkpointer
        self._note_nodes = note_nodes
        #: Model chunks and optimizer for which phases 1 to 3 are complete.
        self._prepared: tuple[Any, ...] = ()
        #: Model chunks and optimizer that this rank has checked in `check_alone`.
        self._checked_alone: tuple[Any, ...] = ()

    # ------------------------------------------------------------------ entry points

    def concerns(self, optimizer: Any) -> bool:
        """Return whether the job will save the model that is loaded with `optimizer`.

        A model that is loaded without one beside the trained model is no part of a save.
        """
        return optimizer is not None or not self._prepared

    def check(self, job: JobState) -> None:
        """Check on all ranks that the job's state can be saved, and that no other run saves there.

        Raises:
            UnsupportedError: names every unsupported item of every rank.
            ConfigError: settings that must be equal differ between ranks.
            AgentError: this node has no place for an agent's directory.
            OtherWriterError: another run trains and saves there; nothing was changed.
        """
        if not self._is_prepared(job):
            self._check_ranks(job)
        self._await_end(job)

    def prepare(self, job: JobState) -> None:
        """Run phases 1 to 3, and print on rank 0 how the job will save.

        Raises:
            UnsupportedError: as `check`; or an element would be missing in a save, or saved twice.
            OtherWriterError: as `check`.
            StorageError: the slabs of a node's ranks do not fit into its memory together, or the
                save directory cannot hold checkpoints.
        """
        if self._is_prepared(job):
            return
        started = time.perf_counter()
        # Check again after a load, which changed the optimizer's groups and the modules' own state.
        self._check_ranks(job)
        self._await_end(job)
        expected = self._check_coverage(job)
        self._reserve(job, expected, started)
        self._agree(job)
        # Last, because introducing agents to each other would wait for the slab.
        self.checkpointer.link.prepare(expected.nbytes, expected.plan_nbytes)
        self._prepared = job.parts

    def dry_run(self, job: JobState) -> bool:
        """Enumerate, encode and plan as a save does; called after each step until it returns True.

        The first step creates the optimizer's state. State that cannot be saved is reported here,
        hours before the first save. The dry run waits for neither agent nor memory: until both are
        ready, a call takes 0.01 ms.

        Raises:
            UnsupportedError: the job holds state that cannot be saved.
        """
        # Asked first: state of an unknown kind is refused right after the step that creates it.
        if job.saved_optimizer is not None and not has_states(job.saved_optimizer):
            return False
        if self.checkpointer.link.is_preparing:
            return False
        if self.checkpointer.rank == 0:
            side_state.encode_common(side_state.common_state(job, 0))
        self.checkpointer.dry_run(job)
        return True

    def check_alone(self, job: JobState) -> None:
        """Check this rank alone, without a collective, for a save before a load or a step.

        Raises:
            UnsupportedError: as `check`; or the ranks must first agree on FP8 or FP4 weights.
            AgentError: as `check`.
        """
        if self._is_prepared(job) or _is_same(self._checked_alone, job.parts):
            return
        quantized, frozen = self._check_own(job)
        state = self._state
        agreed = quantized <= state.quantized_keys and frozen <= state.frozen_keys
        if not agreed and parallel.model_sizes()[1] > 1:
            raise self_check.refusal(
                [
                    "the stages of a pipeline have not agreed on their FP8 or FP4 weights, or on "
                    "frozen ones with 'weights: derive': call load_checkpoint or Megatron's "
                    "train_step before the first save"
                ]
            )
        self._checked_alone = job.parts

    # ------------------------------------------------------------------ 1. check

    def _check_ranks(self, job: JobState) -> None:
        """Check every rank's own part; gather keys and nodes if a rank needs them."""
        keys = run_and_agree(lambda: self._check_own(job))
        # A few numbers first: gathering is rarely needed.
        must_gather, *settings = reduce_largest(
            [any(keys) or self._state.needs_nodes, *equal_settings.numbers(self._config)]
        )
        equal_settings.refuse_unequal(self._config, settings)
        gathered = gather_objects((keys, self._node())) if must_gather else []
        quantized, frozen = (
            frozenset[str]().union(*(keys[position] for keys, _ in gathered)) for position in (0, 1)
        )
        self._state.note_keys(quantized, frozen)
        if gathered:
            self._note_nodes([node for _, node in gathered])
        if quantized:
            run_and_agree(lambda: self._check_derived(job))

    def _check_own(self, job: JobState) -> tuple[frozenset[str], frozenset[str]]:
        """Check this rank; return `ModelState.own_keys`."""
        self_check.check(job, self._state)
        ensure(self.checkpointer.root)
        # Without its log and its name, no agent starts, and no save could be committed.
        place = place_of(self.checkpointer.root, self._config.runtime_dir)
        place.prepare()
        place.listener()  # raises if another user has taken the name
        return self._state.own_keys(self._state.geometry(job.chunks))

    def _check_derived(self, job: JobState) -> None:
        """Check plain weights that share a key with FP8 or FP4 weights of any rank."""
        if lines := self_check.of_derived(self._state, job.chunks, job.saved_optimizer):
            raise self_check.refusal(lines)

    def _node(self) -> tuple[str, str]:
        """Return the identity of this node: its host name and its agent's socket."""
        checkpointer = self.checkpointer
        return platform.node(), str(place_of(checkpointer.root, checkpointer.config.runtime_dir))

    def _await_end(self, job: JobState) -> None:
        if job.trains:
            self.checkpointer.runs.await_end()

    def _check_coverage(self, job: JobState) -> SizeEstimate:
        """Check that all ranks together save every element; return this rank's expected save."""
        expected = run_and_agree(lambda: expect(self._state, job.chunks, job.saved_optimizer))
        geometry = self._state.geometry(job.chunks)
        coverage_check.check(self._state, geometry, job.chunks, expected.pieces)
        return expected

    # ------------------------------------------------------------------ 2. reserve

    def _reserve(self, job: JobState, expected: SizeEstimate, started: float) -> None:
        """Check that the slabs fit into memory and that storage accepts saves."""
        needs = check_memory(self.checkpointer, expected)
        if job.trains:  # otherwise the job may lack permission to write
            probe.check(
                open_store(self.checkpointer.root),
                self.checkpointer.rank,
                is_first_of_node=int(os.environ.get("LOCAL_RANK", "0")) == 0,
                wait_s=self._config.probe_wait_s,
            )
        print_start(job, self.checkpointer, expected, needs, started)

    # ------------------------------------------------------------------ 3. agree

    def _agree(self, job: JobState) -> None:
        """Connect the agents, and open a run unless a load has."""
        self.checkpointer.start_run()
        if job.trains:
            self.checkpointer.runs.ensure()

    # ------------------------------------------------------------------

    @property
    def _config(self) -> Config:
        return self.checkpointer.config

    @property
    def _state(self) -> ModelState:
        return self.checkpointer.model_state

    def _is_prepared(self, job: JobState) -> bool:
        return _is_same(self._prepared, job.parts)


def _is_same(parts: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Return whether both hold identical objects."""
    return len(parts) == len(others) and all(map(operator.is_, parts, others))
