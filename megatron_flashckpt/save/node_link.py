"""A rank's slab and copy thread, and the agent that shares the slab."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from megatron_flashckpt.agent.client import AgentClient
from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.agent.worker import Worker
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import (
    AgentError,
    AgentRefusedError,
    FlashCkptError,
    SaveFailedError,
)
from megatron_flashckpt.file_format.run_object import RunObject
from megatron_flashckpt.memory import cuda
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import COMPLETE, SlotState
from megatron_flashckpt.save import abandoned_links
from megatron_flashckpt.save.agent_connection import AgentConnection
from megatron_flashckpt.save.new_slab import FIRST_META, map_pages, new_slab
from megatron_flashckpt.save.stager import Stager

logger = logging.getLogger(__name__)

#: Seconds that a job with CUDA graphs waits for page-locked slots before its first step.
_PINNING_S = 600.0
#: Longest wait of `abandon` for running copies, in seconds; enough for a healthy GPU.
ABANDON_S = 1.0


def _holds_checkpoint(slab: Slab) -> bool:
    return any(slot.header.state in COMPLETE for slot in slab.slots)


class NodeLink:
    """Creates a slab in the background and shares it with the agent, or with the agent's successor.

    Used on the training thread. A call waits until background work of an earlier call has ended.
    Its constructor waits until abandoned links of this process have ended. So none of them connects
    or copies later, when the agent serves this one and may have given it their slots.
    """

    def __init__(self, root: str, rank: int, config: Config) -> None:
        abandoned_links.end()
        self._rank = rank
        self._config = config
        self._connection = AgentConnection(root, rank, config)
        self._slab: Slab | None = None
        #: The agent that shares the slab.
        self._attached_to: AgentClient | None = None
        #: The agent that kept the slab over a restart of the job.
        self._offered_by: AgentClient | None = None
        #: True if the slab was kept over a restart, and its pages must be mapped after the load.
        self._unmapped = False
        self._background = Worker(
            "flashckpt-prepare", f"rank {rank}: the preparation of saves failed"
        )
        #: The reason why no agent replaced the last lost one; empty if an agent did.
        self.refusal = ""
        #: Saves that were staged in the slab when an agent got it; that agent reports the outcomes.
        self._adopted: tuple[str, ...] = ()
        #: CUDA device of the training thread; every other thread must set it.
        self._device: int | None = None
        self.stager = Stager()

    def prepare(self, nbytes: int | None, plan_nbytes: int = 0) -> None:
        """Start the agent and reserve a slab, in the background.

        Args:
            nbytes: bytes of a save's data; None: start the agent only.
            plan_nbytes: approximate bytes of a save's plan, in addition to the data.
        """
        try:
            self._note_device()
        except SaveFailedError as error:
            self._warn_unprepared(error)
            return
        if self._unmapped and self._slab is not None:
            self._unmapped = False
            self._begin(self._populate, self._slab)
        elif self._slab is None:
            self._begin(self._prepare, nbytes, plan_nbytes)

    def make_room(self, nbytes: int, plan_nbytes: int) -> None:
        """Replace, in the background, a slab that is too small for a save of these sizes.

        The size of a save is certain only after the optimizer has created its state, which may be
        larger than expected. A slab that holds a checkpoint stays until the first save, because the
        job resumes from that checkpoint after a crash.
        """
        slab = self._slab
        if slab is None or _holds_checkpoint(slab):
            return
        if not slab.fits(plan_nbytes, nbytes, self._config.slots):
            self._begin(self._prepare, nbytes, plan_nbytes)

    def wait_for_device_work(self) -> None:
        """Wait until only the copy thread calls CUDA; this holds until a new slab is made.

        Jobs with CUDA graphs call this before the first step, which captures graphs.
        """
        self._background.wait()
        if not self.stager.wait_pinned(_PINNING_S):
            logger.warning(
                "rank %d: checkpoint slots are still being page-locked after %.0f s, perhaps "
                "because another rank of this node hangs in the GPU driver; training begins now; "
                "set 'pinned: false' to turn page-locking off",
                self._rank,
                _PINNING_S,
            )

    def _note_device(self) -> None:
        """Note the CUDA device of the training thread, which must be the caller.

        Raises:
            SaveFailedError: CUDA does not return the device.
        """
        try:
            self._device = cuda.current_device()
        except RuntimeError as error:
            raise SaveFailedError(
                f"rank {self._rank}: CUDA does not return the current device ({error}); restart "
                "the job"
            ) from error

    def _begin(self, work: Callable[..., None], *args: object) -> None:
        def run() -> None:
            try:
                cuda.enter_thread(self._device)
                work(*args)
            except (FlashCkptError, RuntimeError) as error:  # CUDA's errors are RuntimeErrors
                self._warn_unprepared(error)

        self._background.add(run)

    def _warn_unprepared(self, error: Exception) -> None:
        # The first save meets the same error and reports it as its result.
        logger.warning("rank %d: preparation of the first save failed: %s", self._rank, error)

    def _populate(self, slab: Slab) -> None:
        map_pages(slab, self._config, self._rank, time.monotonic())
        self._pin()

    def _pin(self, *, hurry: bool = False) -> None:
        """Begin to page-lock the slab: for the copies of saves, and of a load after a restart."""
        client = self._connection.current
        if self._config.pinned and self._device is not None and client is not None:
            self.stager.pin(client.log.parent, hurry=hurry)

    def _prepare(self, nbytes: int | None, plan_nbytes: int) -> None:
        if nbytes is None:
            self._connection.client()
        else:
            self._ensure(nbytes, plan_nbytes + FIRST_META)

    @property
    def commit_timeout_s(self) -> float:
        """Seconds after which every node has proposed an end of a save."""
        return self._config.agent.commit_timeout_s

    @property
    def is_preparing(self) -> bool:
        """True while background work runs; the next request would wait for it."""
        return self._background.is_busy

    @property
    def has_slab(self) -> bool:
        """True if a slab is reserved, for example one that the agent kept over a restart."""
        return self._slab is not None and not self._slab.read_only

    @property
    def agent(self) -> AgentConnection:
        """The connection to the node's agent. Waits for background work."""
        self._background.wait()
        return self._connection

    def client(self) -> AgentClient:
        """Return the connection to the node's agent; start the agent if necessary."""
        return self.agent.client()

    def recover(self, saves: tuple[str, ...]) -> None:
        """Have the agent fetch these saves of this rank from the nodes that hold copies."""
        self.client().recover(saves, huge_pages=self._config.huge_pages)

    def ensure_slab(self, data_nbytes: int, meta_nbytes: int) -> Slab:
        """Return the attached slab; create a larger one if the present one is too small.

        Raises:
            SaveFailedError: CUDA fails, or cannot create a stream for the copies.
            StorageError: the node lacks the memory for the slab.
        """
        self._background.wait()
        self._note_device()
        return self._ensure(data_nbytes, meta_nbytes)

    def _ensure(self, data_nbytes: int, meta_nbytes: int) -> Slab:
        self._connection.client()
        self.reclaim()
        slab = self._slab
        fits = slab is not None and slab.fits(meta_nbytes, data_nbytes, self._config.slots)
        if slab is None or slab.read_only or not fits:
            self.stager.wait()
            self._free_empty_slab()
            slab = new_slab(
                *(self._connection, self._config, self._rank, self._device),
                *(data_nbytes, meta_nbytes),
            )
            self._use(slab)
            self._attached_to = None
        elif self.stager.device != self._device:
            self._use(slab)
        if self.shared is None:
            self._attach(slab)
        self._pin()
        return slab

    def _free_empty_slab(self) -> None:
        """Free a slab without a checkpoint: the node may lack the memory for two slabs."""
        slab = self._slab
        if slab is None or (_holds_checkpoint(slab) and not self._gives_up_only(slab)):
            return
        if self.shared is not None:
            self._connection.client().detach()
            self._attached_to = None
        self.stager.drop_slab()
        slab.close()
        self._slab = None

    def _gives_up_only(self, slab: Slab) -> bool:
        """Try to empty the only slot of a slab, for a save that needs a larger slab."""
        is_writable = self.shared is not None and not slab.read_only
        return is_writable and slab.geometry.slots == 1 and self._connection.client().acquire() == 0

    def _attach(self, slab: Slab) -> None:
        client = self._connection.client()
        self._adopted += client.attach(slab)
        self._attached_to = client

    @property
    def shared(self) -> tuple[AgentClient, Slab] | None:
        """The open connection and the slab that its agent has; None without one of them."""
        client, slab = self._connection.current, self._slab
        if client is None or slab is None or self._attached_to is not client:
            return None
        return client, slab

    def save_requested(self, iteration: int) -> bool:
        """Note that `iteration` is trained; return whether somebody has requested a save of it.

        Other ranks may not have heard. So a job takes no requests if such a save communicates, as
        under `busy: skip`, or if its failure would stop the ranks that have heard.
        """
        config = self._config
        alone = config.on_failure == "warn" and config.failures_in_a_row is None
        shared = self.shared  # the background may replace it
        if shared is None or config.busy == "skip" or not alone:
            return False
        signals = shared[1].signals
        signals.trained = iteration
        return signals.save_at == iteration

    def take_slab(self) -> tuple[Slab | None, tuple[Offer, ...]]:
        """Return the slab that the agent kept of this rank's previous process, and its offers.

        Later saves use the same slab.
        """
        client = self.client()
        slab, offers = client.take()
        if slab is not None:
            self._offered_by = client
            self._note_device()
            self._use(slab)
            self._attached_to = client
            self._unmapped = not slab.read_only
            if self._unmapped:  # `prepare` maps all pages; a load to a GPU needs locked ones now
                self._pin(hurry=True)
        return slab, offers

    def reclaim(self) -> None:
        """Make a read-only slab writable if the earlier process has ended since the load.

        Raises:
            AgentError: the agent is gone.
            SaveFailedError: CUDA cannot create a stream for the copies.
        """
        if self._slab is None or not self._slab.read_only:
            return
        client = self._connection.client()
        if client is not self._offered_by:
            return  # a later agent has no slab of the earlier process
        slab, _ = client.take()
        if slab is not None and slab.read_only:
            slab.close()
        elif slab is not None:
            self._use(slab)
            self._unmapped = True

    def open_run(self, run: RunObject) -> None:
        """Tell the agent, or its successor, which run this rank belongs to from now on.

        Never raises: the model is filled, and training continues without an agent.
        """
        for _ in range(2):
            lost = self.current
            try:
                self.agent.open_run(run)
            except AgentError as error:
                if lost is None:
                    logger.error("rank %d: no agent is available: %s", self._rank, error)
                    return
                logger.warning("rank %d: %s", self._rank, error)
                self.replace_agent(lost)
            else:
                return

    def _use(self, slab: Slab) -> None:
        try:
            self.stager.use(slab, device=self._device)
        except SaveFailedError:
            if slab is not self._slab:
                slab.close()
            raise
        if self._slab is not None and slab is not self._slab:
            self._slab.close()
        self._slab, self._unmapped = slab, False
        slab.signals.trained = 0  # the process before may have trained further

    def wait_prepared(self, wait_s: float) -> bool:
        """Wait up to `wait_s` for background work; return True if none is running."""
        return self._background.wait(wait_s)

    def wait_idle(self, wait_s: float | None = None) -> bool:
        """Wait until neither copies nor background work run; return False after `wait_s` each."""
        return self.stager.wait(wait_s) and self._background.wait(wait_s)

    @property
    def current(self) -> AgentClient | None:
        """The open connection, or None."""
        return self._connection.current

    def replace_agent(self, lost: AgentClient) -> bool:
        """Disconnect from the lost agent of `lost`, and connect to a successor in the background.

        The successor gets the slab with everything staged in it. Returns False if `lost` was
        replaced already.
        """
        if lost is not self._connection.current:
            return False
        self._background.wait()
        self._connection.note_lost()
        self._background.add(self._replace)
        return True

    def serving_agent(self) -> int:
        """Return the pid of the agent that serves this process; 0: there is none.

        Raises:
            AgentRefusedError: the agent serves a later process of this rank.
        """
        for _ in range(2):
            lost = self.current
            try:
                client = self.client()
                client.held()  # answered only to the process that the agent serves
                return client.agent_pid
            except AgentRefusedError:
                raise
            except AgentError:  # gone, or it has ended the connection: another greeting tells
                if lost is not None:
                    self.replace_agent(lost)
                    self._background.wait()
        return 0

    def withdraw(self, save_id: str) -> None:
        """Keep later agents from writing a staged save that other ranks report as failed."""
        if self._slab is not None and not self._slab.read_only:
            for slot in self._slab.slots:
                if (slot.header.save_id, slot.header.state) == (save_id, SlotState.STAGED):
                    slot.set_state(SlotState.FAILED)

    def _replace(self) -> None:
        """Find an agent; it gets the slab, with all that is staged in it."""
        self.refusal = ""
        # A running copy ends with a "staged" message, which must reach the agent that has the slot.
        self.stager.wait()
        try:
            self._connection.client()
            if self._slab is not None:
                self._attach(self._slab)
        except FlashCkptError as error:
            logger.error("rank %d: no agent replaces the lost one: %s", self._rank, error)
            self.refusal = str(error)
            self._connection.disconnect()

    def adopted_saves(self) -> tuple[str, ...] | None:
        """Return the saves that an agent has adopted with the slab since the last call.

        Returns None while the successor of a lost agent is being sought.
        """
        if self.is_preparing:
            return None
        adopted, self._adopted = self._adopted, ()
        return adopted

    def abandon(self) -> None:
        """Disconnect after a crash, without waiting for the preparing thread or a hanging GPU.

        A slot that is still incomplete stays STAGING, and the agent discards it.
        """
        if self.stager.wait(ABANDON_S) and not self.is_preparing:
            self.close(leave=False)
        else:
            self._connection.close()
            abandoned_links.keep(self)

    def close(self, *, leave: bool) -> bool:
        """End the copy thread and disconnect; with `leave` the agent frees this rank's memory.

        Returns:
            True if there is an agent.
        """
        self._background.close()
        self.stager.close()
        has_agent = self._connection.leave() if leave else self.current is not None
        self._connection.close()
        if self._slab is not None:
            self._slab.close()
            self._slab = None
        return has_agent
