"""The facade: stage, hand over, poll, wait, close. One object per save directory and rank.

DESIGN's "Saving, step by step" is `Checkpointer.save`, line by line; what follows it runs in the
copy thread (`_hand_over`) and in the agent.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from megatron_flashckpt.agent.client import AgentClient, connect
from megatron_flashckpt.agent.protocol import Offer, Outcome
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import AgentError, FlashCkptError, SaveFailedError
from megatron_flashckpt.layout.piece import MASTER, RANK_STATE, Piece
from megatron_flashckpt.layout.plan import Layout, PlanCache, PlanCounters, order
from megatron_flashckpt.megatron_lm import optimizer_state, plain, side_state
from megatron_flashckpt.megatron_lm.model_state import LocalPiece, ModelState
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import EMPTY_HEADER, SlotHeader, SlotMeta, SlotState
from megatron_flashckpt.memory.stager import Copy, Stager
from megatron_flashckpt.memory.step_hook import StepHook
from megatron_flashckpt.restore.exchange import broadcast_object

logger = logging.getLogger(__name__)

_LENGTH_NBYTES = 8
_META_RESERVE = 64 * 1024
_WAIT_SLICE_S = 5.0


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """What a save needs to know of the training job. All ranks pass the same iteration."""

    iteration: int
    chunks: list[Any]
    """Unwrapped model chunks of this rank."""
    optimizer: Any
    """None: weights only."""
    rank_state: Callable[[], dict[str, Any]]
    """This rank's side state; called while nothing changes it."""
    common_state: Callable[[], dict[str, Any]]
    """What is alike on all ranks; called on rank 0."""
    description: dict[str, Any]
    retain_interval: int | None = None


@dataclasses.dataclass(frozen=True)
class SaveReport:
    """What a save cost the training thread."""

    iteration: int
    blocked_s: float
    nbytes: int
    skipped: bool = False


class Checkpointer:
    """Saves one rank's part of a job under `root`. A context manager; no globals.

    Every method is called by every rank, on the training thread; none communicates, except `save`
    under `busy: skip` and the loading that uses `take_slab`.
    """

    def __init__(self, root: str, config: Config) -> None:
        self.root = os.path.abspath(root)
        self.config = config
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.model_state = ModelState(config.replicated)
        self.hook = StepHook(self._wait_staged)
        self._stager = Stager()
        self._run_id: str | None = None
        self._saves = itertools.count()
        self._client: AgentClient | None = None
        self._slab: Slab | None = None
        self._attached = False
        self._preparing: threading.Thread | None = None
        self._plans = PlanCache(self._fetch_template, self._publish_template)
        self._local_outcomes: list[Outcome] = []
        #: Saves without an outcome. The copy thread changes it too: set operations are atomic.
        self._open: set[str] = set()
        self._last: tuple[int, int] | None = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counters(self) -> PlanCounters:
        """How often this rank's layouts were cached, shared through the agent, or computed."""
        return self._plans.counters

    # ------------------------------------------------------------------ before the first save

    def start_run(self) -> None:
        """Agree with all ranks on the id of this run; a load is the occasion. Collective."""
        self._run_id = broadcast_object(uuid.uuid4().hex[:8])

    def prepare(self, chunks: list[Any], optimizer: Any) -> None:
        """Start the agent and reserve the slab in the background, so that no save pays for it."""
        if self._preparing is None and self._slab is None:
            nbytes = self._expected_nbytes(chunks, optimizer)
            self._preparing = threading.Thread(
                target=self._prepare, args=(nbytes,), name="flashckpt-prepare", daemon=True
            )
            self._preparing.start()

    def _expected_nbytes(self, chunks: list[Any], optimizer: Any) -> int:
        """Bytes of this rank's pieces once the optimizer has its state (Adam's two moments)."""
        owned = self.model_state.owned(chunks, optimizer)
        nbytes = sum(local.piece.nbytes for local in owned)
        if not any(entry.states() for entry in optimizer_state.entries(optimizer)):
            steppable = [local.piece for local in owned if local.piece.kind == MASTER]
            if not steppable and optimizer is not None:
                steppable = [local.piece for local in owned if local.piece.dtype == "F32"]
            nbytes += 2 * sum(piece.nbytes for piece in steppable)
        return nbytes + 8 * side_state.RANK_STATE_STEP

    def _prepare(self, nbytes: int) -> None:
        try:
            self._connected()
            self._ensure_slab(nbytes, 8 * _META_RESERVE)
        except FlashCkptError as error:
            # The first save will meet the same trouble and report it where it can be acted on.
            logger.warning("rank %d: not prepared for the first save: %s", self.rank, error)

    def _prepared(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    # ------------------------------------------------------------------ save

    def save(self, request: SaveRequest) -> SaveReport:
        """Stage this rank's part; return when training may go on.

        What only `optimizer.step()` changes may still be copied: the step waits for it. Failures
        after (and of) the hand-over are reported by `poll`, on every rank of the node.

        Raises:
            UnsupportedError: the job holds state that cannot be saved; nothing was staged.
        """
        started = time.perf_counter()
        mark = (request.iteration, self.hook.steps)
        if mark == self._last:
            # Megatron may save the same iteration twice (at the interval and at the end).
            return SaveReport(request.iteration, 0.0, 0, skipped=True)
        self._prepared()
        self._wait_staged()
        self.hook.install(request.optimizer, optimizer_state.inner_optimizers(request.optimizer))
        # 1. Tensors are enumerated afresh; only layouts are cached.
        pieces = self.model_state.owned(request.chunks, request.optimizer)
        pieces.append(self._rank_state_piece(request.rank_state()))
        ordered = [pieces[i] for i in order([local.piece for local in pieces])]
        if self._run_id is None:
            self._run_id = _run_id_from_store(self.root)
        save_id = f"{self._run_id}{next(self._saves):04x}"
        slot: int | None = None
        try:
            # 2. The plan.
            layout = self._plans.layout([local.piece for local in ordered])
            # 3. A free slot.
            slot = self._acquire(request, layout, save_id)
        except FlashCkptError as error:
            self._fail(request.iteration, save_id, error)
        self._last = mark
        # A rank that failed takes part too, or the others would wait for it.
        if self.config.busy == "skip" and _any_rank(slot is None):
            self._give_back(slot, request.iteration)
            slot = None
        if slot is None:
            return SaveReport(request.iteration, time.perf_counter() - started, 0, skipped=True)
        # 4. Stage.
        self._stage(ordered, layout, slot, request.iteration, save_id)
        if self.config.staging == "blocking":
            self._wait_staged()
        return SaveReport(request.iteration, time.perf_counter() - started, layout.nbytes)

    def _rank_state_piece(self, state: dict[str, Any]) -> LocalPiece:
        encoded = plain.encode(state)
        nbytes = _LENGTH_NBYTES + len(encoded)
        padded = -(-nbytes // side_state.RANK_STATE_STEP) * side_state.RANK_STATE_STEP
        framed = bytearray(padded)
        framed[:nbytes] = len(encoded).to_bytes(_LENGTH_NBYTES, "little") + encoded
        piece = Piece(
            RANK_STATE,
            RANK_STATE,
            "U8",
            (self.world_size, padded),
            (self.rank, 0),
            (1, padded),
            0,
            padded,
        )
        return LocalPiece(piece, torch.frombuffer(framed, dtype=torch.uint8), early=True)

    def _acquire(self, request: SaveRequest, layout: Layout, save_id: str) -> int | None:
        """Return a slot that says what it will hold; None if all are busy and 'busy' is 'skip'."""
        common = plain.encode(request.common_state()) if self.rank == 0 else b""
        meta = msgspec.msgpack.encode(
            SlotMeta(
                root=self.root,
                rank=self.rank,
                world_size=self.world_size,
                coordinates=side_state.coordinates(),
                template_fingerprint=layout.template_fingerprint,
                template=layout.template,
                placement=layout.placement,
                common=common,
                description=request.description,
                retain_interval=request.retain_interval,
            )
        )
        slab = self._ensure_slab(layout.nbytes, len(meta))
        client = self._connected()
        index = client.acquire(request.iteration, save_id, 0.0)
        while index < 0:
            if self.config.busy == "skip":
                return None
            logger.info("iteration %d: waiting for a free slot", request.iteration)
            index = client.acquire(request.iteration, save_id, _WAIT_SLICE_S)
        slot = slab.slots[index]
        slot.set_header(
            SlotHeader(SlotState.STAGING, request.iteration, save_id, len(meta), layout.nbytes)
        )
        slot.set_meta(meta)
        return index

    def _give_back(self, index: int | None, iteration: int) -> None:
        if index is not None and self._slab is not None:
            self._slab.slots[index].set_header(EMPTY_HEADER)
        logger.warning(
            "iteration %d is not saved: previous saves are still being written and 'busy' is "
            "'skip'; save less often or set 'busy: wait'",
            iteration,
        )

    def _stage(
        self, ordered: list[LocalPiece], layout: Layout, index: int, iteration: int, save_id: str
    ) -> None:
        assert self._slab is not None
        assert self._client is not None
        slot, client = self._slab.slots[index], self._client
        copies = [
            Copy(local.tensor, slot.data_offset + item.byte_offset, local.early)
            for local, item in zip(ordered, layout.template.items, strict=True)
        ]
        self._open.add(save_id)

        def hand_over(seconds: float, error: BaseException | None) -> None:
            # 5. Header, then doorbell: the agent does the rest (6 and 7).
            try:
                if error is not None:
                    raise SaveFailedError(f"copying to host memory failed: {error}") from error
                slot.set_state(SlotState.STAGED)
                client.staged(index)
                logger.info(
                    "rank %d: staged iteration %d, %d bytes in %.3f s",
                    self.rank,
                    iteration,
                    layout.nbytes,
                    seconds,
                )
            except FlashCkptError as failure:
                self._open.discard(save_id)
                self._fail(iteration, save_id, failure)

        self._stager.stage(copies, hand_over)

    def _wait_staged(self) -> None:
        self._stager.wait()

    # ------------------------------------------------------------------ after a save

    def poll(self, wait_s: float = 0.0) -> list[Outcome]:
        """Return what became of saves since the last call; never raises for a failed save.

        An agent that is gone is reported once per save that it takes with it.
        """
        found, self._local_outcomes = self._local_outcomes, []
        if self._client is not None:
            try:
                outcomes = self._client.poll(0.0 if found else wait_s)
            except AgentError as error:
                self._lose_agent(error)
                found += self._local_outcomes
                self._local_outcomes = []
            else:
                self._open.difference_update(o.save_id for o in outcomes.finished)
                found += outcomes.finished
        return found

    def wait(self, timeout_s: float | None = None) -> list[Outcome]:
        """Return the outcomes of all saves, when none is pending any more.

        What is still pending after `timeout_s` (default: `drain_timeout_s`) becomes a failure.
        """
        timeout_s = self.config.drain_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        self._wait_staged()
        outcomes = self.poll()
        while self._open:
            left = deadline - time.monotonic()
            if left <= 0:
                error = SaveFailedError(
                    f"{len(self._open)} saves were not committed within {timeout_s:.0f} s; the "
                    "agent goes on trying; raise 'drain_timeout_s' to wait longer"
                )
                self._open.clear()
                self._fail(-1, "", error)
                return outcomes + self.poll()
            outcomes += self.poll(min(left, _WAIT_SLICE_S))
        return outcomes

    @property
    def pending(self) -> bool:
        """Whether a save of this rank has no outcome yet."""
        return bool(self._open)

    def close(self, *, leave: bool = True) -> None:
        """Hang up. With `leave` the agent frees this rank's memory; else it keeps it for a restart.

        Call `wait` before, or pending outcomes are lost (the saves are not).
        """
        self._prepared()
        self._stager.close()
        if self._client is not None:
            if leave:
                try:
                    self._client.leave()
                except AgentError as error:
                    logger.warning("rank %d: %s", self.rank, error)
            self._client.close()
            self._client = None
        if self._slab is not None:
            self._slab.close()
            self._slab = None

    # ------------------------------------------------------------------ restart

    def take_slab(self) -> tuple[Slab | None, tuple[Offer, ...]]:
        """Return the slab that an earlier incarnation of this rank left at the agent, and offers.

        The slab stays in use for the saves to come.
        """
        self._prepared()
        slab, offers = self._connected().take()
        if slab is not None:
            self._use(slab)
            self._attached = True
        return slab, offers

    def adopt(self, save_id: str | None, iteration: int) -> None:
        """Tell the agent which save training goes on from (see `protocol.Adopt`)."""
        self._connected().adopt(save_id, iteration)

    # ------------------------------------------------------------------ agent and slab

    def _connected(self) -> AgentClient:
        if self._client is None:
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
            self._client = connect(self.root, self.rank, local_rank, self.config)
            self._attached = False
        return self._client

    def _ensure_slab(self, data_nbytes: int, meta_nbytes: int) -> Slab:
        """Return the attached slab, a larger one if the present one is too small."""
        client = self._connected()
        slab = self._slab
        if slab is None or not slab.fits(meta_nbytes, data_nbytes, self.config.slots):
            self._wait_staged()
            slab = Slab.create(
                self.config.slots, meta_nbytes + _META_RESERVE, data_nbytes, str(self.rank)
            )
            self._use(slab)
            self._attached = False
        if not self._attached:
            client.attach(slab)
            self._attached = True
        return slab

    def _use(self, slab: Slab) -> None:
        on_gpu = torch.cuda.is_available() and torch.zeros(0, device="cuda").is_cuda
        self._stager.use(slab, cuda_device=torch.cuda.current_device() if on_gpu else None)
        if self._slab is not None:
            self._slab.close()
        self._slab = slab

    def _fetch_template(self, fingerprint: str) -> bytes | None:
        return self._connected().fetch_template(fingerprint)

    def _publish_template(self, fingerprint: str, encoded: bytes) -> None:
        self._connected().publish_template(fingerprint, encoded)

    def _fail(self, iteration: int, save_id: str, error: FlashCkptError) -> None:
        self._local_outcomes.append(Outcome(iteration, save_id, str(error), 0.0))
        if isinstance(error, AgentError) and self._client is not None:
            self._client.close()
            self._client = None

    def _lose_agent(self, error: AgentError) -> None:
        """Report the loss once; the next save starts a new agent and hands it the slab."""
        self._open.clear()
        self._fail(-1, "", error)


def rank_state_of(framed: bytes | bytearray, place: str) -> dict[str, Any]:
    """Return the side state from the bytes of a rank-state piece."""
    length = int.from_bytes(framed[:_LENGTH_NBYTES], "little")
    state: dict[str, Any] = plain.decode(
        bytes(framed[_LENGTH_NBYTES : _LENGTH_NBYTES + length]), place
    )
    return state


def _run_id_from_store(root: str) -> str:
    """Return 8 hexadecimal digits, equal on all ranks and new in every start of the job.

    They tell this run's commit records from those of an earlier one. For jobs that save without
    having called a load: the first rank to reach the job's rendezvous store decides; no
    collective, no barrier.
    """
    mine = uuid.uuid4().hex[:8]
    if not dist.is_initialized():
        return mine
    store = dist.distributed_c10d._get_default_store()
    chosen: bytes = store.compare_set(f"megatron_flashckpt/run_id/{root}", "", mine)
    return chosen.decode()


def _any_rank(flag: bool) -> bool:
    if not dist.is_initialized():
        return flag
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    value = torch.tensor([int(flag)], device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())
