"""A rank's tie to its node: the agent's connection, the slab, the copy thread."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable

from megatron_flashckpt.agent.claim import RunKey
from megatron_flashckpt.agent.client import AgentClient, connect
from megatron_flashckpt.agent.protocol import (
    JoinPeers,
    Offer,
    OpenPeers,
    PeersOpened,
)
from megatron_flashckpt.agent.run_messages import BeginRun, whose
from megatron_flashckpt.agent.socket_dir import agent_directory, holder
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import AgentError, FlashCkptError, SaveFailedError, StorageError
from megatron_flashckpt.memory import cuda
from megatron_flashckpt.memory.numa import node_of_gpu
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import COMPLETE, SlabGeometry, align
from megatron_flashckpt.save import joining
from megatron_flashckpt.save.stager import Stager

logger = logging.getLogger(__name__)

#: Room for descriptions of later saves that are a little longer.
_META_RESERVE = 64 * 1024
#: Seconds that a job with CUDA graphs waits for page-locked slots before its first step.
_PINNING_S = 600.0
#: For the descriptions of saves before there was one: arguments and the like.
_FIRST_META = 8 * _META_RESERVE


def slab_nbytes(slots: int, data_nbytes: int, plan_nbytes: int) -> int:
    """Return the memory that `prepare` takes for such checkpoints."""
    meta_nbytes = plan_nbytes + _FIRST_META + _META_RESERVE
    return SlabGeometry(slots, align(meta_nbytes), align(data_nbytes)).nbytes


def _holds_checkpoint(slab: Slab) -> bool:
    return any(slot.header.state in COMPLETE for slot in slab.slots)


def _holder(client: AgentClient, wait_s: float) -> str:
    try:
        slabs = client.held(wait_s)
    except AgentError:  # its memory is gone with it
        return ""
    return f"agent {client.agent_pid} holds {whose(slabs)}" if slabs else ""


class NodeLink:
    """Connects when first needed, and again after the agent was lost.

    Used on the training thread; `prepare` works in the background until the next call.
    """

    def __init__(self, root: str, rank: int, config: Config) -> None:
        self._root = root
        self._rank = rank
        self._config = config
        self._client: AgentClient | None = None
        self._slab: Slab | None = None
        self._attached = False
        #: The agent that has the slab from before a restart.
        self._offered_by: AgentClient | None = None
        #: Whether the pages of a slab from before a restart are to be mapped once the load is over.
        self._unmapped = False
        self._key: RunKey | None = None
        self._begun: BeginRun | None = None
        self._opened: PeersOpened | None = None
        self._joined: JoinPeers | None = None
        self._preparing: threading.Thread | None = None
        self._lost_one = False
        #: Why no agent took the place of the last one that was lost; empty if one did.
        self.refusal = ""
        #: Saves that were staged in the slab when an agent got it, which tells their outcome.
        self._taken: tuple[str, ...] = ()
        #: CUDA device of the training thread; every other thread must set it.
        self._device: int | None = None
        self.stager = Stager()

    def prepare(self, nbytes: int | None, plan_nbytes: int = 0) -> None:
        """Start the agent and reserve a slab of `nbytes` (None: later), in the background.

        Args:
            plan_nbytes: about what the plan of a save takes beside the data.
        """
        try:
            self._note_device()
        except SaveFailedError as error:
            logger.warning("rank %d: not prepared for the first save: %s", self._rank, error)
            return
        if self._unmapped and self._slab is not None:
            self._unmapped = False
            self._begin(self._populate, self._slab, self._preparing)
        elif self._slab is None and (nbytes is not None or self._preparing is None):
            self._begin(self._prepare, nbytes, plan_nbytes, self._preparing)

    def make_room(self, nbytes: int, plan_nbytes: int) -> None:
        """Have a slab that is too small for such a save replaced, in the background.

        How much a rank saves is certain only when the optimizer has made its state, which may be
        more than was expected of it. A slab with a checkpoint in it stays until the first save: a
        crash before that goes on from there.
        """
        slab = self._slab
        if slab is None or _holds_checkpoint(slab):
            return
        if not slab.fits(plan_nbytes, nbytes, self._config.slots):
            self._begin(self._prepare, nbytes, plan_nbytes, self._preparing)

    def wait_for_device_work(self) -> None:
        """Return when only the copy thread still calls CUDA; a new slab ends that.

        Jobs with CUDA graphs call this before the first step, which captures graphs.
        """
        self._prepared()
        if not self.stager.wait_pinned(_PINNING_S):
            logger.warning(
                "rank %d: checkpoint slots are still being page-locked after %.0f s, perhaps "
                "because another rank of this node hangs in the GPU driver; training begins, and "
                "'pinned: false' does without",
                self._rank,
                _PINNING_S,
            )

    def _note_device(self) -> None:
        """Note the training thread's CUDA device. Called on that thread only.

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
            except RuntimeError as error:
                logger.warning("rank %d: not prepared for the first save: %s", self._rank, error)
            else:
                work(*args)

        self._preparing = threading.Thread(target=run, name="flashckpt-prepare", daemon=True)
        self._preparing.start()

    def _populate(self, slab: Slab, earlier: threading.Thread | None) -> None:
        if earlier is not None:
            earlier.join()
        slab.populate()
        self._pin()

    def _pin(self) -> None:
        """Begin to page-lock the slab. A load after a restart does not need that."""
        if self._config.pinned and self._device is not None and self._client is not None:
            self.stager.pin(self._client.directory)

    def _prepare(
        self, nbytes: int | None, plan_nbytes: int, earlier: threading.Thread | None
    ) -> None:
        if earlier is not None:
            earlier.join()
        try:
            if nbytes is None:
                self._connected()
            else:
                self._ensure(nbytes, plan_nbytes + _FIRST_META)
        except FlashCkptError as error:
            # The first save will meet the same trouble and report it where it can be acted on.
            logger.warning("rank %d: not prepared for the first save: %s", self._rank, error)

    @property
    def is_preparing(self) -> bool:
        """Whether work in the background is under way, which the next request would wait for."""
        return self._preparing is not None and self._preparing.is_alive()

    def _prepared(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    @property
    def has_slab(self) -> bool:
        """Whether memory is reserved already: that of an earlier incarnation, after a restart."""
        return self._slab is not None and not self._slab.read_only

    def client(self) -> AgentClient:
        """Return the connection to the node's agent, made (and the agent started) if need be."""
        self._prepared()
        return self._connected()

    def _connected(self) -> AgentClient:
        if self._client is None:
            # Ranks notice at different moments that an agent is gone, and the first rank of a node
            # may be waiting for this one in training: whoever notices first starts another.
            local_rank = 0 if self._lost_one else int(os.environ.get("LOCAL_RANK", "0"))
            self._client = connect(self._root, self._rank, local_rank, self._config)
            self._attached = False
            if self._key is not None:
                self._client.hold(self._key)
            if self._rank == 0:
                joining.announce(self._client.agent_pid, self._client.facts, self._root)
            if self._config.redundancy == "none":
                self._client.end_peers()
            else:
                self._join_again(self._client)
            if self._begun is not None:
                self._client.begin_run(self._begun)
        return self._client

    def begin_run(self, run: BeginRun) -> None:
        """Tell the agent which ranks the run has on this node; one that starts later, too."""
        self._prepared()
        self._begun = run
        if self._client is not None:
            with contextlib.suppress(AgentError):  # it is gone: the next one is told
                self._client.begin_run(run)

    def holder(self, wait_s: float) -> str:
        """Return how much memory the agent of this node holds, and for whom; empty: none.

        Waits until the agent has freed the memory of ranks that the run does not have.
        """
        try:
            directory = agent_directory(self._root, self._config.runtime_dir)
            if self._client is None and holder(directory) is None:
                return ""
            return _holder(self.client(), wait_s)
        except OSError:  # an AgentError is one; the refusal must reach all ranks alike
            return ""

    def hold(self, key: RunKey) -> None:
        """Tell the agent which run this rank is of, and every agent that takes its place."""
        self._prepared()
        self._key = key
        if self._client is not None:
            self._client.hold(key)

    def open_peers(self, host: str) -> PeersOpened:
        """Have the agent listen for those of other nodes on `host`.

        Raises:
            AgentError: the agent cannot.
        """
        request = OpenPeers(host, self._config.agent.peer_threads)
        self._opened = self.client().open_peers(request)
        return self._opened

    def join_peers(self, plan: JoinPeers) -> None:
        """Introduce the agents of the job to this node's, and to one that takes its place."""
        self._joined = plan
        self.client().join_peers(plan)

    def _join_again(self, client: AgentClient) -> None:
        """Let an agent that replaces one of this run take its keys and port: others know those."""
        opened, plan = self._opened, self._joined
        if opened is None or plan is None:
            return
        threads = self._config.agent.peer_threads
        try:
            client.open_peers(OpenPeers(opened.host, threads, opened.identity, opened.port))
            client.join_peers(plan)
        except AgentError as error:
            logger.warning(
                "rank %d: no copies on other nodes until the job restarts: %s", self._rank, error
            )

    def recover(self, saves: tuple[str, ...]) -> None:
        """Let the agent get these saves of this rank back from other nodes, if they have them."""
        self.client().recover(saves, huge_pages=self._config.huge_pages)

    def ensure_slab(self, data_nbytes: int, meta_nbytes: int) -> Slab:
        """Return the attached slab; make a larger one if the present one is too small.

        Raises:
            SaveFailedError: CUDA fails, or makes no stream to copy on.
            StorageError: there is no memory for the slab.
        """
        self._prepared()
        self._note_device()
        return self._ensure(data_nbytes, meta_nbytes)

    def _ensure(self, data_nbytes: int, meta_nbytes: int) -> Slab:
        self._connected()
        self.reclaim()
        slab = self._slab
        fits = slab is not None and slab.fits(meta_nbytes, data_nbytes, self._config.slots)
        if slab is None or slab.read_only or not fits:
            self.stager.wait()
            self._make_way()
            slab = self._new_slab(data_nbytes, meta_nbytes)
            slab.populate()
            self._use(slab)
            self._attached = False
        elif self.stager.device != self._device:
            self._use(slab)
        if not self._attached:
            self._attach(slab)
        self._pin()
        return slab

    def _new_slab(self, data_nbytes: int, meta_nbytes: int) -> Slab:
        try:
            return Slab.create(
                self._config.slots,
                meta_nbytes + _META_RESERVE,
                data_nbytes,
                str(self._rank),
                huge_pages=self._config.huge_pages,
                numa_node=None if self._device is None else node_of_gpu(self._device),
                held_share=self._config.held_share,
            )
        except StorageError as error:
            held = _holder(self._connected(), 0.0) if error.errno == errno.ENOMEM else ""
            raise StorageError(
                error.errno, "; ".join(filter(None, (error.strerror, held)))
            ) from error

    def _make_way(self) -> None:
        """Free a slab without a checkpoint: the node may lack the memory for two slabs."""
        slab = self._slab
        if slab is None or (_holds_checkpoint(slab) and not self._gives_up_only(slab)):
            return
        if self._attached:
            self._connected().detach()
            self._attached = False
        self.stager.drop_slab()
        slab.close()
        self._slab = None

    def _gives_up_only(self, slab: Slab) -> bool:
        """Empty the only slot of a slab, as the save that needs a larger slab would, if it may."""
        is_ours = self._attached and not slab.read_only
        return is_ours and slab.geometry.slots == 1 and self._connected().acquire(-1, "", 0.0) == 0

    def _attach(self, slab: Slab) -> None:
        self._taken += self._connected().attach(slab)
        self._attached = True

    def take_slab(self) -> tuple[Slab | None, tuple[Offer, ...]]:
        """Return the slab that an earlier incarnation of this rank left at the agent, and offers.

        The slab stays in use for the saves to come.
        """
        client = self.client()
        slab, offers = client.take()
        if slab is not None:
            self._offered_by = client
            self._note_device()
            self._use(slab)
            # The load reads one slot, once; all pages are mapped when it is over (`prepare`).
            self._unmapped = not slab.read_only
            self._attached = True
        return slab, offers

    def reclaim(self) -> None:
        """Save into the slab of an earlier process after all, if that has ended since the load.

        Raises:
            AgentError: the agent is gone.
            SaveFailedError: CUDA makes no stream to copy on.
        """
        if self._slab is None or not self._slab.read_only:
            return
        client = self._connected()
        if client is not self._offered_by:
            return  # an agent that came later has not met the earlier process
        slab, _ = client.take()
        if slab is not None and slab.read_only:
            slab.close()
        elif slab is not None:
            self._use(slab)
            self._unmapped = True

    def adopt(self, save_id: str | None, iteration: int) -> None:
        """Tell the agent which save training goes on from; another one, if it is gone.

        Never raises: the model is filled, and training does not need an agent to go on.
        """
        for _ in range(2):
            try:
                client = self.client()
            except AgentError as error:
                logger.error("rank %d: no agent: %s", self._rank, error)
                return
            try:
                client.adopt(save_id, iteration)
            except AgentError as error:
                logger.warning("rank %d: %s", self._rank, error)
                self.replace_agent(client)
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

    def wait_prepared(self, wait_s: float) -> bool:
        """Return whether no work in the background is under way; wait up to `wait_s` for that."""
        if self._preparing is not None:
            self._preparing.join(wait_s)
        return not self.is_preparing

    @property
    def current(self) -> AgentClient | None:
        """The connection, if there is one."""
        return self._client

    def replace_agent(self, lost: AgentClient) -> bool:
        """Hang up on the agent of `lost`, which is gone, and find another in the background.

        The other one gets the slab, with all that is staged in it. Returns False if that has been
        done already.
        """
        if lost is not self._client:
            return False
        self._prepared()
        self._lost_one = True
        self._drop()
        self._preparing = threading.Thread(
            target=self._replace, name="flashckpt-replace", daemon=True
        )
        self._preparing.start()
        return True

    def _replace(self) -> None:
        self.refusal = ""
        # A copy that is under way ends with a doorbell: it must find its slot with one agent.
        self.stager.wait()
        try:
            self._connected()
            if self._slab is not None:
                self._attach(self._slab)
        except FlashCkptError as error:
            logger.error("rank %d: no other agent: %s", self._rank, error)
            self.refusal = str(error)
            self._drop()

    def settled(self) -> tuple[str, ...] | None:
        """Return the saves that an agent was handed with the slab since the last call.

        None while an agent is being looked for.
        """
        if self.is_preparing:
            return None
        self._prepared()
        taken, self._taken = self._taken, ()
        return taken

    def _drop(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def abandon(self) -> None:
        """Hang up after a crash, without waiting for the preparing thread or a GPU that hangs."""
        self.stager.abandon()
        self._drop()

    def close(self, *, leave: bool) -> bool:
        """End the copy thread and hang up; with `leave` the agent frees this rank's memory.

        Returns:
            Whether there is an agent.
        """
        self._prepared()
        self.stager.close()
        has_agent = self._client is not None
        if self._client is not None and leave:
            try:
                self._client.leave()
            except AgentError as error:
                logger.warning("rank %d: %s", self._rank, error)
                has_agent = False
        self._drop()
        if self._slab is not None:
            self._slab.close()
            self._slab = None
        return has_agent
