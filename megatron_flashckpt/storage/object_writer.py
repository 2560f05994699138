"""Sends an object to a bucket in the order of its bytes, which threads write in any order."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from typing import Literal

from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.failpoints import hit

#: Bytes that wait for the upload before `write_at` waits, too.
_WAITING_NBYTES = 32 * 2**20


class ObjectWriter:
    """See `storage.store.Writer`. The object appears with `finish`.

    Chunks are copied, and sent in the order of the object while others are written. A chunk behind
    a gap waits in memory until the gap is filled. So memory is bounded if no chunk is written much
    later than those behind it.
    """

    def __init__(
        self,
        place: str,
        nbytes: int,
        upload: Callable[[Iterator[bytes]], None],
    ) -> None:
        """Start the upload.

        Args:
            place: the object, for messages.
            upload: creates the object of the chunks that it is given, or nothing if these raise.
        """
        self._place = place
        self._nbytes = nbytes
        self._upload = upload
        self._changed = threading.Condition()
        #: Chunks that wait for the upload, by offset.
        self._waiting: dict[int, bytes] = {}
        #: Offset of the chunk that the upload takes next.
        self._next = 0
        self._state: Literal["open", "finished", "abandoned"] = "open"
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def write_at(self, offset: int, chunk: bytes | memoryview) -> None:
        data = bytes(chunk)
        with self._changed:
            # Never waits for a gap: the thread that waits may be the one that has to fill it.
            self._changed.wait_for(lambda: not self._is_behind())
            self._check_open()
            if data:
                self._waiting[offset] = data
                self._changed.notify_all()

    def finish(self) -> None:
        self._end("finished")
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        self._end("abandoned")

    def _end(self, state: Literal["finished", "abandoned"]) -> None:
        with self._changed:
            if state == "finished":
                self._check_open()
            self._state = state
            self._changed.notify_all()
        self._thread.join()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._state != "open":
            raise StorageError(errno.EBADF, f"{self._place}: is closed")

    def _is_behind(self) -> bool:
        """Return whether the upload has the next chunk, and more than enough behind it."""
        return (
            self._state == "open"
            and self._failure is None
            and self._next in self._waiting
            and sum(map(len, self._waiting.values())) > _WAITING_NBYTES
        )

    def _run(self) -> None:
        failure = None
        try:
            self._upload(self._in_order())
        except Exception as error:
            failure = error
        with self._changed:
            self._failure = failure
            self._waiting.clear()
            self._changed.notify_all()

    def _in_order(self) -> Iterator[bytes]:
        """Yield all chunks in order, as they come.

        Raises:
            StorageError: the writer was abandoned, or finished with a gap.
        """
        hit("upload.begun")
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next in self._waiting or self._state != "open")
                if self._state == "abandoned":
                    raise StorageError(errno.ECANCELED, f"{self._place}: was abandoned")
                chunk = self._waiting.pop(self._next, None)
                if chunk is None:
                    break
                self._next += len(chunk)
                self._changed.notify_all()
            yield chunk
            hit("upload.chunk")
        if self._next != self._nbytes:
            raise StorageError(
                errno.EINVAL,
                f"{self._place}: {self._nbytes} bytes should be written, but those from "
                f"{self._next} on were not",
            )
        hit("upload.whole")
