"""Directories in Megatron's layout that appear whole or not at all."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_flashckpt.convert.common import former_export
from megatron_flashckpt.errors import ConfigError, StorageError
from megatron_flashckpt.file_format.file_names import TRACKER, iteration_dir
from megatron_flashckpt.storage.opening import open_storage

logger = logging.getLogger(__name__)

RELEASE = "release"


@contextlib.contextmanager
def new_directory(final: Path, *, overwrite: bool, mark: bool = True) -> Iterator[Path]:
    """Yield an empty directory, named as `final`, that becomes `final` if the block ends well.

    Whatever has that name before stays as it is until then.

    Args:
        overwrite: replace the result of an earlier conversion. Nothing else is ever replaced.
        mark: list what the block writes, so that a later conversion may replace it; needless where
            `former_export` knows the files by themselves.

    Raises:
        ConfigError: something has that name, and may not be replaced.
    """
    if final.is_symlink() or final.exists():
        _refuse(final, overwrite=overwrite)
    number = uuid.uuid4().hex[:8]
    around = final.with_name(f".{final.name}.{number}.tmp")
    fresh = around / final.name
    fresh.mkdir(parents=True)
    try:
        yield fresh
        if mark:
            former_export.mark(fresh)
        for path in (*fresh.rglob("*"), fresh):
            _sync(path)
        _replace(final, fresh, final.with_name(f".{final.name}.{number}.replaced"))
        _sync(final.parent)
    except OSError as error:
        # The source and the storage name their files; what has no name went into open ones.
        if isinstance(error, StorageError) or error.filename is not None:
            raise
        raise _unwritable(final, error) from error
    finally:
        shutil.rmtree(around, ignore_errors=True)  # nobody else knows its name


def _refuse(final: Path, *, overwrite: bool) -> None:
    """Raise ConfigError if something is at `final` that may not be replaced."""
    if final.is_mount():
        raise ConfigError(
            f"{final}: is a mount point, which nothing replaces; name a directory in it"
        )
    if final.is_symlink() or overwrite:
        former_export.refuse_others(final)
    elif not final.is_dir() or any(final.iterdir()):
        raise ConfigError(
            f"{final}: exists already; name another directory, or replace the result of an earlier "
            "conversion with --overwrite"
        )


def _replace(final: Path, fresh: Path, aside: Path) -> None:
    if not final.exists():
        fresh.rename(final)
        return
    final.rename(aside)
    try:
        # Looked at again: the conversion may have taken hours, and users work meanwhile.
        former_export.refuse_others(aside, final)
        fresh.rename(final)
    except (OSError, ConfigError):
        aside.rename(final)
        raise
    if not former_export.remove(aside):
        logger.warning("%s: holds what was put into %s a moment ago; it stays", aside, final)


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
    storage = open_storage(root)
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
