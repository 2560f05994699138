"""One table classifies all error numbers, and every message ends with the remedy of its class."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron_flashckpt.error_classes import (
    DEFAULT,
    TABLE,
    class_of,
    is_unsupported,
    may_pass,
    will_last,
)
from megatron_flashckpt.errors import StorageError, is_damage
from megatron_flashckpt.storage.posix_store import PosixStore


def error_of(number: int) -> StorageError:
    return StorageError(number, os.strerror(number))


@pytest.mark.parametrize("call", ["open", "scandir"])
def test_every_error_number_has_a_class_and_a_user_sees_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = PosixStore(tmp_path)
    (tmp_path / "file").write_bytes(b"x")
    for number in errno.errorcode:
        error_class = class_of(number)
        assert error_class == TABLE.get(number, DEFAULT)
        assert error_class.remedy

        def refuse(*args: object, number: int = number, **named: object) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse)
            if number in (errno.ENOENT, errno.EINTR):
                continue  # a missing file is no storage error, and Python retries EINTR itself
            with pytest.raises(StorageError) as caught:
                store.get("file") if call == "open" else store.list("")
        assert caught.value.errno == number
        assert str(caught.value).endswith(error_class.remedy)
        assert str(tmp_path) in str(caught.value)


def test_a_transient_error_loses_iterations_only_if_it_lasts() -> None:
    away = [number for number, of in TABLE.items() if of.kind == "transient"]
    known = {errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EAGAIN, errno.EREMOTEIO}
    assert known <= set(away)
    assert all(may_pass(error_of(number)) and not is_damage(error_of(number)) for number in away)
    for number in (errno.EIO, errno.ESTALE):
        assert may_pass(error_of(number))
        assert is_damage(error_of(number)), "after the retries the error counts as damage"


@pytest.mark.parametrize(
    ("number", "lasts", "damages", "unsupported"),
    [
        (errno.ENOSPC, True, False, False),
        (errno.EDQUOT, True, False, False),
        (errno.EROFS, True, False, False),
        (errno.EACCES, True, False, False),
        (errno.EPERM, True, False, False),
        (errno.EOPNOTSUPP, True, False, True),
        (errno.EIO, False, True, False),
        (errno.EISDIR, False, True, False),
        (errno.EMFILE, False, False, False),
        (errno.ETIMEDOUT, False, False, False),
        (errno.EDOM, False, False, False),
        (None, False, False, False),
    ],
    ids=lambda value: "" if isinstance(value, bool) else errno.errorcode.get(value, "none"),
)
def test_the_class_of_an_error_decides_its_consequences(
    number: int | None, lasts: bool, damages: bool, unsupported: bool
) -> None:
    error = StorageError(number, "said")
    assert (will_last(error), is_damage(error), is_unsupported(error)) == (
        lasts,
        damages,
        unsupported,
    )
