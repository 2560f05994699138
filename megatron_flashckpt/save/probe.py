"""Check before the first step that the save directory can hold checkpoints and is shared.

Every node does with small files what a save does with shards and ends (`storage.store_probe`). Then
the node of rank 0, which commits, waits until it sees the files of all nodes. Without this check,
such faults appear in the first save, hours later; a node-local directory even after the commit
timeout.
"""

from __future__ import annotations

import errno
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from megatron_flashckpt.collectives import run_and_gather, run_on_rank_0
from megatron_flashckpt.errors import FlashCkptError, StorageError, first_few
from megatron_flashckpt.file_format.file_names import PROBES
from megatron_flashckpt.save.background_work import answer_within
from megatron_flashckpt.storage.retrying_store import RetryingStore
from megatron_flashckpt.storage.store import Store
from megatron_flashckpt.storage.store_probe import probe_store

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Longest wait for one storage operation, in seconds.
_ANSWER_S = 60.0
#: First and longest pause between two listings.
_POLL_S = (0.02, 1.0)
#: Shorter visibility delays are not reported.
_SLOW_S = 1.0


def check(store: Store, rank: int, *, is_first_of_node: bool, wait_s: float | None) -> None:
    """Check on all ranks that all nodes can save to `store`. Collective: two small messages.

    Args:
        is_first_of_node: True on the rank that probes for its node.
        wait_s: longest wait of rank 0 for the files of the other nodes. None: this node writes no
            file; None on rank 0: rank 0 does not wait. Nodes may pass different values.

    Raises:
        StorageError: names the operation that failed, or the ranks whose nodes are not seen; on all
            ranks.
    """
    is_probing = is_first_of_node and wait_s is not None
    name = f"{PROBES}/{rank:05d}-{secrets.token_hex(4)}" if is_probing else None
    # A short outage of storage must not end a job that has just started.
    retrying = RetryingStore(store)
    found: set[str] = set()

    def probe() -> tuple[None, str | None]:
        if name is not None:
            if rank == 0:
                found.update(_within(_ANSWER_S, lambda: _present(retrying), store))
            _within(_ANSWER_S, lambda: probe_store(store, name), store)
        return None, name

    unused = set[str]() if name is None else {name}
    try:
        _, names = run_and_gather(probe)
        unused |= found.difference(names)  # of killed jobs
        seen_s = run_on_rank_0(lambda: 0.0 if wait_s is None else _await(retrying, names, wait_s))
    finally:
        if name is not None:
            # In the background: hanging storage must not delay training.
            threading.Thread(target=_remove, args=(retrying, unused), daemon=True).start()
    if rank == 0 and seen_s > _SLOW_S:
        logger.warning(
            "%s: what other nodes wrote became visible after %.1f s; every commit waits for that",
            store.place,
            seen_s,
        )


def _await(store: Store, names: Sequence[str | None], wait_s: float) -> float:
    """Wait until the files of all nodes are visible; return the seconds waited.

    Args:
        names: the probe file of each rank; None for a rank that does not probe.

    Raises:
        StorageError: names the ranks whose files were not seen within `wait_s`.
    """
    expected = {name: rank for rank, name in enumerate(names) if name is not None}
    began = time.monotonic()
    pause_s, longest_s = _POLL_S
    while True:
        present = _within(_ANSWER_S, lambda: _present(store), store)
        waited_s = time.monotonic() - began
        missing = sorted(rank for name, rank in expected.items() if name not in present)
        if not missing:
            return waited_s
        if waited_s > wait_s:
            unseen = first_few(missing)
            raise StorageError(
                errno.ENOENT,
                f"{store.place}: the node of rank 0 does not see what {len(missing)} of "
                f"{len(expected)} nodes (those of ranks {unseen}) have written {wait_s:.0f} s "
                f"ago: {store.advice.unseen}",
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)


def _present(store: Store) -> list[str]:
    return [f"{PROBES}/{entry.name}" for entry in store.list(PROBES, sizes=False)]


def _remove(store: Store, names: set[str]) -> None:
    try:
        store.delete(names)
    except (FlashCkptError, OSError) as error:
        logger.warning("%s: a probe file was not removed: %s", store.place, error)


def _within(seconds: float, work: Callable[[], _T], store: Store) -> _T:
    """Run `work` in a thread of its own and return its result.

    Raises:
        StorageError: storage did not answer in time; the thread keeps waiting.
    """
    answer = answer_within(seconds, "flashckpt-probe", work)
    if not answer.done():
        raise StorageError(
            errno.ETIMEDOUT,
            f"{store.place}: does not answer within {seconds:.0f} s; {store.advice.away}",
        )
    return answer.result()
