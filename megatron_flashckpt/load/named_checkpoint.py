"""The checkpoint that a save directory names as the one to resume from."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import NamedTuple

from megatron_flashckpt.catalog import foreign, listing
from megatron_flashckpt.catalog.stored_checkpoint import read_manifest
from megatron_flashckpt.catalog.tracker import iteration_in, tracker_text
from megatron_flashckpt.errors import (
    ConfigError,
    FlashCkptError,
    StorageError,
    is_damage,
)
from megatron_flashckpt.file_format.file_names import (
    MANIFEST,
    RELEASE,
    TRACKER,
    iteration_dir,
    parse_iteration_dir,
    save_id_of,
)
from megatron_flashckpt.file_format.manifest import decode_facts
from megatron_flashckpt.storage.base import Storage

logger = logging.getLogger(__name__)

_RELEASE = iteration_dir(RELEASE)


class NamedCheckpoint(NamedTuple):
    """The checkpoint that a save directory names as the one to resume from."""

    iteration: int | None
    """The named iteration, or `RELEASE`; None if it is no checkpoint in this package's format."""
    problem: str | None = None
    """Defect of the tracker; `iteration` is then the newest committed one."""
    foreign: str | None = None
    """The reason why the named checkpoint, written by DLRover, cannot be loaded."""
    save_id: str | None = None
    """Save id of the iteration; None if not looked up, or if the manifest cannot be read."""


def refuse_path_inside(load_dir: str) -> None:
    """Raise if `load_dir` lies inside of a save directory: a job would start from scratch.

    Raises:
        ConfigError: names the save directory.
    """
    path = Path(load_dir).absolute()
    if path.is_file():
        raise ConfigError(f"{load_dir}: is a file; name the directory that holds it with --load")
    iteration = parse_iteration_dir(path.name)
    is_one = False
    with contextlib.suppress(OSError):  # the load retries what may pass, and reports what does not
        is_one = not (path / TRACKER).exists() and any(path.iterdir())
    if iteration is not None and is_one:
        raise ConfigError(
            f"{load_dir}: is one checkpoint, not a save directory; start with --load {path.parent} "
            f"--ckpt-step {iteration}"
        )


def named_in(storage: Storage, step: int | None) -> NamedCheckpoint:
    """Return the iteration that `step` (`--ckpt-step`) or else the tracker names.

    An iteration in one of Megatron's own formats is left to Megatron's loader.

    Raises:
        StorageError: the tracker cannot be read.
    """
    if step is not None:
        return _unless_foreign(storage, step)
    try:
        text = tracker_text(storage)
    except StorageError as error:
        if not is_damage(error):
            raise
        newest = _newest_named(storage, str(error.strerror))
        if newest.iteration is None:  # Megatron would open the tracker, and hang if it is a pipe
            raise
        return newest
    if text is None or text == _RELEASE:
        if text == _RELEASE and _is_ours(storage, _RELEASE):
            return NamedCheckpoint(RELEASE)
        ahead = None if text == _RELEASE else _newest_untracked(storage, -1)
        if ahead is None:
            _warn_of_missing_tracker(storage, text)
        return NamedCheckpoint(ahead)
    iteration = iteration_in(text)
    if iteration is None:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        return _newest_named(storage, f"{storage.place}/{TRACKER}: {shown!r} is no iteration")
    ahead = _newest_untracked(storage, iteration)
    return _unless_foreign(storage, iteration) if ahead is None else NamedCheckpoint(ahead)


def with_save(named: NamedCheckpoint, storage: Storage) -> NamedCheckpoint:
    """Return `named` with the save id from the manifest of its iteration."""
    if named.iteration is None:
        return named
    try:
        encoded = read_manifest(storage, named.iteration)
        facts = decode_facts(encoded, f"{storage.place}/{iteration_dir(named.iteration)}")
    except FlashCkptError:  # a load of this iteration reports the error
        return named
    return named._replace(save_id=facts.save_id)


def _newest_untracked(storage: Storage, tracked: int) -> int | None:
    """Return the newest committed iteration whose agent died before the tracker named it.

    Such an iteration still has its commit records, which are removed once the tracker has moved. A
    tracker that a user has set back is therefore respected, as is one that was written after the
    manifest: an agent may die before it has removed the records.
    """
    parsed = [parse_iteration_dir(name) for name in storage.list("")]
    iterations = [number for number in parsed if number is not None and number > tracked]
    for iteration in sorted(iterations, reverse=True):
        directory = iteration_dir(iteration)
        listed = storage.list(directory) if storage.kind(directory) == "directory" else []
        records = {save_id_of(name) for name in listed if name.endswith(".commit")}
        if MANIFEST not in listed or not records:
            continue
        try:
            facts = decode_facts(read_manifest(storage, iteration), f"{storage.place}/{directory}")
        except FlashCkptError as error:
            if not is_damage(error):
                raise
            continue
        if facts.save_id in records and not tracker_is_newer(storage, iteration):
            logger.warning(
                "iteration %d is committed, although %s does not name it yet", iteration, TRACKER
            )
            return iteration
    return None


def tracker_is_newer(storage: Storage, iteration: int) -> bool:
    """Return whether the tracker was written after the manifest of `iteration`."""
    try:
        manifest = storage.stamp(f"{iteration_dir(iteration)}/{MANIFEST}")
        return storage.stamp(TRACKER).mtime_ns > manifest.mtime_ns
    except (OSError, FlashCkptError):  # one of them is not there, or cannot be looked at
        return False


def _newest_named(storage: Storage, problem: str) -> NamedCheckpoint:
    committed = listing.committed_iterations(storage)
    return NamedCheckpoint(committed[-1], problem) if committed else NamedCheckpoint(None)


def _unless_foreign(storage: Storage, iteration: int) -> NamedCheckpoint:
    """Return `iteration`, or None in its place if another program wrote it."""
    directory = iteration_dir(iteration)
    try:
        if MANIFEST in storage.list(directory):
            return NamedCheckpoint(iteration)
        if problem := foreign.dlrover_problem(storage, iteration):
            return NamedCheckpoint(None, foreign=problem)
        return NamedCheckpoint(None if foreign.megatron_format(storage, directory) else iteration)
    except StorageError as error:
        if not is_damage(error):
            raise
        return NamedCheckpoint(iteration)


def _is_ours(storage: Storage, directory: str) -> bool:
    """Return whether `directory` holds a committed checkpoint in this package's format."""
    is_there = storage.kind(directory) == "directory"
    return is_there and bool(storage.present(directory, [MANIFEST]))


def _warn_of_missing_tracker(storage: Storage, tracker: str | None) -> None:
    """Warn that the job starts from scratch next to checkpoints that no tracker names.

    A missing tracker is respected, because a user removes it on purpose.
    """
    committed = [] if tracker == _RELEASE else listing.committed_iterations(storage)
    if committed:
        logger.warning(
            "%s: has no %s, so none of its checkpoints is loaded; to resume from the newest, write "
            "%d into that file",
            storage.place,
            TRACKER,
            committed[-1],
        )
