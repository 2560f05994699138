"""Digests of slots in memory, which reveal later changes; one pool of threads for all ranks.

No save waits for digests: a slot may be overwritten while it is digested, which ends that.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence

from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.agent.node import Node, Trainer
from megatron_flashckpt.agent.rank_slots import RankSlots, SlotInfo
from megatron_flashckpt.agent.write_limits import lower_priority
from megatron_flashckpt.errors import shown_error
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES, chunk_count, chunk_digest
from megatron_flashckpt.memory.slot import Slot

logger = logging.getLogger(__name__)

#: Bounds the threads of a node: one reads 9 GB/s or more, and training needs the memory bus too.
_MOST_THREADS = 8
#: Age in seconds of a slot that is digested while its trainer lives. Saves that follow each other
#: faster overwrite it before that, and so cost no digests.
_SETTLED_S = 1.0
#: Chunks (32 MiB) that a thread digests before another slot has its turn.
_TURN_CHUNKS = 8


class Digester:
    """Digests the complete slots of all ranks that nothing has read. Safe to use from threads."""

    def __init__(self, node: Node) -> None:
        self._node = node
        cpus = len(os.sched_getaffinity(0))
        self._threads = max(1, min(_MOST_THREADS, cpus // 2))
        self._pool = self._new_pool()

    def _new_pool(self) -> concurrent.futures.ThreadPoolExecutor:
        nice = self._node.options.writer_nice
        return concurrent.futures.ThreadPoolExecutor(
            self._threads, "digest", lower_priority, (nice,)
        )

    def configure(self) -> None:
        """Apply the node's changed settings. The caller holds the lock."""
        former, self._pool = self._pool, self._new_pool()
        former.shutdown(wait=False)

    def close(self) -> None:
        """End the threads without finishing: the memory is about to be freed."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def digest_settled(self) -> None:
        """Begin to digest the slots that are likely to stay. Called often, by the main thread."""
        with self._node.changed:
            for rank in self._node.ranks.values():
                self.digest(rank, before=time.monotonic() - _SETTLED_S)

    def digest(self, rank: Trainer, before: float = math.inf) -> None:
        """Begin to digest the slots of a rank that nothing has read. The caller holds the lock.

        A save whose bytes change from then on is neither loaded nor persisted.

        Args:
            before: leaves out slots that were accepted later, and those that are being written to
                storage, which digests them; infinite: the trainer is gone, so all are digested.
        """
        if rank.slots is None:
            return
        for slot, info in rank.slots.undigested():
            if before < math.inf and not info.has_settled(before):
                continue
            info.awaits_digests = True
            # Beside training, one thread per rank: with eight for one rank, steps of a launch-bound
            # model took a fifth longer (H100, 16 cores). A restart waits for slots that were not
            # begun before, so these get all threads.
            threads = self._threads if before == math.inf else 1
            reading = _Reading(rank, rank.slots, slot, info, threads)
            for numbers in reading.parts():
                self._queue(reading, numbers)

    def _queue(self, reading: _Reading, numbers: Iterator[int]) -> None:
        # If the process has no thread left, the turn stays queued for the threads that there are.
        with contextlib.suppress(RuntimeError):
            self._pool.submit(self._take_turn, reading, numbers)

    def _take_turn(self, reading: _Reading, numbers: Iterator[int]) -> None:
        """Digest the next chunks of a part, and queue the rest behind the turns of other slots."""
        turn = list(itertools.islice(numbers, _TURN_CHUNKS))
        reading.digest_chunks(turn)
        with self._node.changed:
            if turn and not reading.is_over:
                self._queue(reading, numbers)
            elif reading.end_part():
                self._node.changed.notify_all()


class _Reading:
    """One slot that several threads digest, each a part of the chunks."""

    def __init__(
        self, rank: Trainer, slots: RankSlots, slot: Slot, info: SlotInfo, threads: int
    ) -> None:
        self._rank, self._slots, self._slot, self._info = rank, slots, slot, info
        self._header = slot.header
        self._digests = [""] * chunk_count(self._header.data_nbytes)
        self._open_parts = threads
        self._error: Exception | None = None

    def parts(self) -> list[Iterator[int]]:
        """Return the numbers of the chunks, divided among the threads."""
        threads = self._open_parts
        return [iter(range(first, len(self._digests), threads)) for first in range(threads)]

    @property
    def is_over(self) -> bool:
        """Return whether further digests are useless."""
        is_overwritten = self._slots.infos[self._slot.index] is not self._info
        return is_overwritten or self._slots.slab.fd < 0 or self._error is not None

    def digest_chunks(self, numbers: Sequence[int]) -> None:
        """Digest some chunks, in a worker thread. No view outlives the call: slabs are freed."""
        try:
            with self._slot.data() as data:
                for number in numbers:
                    if self.is_over:
                        return
                    with data[number * CHUNK_NBYTES : (number + 1) * CHUNK_NBYTES] as chunk:
                        self._digests[number] = chunk_digest(chunk)
        except Exception as error:
            if not self.is_over:  # otherwise the slab was closed meanwhile
                self._error = error

    def end_part(self) -> bool:
        """Note that a part has ended; return True for the last. The caller holds the lock."""
        self._open_parts -= 1
        if self._open_parts:
            return False
        info = self._info
        info.awaits_digests = False
        if self._error is not None:
            # A load then restores the slot unverified, and reports that.
            text = f"not digested in host memory: {shown_error(self._error)}; the slot is kept"
            logger.error("iteration %d: %s", self._header.iteration, text, exc_info=self._error)
            self._rank.report(p.Notice(self._header.iteration, text))
            info.accepted_at = math.inf  # not again while its trainer lives
        elif not self.is_over:
            # Digests taken while the slot was written count: storage has those bytes.
            info.digests = info.digests or tuple(self._digests)
        return True
