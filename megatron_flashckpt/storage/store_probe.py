"""Check that a store can do all that a save will ask of it, before the first step of a run."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os

from megatron_flashckpt.errors import AlreadyExistsError, StorageError
from megatron_flashckpt.storage.direct_io import ALIGNMENT
from megatron_flashckpt.storage.retrying_store import RetryingStore
from megatron_flashckpt.storage.store import Store, parent_of


def probe_store(store: Store, name: str) -> None:
    """Write, create, read, list and delete small objects as a save does; leave `name`.

    A short outage of storage must not end a job that has just started, so what may pass is
    repeated. The caller lets other nodes look for `name`, and deletes it.

    Args:
        name: a new name, with a directory, that no other node probes with.

    Raises:
        StorageError: names the action that failed.
    """
    directory, base = parent_of(name), name.rpartition("/")[2]
    shard, last = f"{name}.shard", f"{name}.last"
    data = os.urandom(16)
    store = RetryingStore(store)
    action = ""
    try:
        action = "write a large object"
        _write(store, shard)
        action = "create a name once"
        store.create(name, data)
        with contextlib.suppress(AlreadyExistsError):
            store.create(name, b"other")
            _expect(False, store, name, "a second create replaced it", store.advice.needs)
        action = "make a name durable"
        store.make_durable(name)
        action = "read what was written"
        _expect(store.get(name) == data, store, name, "holds other bytes than written")
        action = "list a new name"
        listed = {entry.name: entry.nbytes for entry in store.list(directory)}
        expected = {base: len(data), f"{base}.shard": 2 * ALIGNMENT}
        _expect(
            expected.items() <= listed.items(),
            store,
            name,
            "is not listed in its size",
        )
        _expect(store.stat(name) is not None, store, name, "is not found")
        action = "replace a name"
        for contents in (b"one", b"two"):
            store.put(last, contents)
            _expect(
                store.get(last) == contents,
                store,
                last,
                "holds other bytes than written",
            )
        action = "delete a name"
        store.delete([shard, last])
        _expect(store.stat(shard) is None, store, shard, "was deleted, but still exists")
    except OSError as error:
        with contextlib.suppress(OSError):
            store.delete([shard, last])
        text = error.strerror if isinstance(error, StorageError) else str(error)
        raise StorageError(
            error.errno, f"{store.place}: this node cannot {action} ({text})"
        ) from error


def _write(store: RetryingStore, name: str) -> None:
    """Write two aligned pages, the last one first, and read them."""
    memory = memoryview(mmap.mmap(-1, 2 * ALIGNMENT))
    memory[:] = os.urandom(memory.nbytes)

    def write() -> None:
        writer = store.writer(name, memory.nbytes)
        try:
            writer.write_at(ALIGNMENT, memory[ALIGNMENT:])
            writer.write_at(0, memory[:ALIGNMENT])
            writer.finish()
        except BaseException:
            writer.abandon()
            raise

    # A writer's errors are not retried: the whole object has to be. An attempt that failed may have
    # made it; its bytes are read next.
    with contextlib.suppress(AlreadyExistsError):
        store.with_retries(write)
    _expect(store.get(name) == memory, store, name, "holds other bytes than written")


def _expect(is_so: bool, store: Store, name: str, fault: str, cure: str = "save elsewhere") -> None:
    if not is_so:
        raise StorageError(errno.EIO, f"{store.place}/{name}: {fault}; {cure}")
