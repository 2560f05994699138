"""An object is sent in order, with bounded memory, whatever the order of its chunks."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.storage import object_writer
from megatron_flashckpt.storage.object_writer import ObjectWriter

CHUNK = b"x" * 1000


class Upload:
    """A server that takes a chunk for each release of `may_take`, and may fail then."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.taken: list[bytes] = []
        self.may_take = threading.Semaphore(0)
        self._failure = failure

    def __call__(self, chunks: Iterator[bytes]) -> None:
        for chunk in chunks:
            self.may_take.acquire()
            if self._failure is not None:
                raise self._failure
            self.taken.append(chunk)


def writer_to(upload: Upload, nbytes: int) -> ObjectWriter:
    return ObjectWriter("s3://b/f", nbytes, upload)


@pytest.fixture(autouse=True)
def few_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_writer, "_WAITING_NBYTES", 3 * len(CHUNK))


def test_a_writer_waits_for_an_upload_that_is_slower():
    upload = Upload()
    writer = writer_to(upload, 20 * len(CHUNK))
    written = 0

    def write() -> None:
        nonlocal written
        for number in range(20):
            writer.write_at(number * len(CHUNK), CHUNK)
            written += 1

    with ThreadPoolExecutor() as pool:
        writing = pool.submit(write)
        for taken in range(20):
            # The upload has asked for one chunk more than it was allowed to take.
            while not writing.done() and written < min(taken + 5, 20):
                threading.Event().wait(0.001)
            assert written <= taken + 5
            upload.may_take.release()
        writing.result()
    writer.finish()
    assert upload.taken == [CHUNK] * 20


def test_a_writer_whose_first_chunk_comes_last_does_not_wait_for_itself():
    upload = Upload()
    for _ in range(9):
        upload.may_take.release()
    writer = writer_to(upload, 9 * len(CHUNK))
    for number in reversed(range(9)):
        writer.write_at(number * len(CHUNK), bytes([number]) * len(CHUNK))
    writer.finish()
    assert upload.taken == [bytes([number]) * len(CHUNK) for number in range(9)]


def test_a_failed_upload_ends_every_write_that_waits():
    upload = Upload(StorageError(errno.EACCES, "refused"))
    writer = writer_to(upload, 20 * len(CHUNK))

    def write(number: int) -> None:
        writer.write_at(number * len(CHUNK), CHUNK)

    with ThreadPoolExecutor(20) as pool:
        writes = [pool.submit(write, number) for number in range(20)]
        upload.may_take.release()
        assert any(isinstance(done.exception(), StorageError) for done in writes)
    with pytest.raises(StorageError, match="refused"):
        writer.finish()
    writer.abandon()


@pytest.mark.parametrize("at", [0, 2])
def test_an_object_with_a_gap_is_not_finished(at):
    upload = Upload()
    upload.may_take.release()
    writer = writer_to(upload, 2 * len(CHUNK))
    writer.write_at(at * len(CHUNK), CHUNK)
    with pytest.raises(StorageError, match="2000 bytes should be written"):
        writer.finish()
