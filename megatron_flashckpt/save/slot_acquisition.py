"""Acquisition of a free slot from the agent, and the description of its contents."""

from __future__ import annotations

import math
import time

import msgspec

from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import SaveFailedError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format.run_object import Ancestors
from megatron_flashckpt.layout.template import Layout
from megatron_flashckpt.megatron_lm import parallel, side_state
from megatron_flashckpt.megatron_lm.job_description import versions
from megatron_flashckpt.memory.slot import EncodedMeta, Slot, SlotHeader, SlotState
from megatron_flashckpt.metrics import reported
from megatron_flashckpt.save.node_link import NodeLink
from megatron_flashckpt.save.pending_saves import PendingSaves
from megatron_flashckpt.save.request import SaveRequest
from megatron_flashckpt.save.save_reports import say

#: Longest wait of one request to the agent, in seconds; a longer wait consists of several requests.
WAIT_SLICE_S = 5.0


class SlotAcquisition:
    """Acquires slots for the saves of one rank under `root`. Used on the training thread."""

    def __init__(
        self,
        root: str,
        rank: int,
        world_size: int,
        config: Config,
        link: NodeLink,
        saves: PendingSaves,
    ) -> None:
        self._root = root
        self._rank = rank
        self._world_size = world_size
        self._config = config
        self._link = link
        self._saves = saves
        #: `time.monotonic()` at which the end of the job stops waiting; infinite while it trains.
        self.ends_at = math.inf

    def acquire(
        self,
        request: SaveRequest,
        layout: Layout,
        save_id: str,
        ancestors: Ancestors,
        *,
        may_skip: bool,
    ) -> Slot | None:
        """Return a slot in state STAGING with its description, before any data is copied.

        Args:
            ancestors: those of the run.
            may_skip: return None at once if all slots hold saves that are being written.

        Raises:
            AgentError: the agent is gone.
            SaveFailedError: no slot became free before the job's end.
            StorageError: the node lacks the memory for a slab that is large enough.
            UnsupportedError: a load could not restore some of the side state.
        """
        meta = self._encoded_meta(request, layout, ancestors)
        slab = self._link.ensure_slab(layout.nbytes, len(meta))
        self._saves.process_failures()
        index = self._granted(request.iteration, may_skip=may_skip)
        if index is None:
            return None
        slot = slab.slots[index]
        hit("save.granted")
        slot.set_header(
            SlotHeader(SlotState.STAGING, request.iteration, save_id, len(meta), layout.nbytes)
        )
        slot.set_meta(meta)
        hit("save.staging")
        return slot

    def _granted(self, iteration: int, *, may_skip: bool) -> int | None:
        """Return the index of a free slot, or None if all are busy and the save may be skipped."""
        client = self._link.client()
        index = client.acquire()
        if index < 0 and not may_skip:
            say(
                self._rank,
                f"iteration {iteration} waits for a free slot, because earlier saves are still "
                "being written",
            )
        while index < 0:
            if may_skip:
                return None
            self._saves.put_back(self._saves.poll())  # polled only for its log lines
            left_s = self.ends_at - time.monotonic()
            if left_s <= 0:
                raise SaveFailedError(
                    f"no slot became free within {self._config.drain_timeout_s:g} s: earlier "
                    "saves are still being written; raise 'drain_timeout_s' to wait longer"
                )
            index = client.acquire(min(left_s, WAIT_SLICE_S))
        return index

    def _encoded_meta(self, request: SaveRequest, layout: Layout, ancestors: Ancestors) -> bytes:
        """Return the encoded description of the slot's contents."""
        common = b""
        if self._rank == 0:  # the state is equal on all ranks
            common = side_state.encode_common(
                side_state.common_state(request.job, request.iteration)
            )
        return msgspec.msgpack.encode(
            EncodedMeta(
                root=self._root,
                rank=self._rank,
                world_size=self._world_size,
                ancestors=ancestors,
                coordinates=parallel.coordinates(),
                template_fingerprint=layout.template_fingerprint,
                template=msgspec.Raw(layout.encoded_template),
                placement=layout.placement,
                common=common,
                description={**versions(), **request.job.description},
                retain_interval=request.job.retain_interval,
                retention=self._config.retention,
                metrics=reported,
            )
        )
