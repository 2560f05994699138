"""Directories in Megatron's layout that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_flashckpt.errors import ConfigError, StorageError
from megatron_flashckpt.layout.names import TRACKER, iteration_dir
from megatron_flashckpt.storage.posix import PosixStorage

RELEASE = "release"


@contextlib.contextmanager
def new_directory(final: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield an empty directory, named as `final`, that becomes `final` if the block ends well.

    Whatever has that name before stays as it is until then.

    Raises:
        ConfigError: something has that name, and `overwrite` was not given.
    """
    if final.exists() and not overwrite and (not final.is_dir() or any(final.iterdir())):
        raise ConfigError(
            f"{final}: exists already; name another directory, or replace it with --overwrite"
        )
    around = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.tmp")
    fresh = around / final.name
    fresh.mkdir(parents=True)
    try:
        yield fresh
        for path in (*fresh.rglob("*"), fresh):
            _sync(path)
        _replace(final, fresh, around / "replaced")
        _sync(final.parent)
    except OSError as error:
        # The source and the storage name their files; what has no name went into open ones.
        if isinstance(error, StorageError) or error.filename is not None:
            raise
        raise _unwritable(final, error) from error
    finally:
        shutil.rmtree(around, ignore_errors=True)


def _replace(final: Path, fresh: Path, aside: Path) -> None:
    if not final.exists():
        fresh.rename(final)
        return
    final.rename(aside)
    try:
        fresh.rename(final)
    except OSError:
        aside.rename(final)
        raise


def save(held: Any, path: Path, *, append: bool = False) -> tuple[int, int]:
    """Save `held` as `torch.save` does; return where in the file it begins and ends.

    Raises:
        StorageError: it could not be written; torch's own error would not say why.
    """
    with open(path, "ab" if append else "wb") as file:
        start = file.tell()
        try:
            torch.save(held, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise _unwritable(path, error.__context__) from error
            raise
        return start, file.tell()


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        error.errno,
        f"{path}: cannot be written ({error.strerror}); free space there or convert to elsewhere",
    )


def move_tracker(root: Path, iteration: int, *, megatron: bool = False) -> None:
    """Make `iteration` the one that jobs load from `root`, unless a later one is.

    Called when the checkpoint is complete.
    """
    storage = PosixStorage(root)
    try:
        text = storage.read(TRACKER).decode(errors="replace").strip()
    except FileNotFoundError:
        text = ""
    if not (text.isdecimal() and int(text) > iteration):
        named = RELEASE if megatron and iteration == 0 else str(iteration)
        storage.put(TRACKER, named.encode())


def checkpoint_directory(root: Path, iteration: int, *, megatron: bool = False) -> Path:
    """Return where a save directory keeps `iteration`.

    Args:
        megatron: in a format of Megatron's own, which calls the weights that a training starts
            from, its iteration 0, a release.
    """
    return root / (RELEASE if megatron and iteration == 0 else iteration_dir(iteration))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
