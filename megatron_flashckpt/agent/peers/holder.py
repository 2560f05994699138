"""What this node holds for others: copies, or parities that need the others to be of use."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Collection
from typing import NamedTuple

from megatron_flashckpt.agent.freeing import free
from megatron_flashckpt.agent.peers.messages import Held, Label
from megatron_flashckpt.agent.peers.topology import Lane, Part
from megatron_flashckpt.memory.host_memory import available_nbytes, shown

logger = logging.getLogger(__name__)


class HoldError(Exception):
    """A contribution cannot be taken; the message says why."""


class _Contribution(NamedTuple):
    part: Part
    label: Label

    @property
    def bounds(self) -> tuple[int, int]:
        return self.part.bounds(self.label.nbytes)


class _Record:
    """The parts of one save from the ranks of one lane, combined."""

    def __init__(self, save_id: str, iteration: int, memory: mmap.mmap | None) -> None:
        self.save_id = save_id
        self.iteration = iteration
        self.memory = memory
        self.parts: dict[int, _Contribution] = {}
        self.received: dict[int, int] = {}

    def finished(self, rank: int) -> bool:
        if rank not in self.parts:
            return False
        start, end = self.parts[rank].bounds
        return self.received[rank] == end - start

    def complete(self, lane: Lane) -> bool:
        return all(self.finished(rank) for rank in lane)


class Holdings:
    """By lane, as many saves as the senders have slots. Safe to use from several threads."""

    def __init__(self, gave_up: Callable[[int, set[int]], None] = lambda iteration, ranks: None):
        """Args: `gave_up`: told of an iteration and the ranks whose finished parts had to go."""
        self._gave_up = gave_up
        self._lock = threading.Lock()
        self._lanes: dict[Lane, list[_Record]] = {}

    def begin(self, part: Part, label: Label) -> bool:
        """Make room for a part; return False if it is here already.

        A complete save is given up for a newer one only when all places are taken, and so are the
        slots that it would be restored together with.

        Raises:
            HoldError: newer ones take all places, or the memory is not there.
        """
        spoiled: set[int] = set()
        with self._lock:
            records = self._lanes.setdefault(part.lane, [])
            record = next((r for r in records if r.save_id == label.save_id), None)
            if record is not None and record.finished(label.rank):
                return False
            # What this rank began and left can never be completed. It has gone into the others'
            # parts, too, if there are any.
            begun = [each for each in records if label.rank in each.parts]
            for dead in [each for each in begun if not each.finished(label.rank)]:
                records.remove(dead)
                free(dead.memory)
                if dead is record:
                    spoiled = dead.parts.keys() - {label.rank}
                    record = None
            if record is None:
                record = self._new(part.lane, label)
            start, end = part.bounds(label.nbytes)
            try:
                record.memory = _at_least(record.memory, end - start)
            except HoldError:
                records.remove(record)
                free(record.memory)
                raise
            record.parts[label.rank] = _Contribution(part, label)
            record.received[label.rank] = 0
        if spoiled:
            self._gave_up(label.iteration, spoiled)
        return True

    def _new(self, lane: Lane, label: Label) -> _Record:
        records, memory = self._lanes[lane], None
        if len(records) >= label.geometry.slots:
            oldest = min(records, key=lambda record: record.iteration)
            if oldest.iteration > label.iteration:
                raise HoldError(f"newer saves than that of iteration {label.iteration} are here")
            records.remove(oldest)
            memory = oldest.memory
            if memory is not None and len(lane) > 1:
                _clear(memory)
        record = _Record(label.save_id, label.iteration, memory)
        records.append(record)
        return record

    def add(self, lane: Lane, rank: int, save_id: str, start: int, data: memoryview) -> None:
        """Combine bytes of a part with what is here.

        Raises:
            HoldError: they do not follow what came before, or the save was given up.
        """
        with self._lock:
            record = self._find(lane, save_id)
            if record is None or rank not in record.parts:
                raise HoldError("a newer save took its place")
            low, high = record.parts[rank].bounds
            end = start + len(data)
            if start != record.received[rank] or end > high - low or record.memory is None:
                raise HoldError(f"bytes {start} to {end} do not follow {record.received[rank]}")
            if len(lane) == 1:
                record.memory[start:end] = data
            else:
                combine(record.memory, start, data)
            record.received[rank] = end

    def end(self, lane: Lane, rank: int, save_id: str) -> None:
        """Check that a part is complete.

        Raises:
            HoldError: it is not.
        """
        with self._lock:
            record = self._find(lane, save_id)
            if record is None or not record.finished(rank):
                raise HoldError("not all of it came")
            logger.info("iteration %d of rank %d is held here", record.iteration, rank)

    def held_of(self, rank: int) -> list[Held]:
        """Return the complete saves that a checkpoint of `rank` is part of."""
        with self._lock:
            return [
                Held(
                    *record.parts[rank],
                    tuple((r, *record.parts[r].bounds) for r in lane if r != rank),
                )
                for lane, records in self._lanes.items()
                for record in records
                if rank in lane and record.complete(lane)
            ]

    def read(self, lane: Lane, save_id: str, start: int, nbytes: int) -> bytes:
        """Return bytes of a complete save; zeros beyond its end.

        Raises:
            HoldError: it is not here any more.
        """
        with self._lock:
            record = self._find(lane, save_id)
            if record is None or record.memory is None or not record.complete(lane):
                raise HoldError("a newer save took its place")
            return record.memory[start : start + nbytes].ljust(nbytes, b"\0")

    def adopt(self, save_id: str | None, iteration: int, lanes: Collection[Lane]) -> None:
        """Drop what belongs to a past that did not happen, and lanes that are not kept any more."""
        with self._lock:
            for lane in set(self._lanes).difference(lanes):
                for record in self._lanes.pop(lane):
                    free(record.memory)
            for records in self._lanes.values():
                for record in records[:]:
                    if record.save_id != save_id and record.iteration >= iteration:
                        records.remove(record)
                        free(record.memory)

    def _find(self, lane: Lane, save_id: str) -> _Record | None:
        records = self._lanes.get(lane, ())
        return next((record for record in records if record.save_id == save_id), None)


def _at_least(memory: mmap.mmap | None, nbytes: int) -> mmap.mmap:
    """Return memory of `nbytes` or more that begins as the given one does."""
    if memory is not None and len(memory) >= nbytes:
        return memory
    available = available_nbytes()
    if nbytes > available:
        raise HoldError(
            f"its node has {shown(available)} of memory left and needs {shown(nbytes)}; free "
            "memory there, or set 'redundancy' to xor or none"
        )
    larger = mmap.mmap(-1, max(nbytes, 1))
    if memory is not None:
        larger[: len(memory)] = memory[:]
    free(memory)
    return larger


def combine(memory: mmap.mmap | bytearray, start: int, data: bytes | memoryview) -> None:
    """Exclusive-or `data` into `memory` from `start` on."""
    # numpy does 30 GB/s, integers of Python 0.4; it is loaded only where there is parity.
    import numpy as np

    target = np.frombuffer(memory, np.uint8, len(data), start)
    np.bitwise_xor(target, np.frombuffer(data, np.uint8), out=target)


def _clear(memory: mmap.mmap) -> None:
    import numpy as np

    np.frombuffer(memory, np.uint8).fill(0)
