"""Output directories in Megatron's layout, which appear atomically."""

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

from megatron_flashckpt.catalog.directory import put_tracked
from megatron_flashckpt.catalog.lineage import Tracked
from megatron_flashckpt.catalog.tracker import tracked_iteration
from megatron_flashckpt.convert.common import former_export
from megatron_flashckpt.error_classes import class_of
from megatron_flashckpt.errors import ConfigError, FlashCkptError, StorageError
from megatron_flashckpt.file_format.file_names import RELEASE, TRACKER, iteration_dir
from megatron_flashckpt.storage.opening import open_store

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def new_directory(final: Path, *, overwrite: bool, mark: bool = True) -> Iterator[Path]:
    """Yield an empty directory that is renamed to `final` if the block succeeds.

    An existing `final` stays unchanged until then.

    Args:
        overwrite: replace the result of an earlier conversion; other files are never replaced.
        mark: write a list of the files, so that a later conversion may replace them; not needed if
            `former_export` recognises the files by other means.

    Raises:
        ConfigError: `final` exists and may not be replaced.
    """
    if final.is_symlink() or final.exists():
        _refuse(final, overwrite=overwrite)
    suffix = uuid.uuid4().hex[:8]
    temporary = final.with_name(f".{final.name}.{suffix}.tmp")
    fresh = temporary / final.name
    missing = [parent for parent in final.parents if not parent.exists()]
    try:
        fresh.mkdir(parents=True)
        yield fresh
        if mark:
            former_export.mark(fresh)
        for path in (*fresh.rglob("*"), fresh):
            _sync(path)
        _replace(final, fresh, final.with_name(f".{final.name}.{suffix}.replaced"))
        _sync(final.parent)
    except OSError as error:
        # Errors of the source name a file elsewhere; writes to open files name none.
        if isinstance(error, FlashCkptError) or not _is_of(error.filename, final, temporary):
            raise
        raise _unwritable(final, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # its name is random, so it is ours
        with contextlib.suppress(OSError):  # not empty after a success
            for parent in missing:
                parent.rmdir()


def _is_of(filename: str | None, final: Path, temporary: Path) -> bool:
    """Return whether the file of an error is new, is `final`, or is a directory above it."""
    return filename is None or (
        Path(filename).is_relative_to(temporary) or final.is_relative_to(filename)
    )


def _refuse(final: Path, *, overwrite: bool) -> None:
    """Raise ConfigError if `final` exists and may not be replaced."""
    if final.is_mount():
        raise ConfigError(
            f"{final}: is a mount point, which cannot be replaced; name a directory in it"
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
    # Check again, because users may have added files during the conversion, which takes hours. Do
    # this before the first rename: a killed command must not leave `final` missing meanwhile.
    former_export.refuse_others(final)
    final.rename(aside)
    try:
        fresh.rename(final)
    except BaseException:  # Ctrl-C, too
        if not final.exists():
            aside.rename(final)
        raise
    if not former_export.remove(aside):
        logger.warning("%s: kept, because files were added to %s meanwhile", aside, final)


def save(value: Any, path: Path, *, append: bool = False) -> tuple[int, int]:
    """Save `value` with `torch.save`; return the positions in the file where it begins and ends.

    Raises:
        StorageError: the write failed; torch's own error lacks the reason.
    """
    with open(path, "ab" if append else "wb") as file:
        start = file.tell()
        try:
            torch.save(value, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise _unwritable(path, error.__context__) from error
            raise
        return start, file.tell()


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        error.errno, f"{path}: cannot be written ({error.strerror}); {class_of(error).remedy}"
    )


def move_tracker(root: Path, iteration: int, *, save_id: str = "") -> None:
    """Let the tracker of `root` name `iteration`, unless it names a later one.

    Called when the checkpoint is complete.

    Args:
        save_id: the save, if the checkpoint is of our own format.
    """
    store = open_store(root)
    tracked = tracked_iteration(store)
    if tracked is None or tracked <= iteration:
        text = str(iteration) if save_id or iteration else iteration_dir(RELEASE)
        store.put(TRACKER, text.encode())
        if save_id:
            put_tracked(store, Tracked(iteration, save_id))


def megatrons_directory(root: Path, iteration: int) -> Path:
    """Return the directory of `iteration` in the save directory `root`, in Megatron's own formats.

    These call iteration 0, the weights that a training starts from, a release.
    """
    return root / iteration_dir(iteration or RELEASE)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
