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
from megatron_flashckpt.errors import (
    OLDER,
    CorruptCheckpointError,
    FlashCkptError,
    MissingStateError,
    StorageError,
    in_words_of_loop,
    is_damage,
)
from megatron_flashckpt.storage.posix_store import PosixStore


@pytest.mark.parametrize(
    ("of_megatron", "of_loop"),
    [
        (OLDER, "load an older iteration with step=N"),
        ("start with --load /a/b --ckpt-step 5", "start with directory=/a/b step=5"),
        ("or start with another --load", "or start with another directory"),
        ("the directory that holds it with --load", "the directory that holds it with directory"),
        ("load it with --no-load-optim or --finetune; no", "load it with weights_only=True; no"),
        ("(add --finetune or --no-load-optim)", "(add weights_only=True)"),
        ("'flashckpt convert --to torch_dist', or", "'flashckpt convert --to torch_dist', or"),
    ],
)
@pytest.mark.parametrize("kind", [StorageError, MissingStateError, CorruptCheckpointError])
def test_an_error_names_the_arguments_of_a_loop_that_has_no_options(
    kind: type[FlashCkptError], of_megatron: str, of_loop: str
) -> None:
    with pytest.raises(kind) as caught, in_words_of_loop():
        raise kind(*([errno.EIO] if kind is StorageError else []), of_megatron)
    assert str(caught.value).removeprefix(f"[Errno {errno.EIO}] ") == of_loop


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


@pytest.mark.parametrize(
    ("numbers", "passes", "lasts", "damages"),
    [
        ("ENOSPC EDQUOT EROFS EACCES EPERM EOPNOTSUPP", False, True, False),
        ("EISDIR", False, False, True),
        ("EIO ESTALE", True, False, True),  # after the retries the error counts as damage
        ("ETIMEDOUT ENOTCONN EHOSTDOWN EAGAIN EREMOTEIO", True, False, False),
        ("EMFILE EDOM", False, False, False),
    ],
)
def test_the_class_of_an_error_decides_its_consequences(
    numbers: str, passes: bool, lasts: bool, damages: bool
) -> None:
    for name in numbers.split():
        error = StorageError(getattr(errno, name), "said")
        assert (may_pass(error), will_last(error), is_damage(error)) == (passes, lasts, damages)
        assert is_unsupported(error) == (name == "EOPNOTSUPP")
    assert not will_last(StorageError(None, "without a number"))
