"""Verification of every byte of a checkpoint; needs no torch, changes no file."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint
from megatron_flashckpt.errors import OLDER, CorruptCheckpointError, FlashCkptError
from megatron_flashckpt.layout.completeness import incomplete

#: Files read at the same time, which hides the latency of network storage; 4 MiB of memory each.
_THREADS = 4


def nbytes_to_read(stored: StoredCheckpoint) -> int:
    """Return the number of bytes that `verify` reports to `on_read` in total."""
    return sum(entry.nbytes for entry in stored.manifest.shards)


def verify(
    stored: StoredCheckpoint, on_read: Callable[[int], object] = lambda nbytes: None
) -> list[FlashCkptError]:
    """Return all damage, in the order of the files; an empty list means intact.

    The checks: every element of every tensor is stored exactly once; the digest of
    the common file; size, header digest and header identity of each shard file; the digest of
    every chunk. If a header is damaged, the data of its file cannot be checked.

    Args:
        on_read: called from several threads with the number of bytes that were just checked.
    """
    damages: list[FlashCkptError] = [
        CorruptCheckpointError(f"{stored.end_place}: {problem}; {OLDER}")
        for problem in incomplete(stored.sources())
    ]
    try:
        stored.common()
    except FlashCkptError as error:
        damages.append(error)
    stop = threading.Event()
    ranks = range(len(stored.manifest.shards))
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        try:
            for found in pool.map(lambda rank: _verify_shard(stored, rank, on_read, stop), ranks):
                damages += found
        except BaseException:  # KeyboardInterrupt must not wait for gigabytes of reads
            stop.set()
            raise
    return damages


def _verify_shard(
    stored: StoredCheckpoint, rank: int, on_read: Callable[[int], object], stop: threading.Event
) -> list[FlashCkptError]:
    unreported_nbytes = stored.manifest.shards[rank].nbytes
    damages: list[FlashCkptError] = []
    try:
        shard = stored.shard(rank)
        on_read(shard.data_offset)
        unreported_nbytes -= shard.data_offset
        for index in range(len(shard.digests)):
            if stop.is_set():
                break
            try:
                checked_nbytes = len(stored.chunk(shard, index))
            except CorruptCheckpointError as error:
                # Report damage in the other chunks too; an I/O error would repeat.
                damages.append(error)
                continue
            on_read(checked_nbytes)
            unreported_nbytes -= checked_nbytes
    except FlashCkptError as error:
        damages.append(error)
    on_read(unreported_nbytes)
    return damages
