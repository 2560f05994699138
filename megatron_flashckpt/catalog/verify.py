"""Read every byte of a checkpoint and name all that is damaged. Torch-free; changes nothing."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint
from megatron_flashckpt.errors import OLDER, CorruptCheckpointError, FlashCkptError
from megatron_flashckpt.file_format.file_names import MANIFEST
from megatron_flashckpt.layout.completeness import incomplete

#: Files read at the same time: hides the latency of network storage; each holds one 4 MiB chunk.
_THREADS = 4


def nbytes_to_read(stored: StoredCheckpoint) -> int:
    """Return the sum of what `verify` reports to `on_read`."""
    return sum(entry.nbytes for entry in stored.manifest.shards)


def verify(
    stored: StoredCheckpoint, on_read: Callable[[int], object] = lambda nbytes: None
) -> list[FlashCkptError]:
    """Return every damage, in the order of the files; an empty list means intact.

    Checked are: that every element of every tensor is there exactly once, `common-<id>.msgpack`,
    and of each shard file its size, its header (digest, and that it is the one the manifest means)
    and the digest of every chunk. The data of a file whose header is damaged cannot be checked.

    Args:
        on_read: called with the bytes just dealt with, from several threads.
    """
    damages: list[FlashCkptError] = [
        CorruptCheckpointError(f"{stored.place}/{MANIFEST}: {problem}; {OLDER}")
        for problem in incomplete(stored.sources())
    ]
    try:
        stored.common()
    except FlashCkptError as error:
        damages.append(error)
    stop = threading.Event()
    ranks = range(len(stored.manifest.shards))
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        jobs = [pool.submit(_verify_shard, stored, rank, on_read, stop) for rank in ranks]
        try:
            for job in jobs:
                damages += job.result()
        except BaseException:  # KeyboardInterrupt above all: gigabytes may be left to read
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return damages


def _verify_shard(
    stored: StoredCheckpoint, rank: int, on_read: Callable[[int], object], stop: threading.Event
) -> list[FlashCkptError]:
    left = stored.manifest.shards[rank].nbytes
    damages: list[FlashCkptError] = []
    try:
        shard = stored.shard(rank)
        on_read(shard.data_offset)
        left -= shard.data_offset
        for index in range(len(shard.digests)):
            if stop.is_set():
                break
            try:
                done = len(stored.chunk(shard, index))
            except CorruptCheckpointError as error:
                # The other chunks are worth knowing about, unlike after an I/O error.
                damages.append(error)
                continue
            on_read(done)
            left -= done
    except FlashCkptError as error:
        damages.append(error)
    on_read(left)
    return damages
