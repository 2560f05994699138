"""Checkpoints that other programs wrote into a save directory, recognised by their file names.

This module needs no torch and changes no file.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection

import msgspec

from megatron_flashckpt.errors import UNDECODABLE, StorageError, is_damage
from megatron_flashckpt.file_format.file_names import iteration_dir, parse_iteration_dir
from megatron_flashckpt.storage.store import Store

DLROVER = "DLRover's"
#: DLRover's own tracker, which it moves together with Megatron's.
_DLROVER_TRACKER = "dlrover_latest.txt"
#: Directory of one rank's optimizer shards. Our own files have longer names.
_RANK_DIR = re.compile(r"rank_(\d{5,})")
_MODEL_DIR = "mp_rank_"
#: Bytes to read of a tracker, and of Megatron's metadata.json, at most.
_SMALL_NBYTES = 4096
#: Megatron's own format, which a damaged metadata.json does not name.
UNNAMED = "?"
_METADATA_NBYTES = 2**16


def is_foreign(names: Collection[str]) -> bool:
    """Return whether the files of an iteration directory are those of another program."""
    return (
        "metadata.json" in names
        or ".metadata" in names
        or any(name.startswith(_MODEL_DIR) or _RANK_DIR.fullmatch(name) for name in names)
    )


def megatron_format(store: Store, directory: str) -> str | None:
    """Return Megatron's own format of `directory`, or `UNNAMED`; None if it has another format."""
    present = _names(store, directory)
    if any(name.startswith(_MODEL_DIR) for name in present):
        return "torch"
    if "metadata.json" in present:
        try:
            encoded = _small(store, f"{directory}/metadata.json", _METADATA_NBYTES)
            description = msgspec.json.decode(encoded)
        except UNDECODABLE:
            description = None
        backend = description.get("sharded_backend") if isinstance(description, dict) else None
        return backend if isinstance(backend, str) else UNNAMED
    return "torch.distributed" if ".metadata" in present else None


def _names(store: Store, directory: str) -> list[str]:
    return [entry.name for entry in store.list(directory, sizes=False)]


def _small(store: Store, name: str, nbytes: int) -> bytes:
    """Return the first bytes of a file of another program; none if the file cannot be read.

    Raises:
        StorageError: storage is unavailable; later the file may be readable.
    """
    try:
        return store.get(name, 0, nbytes)
    except FileNotFoundError:
        return b""
    except StorageError as error:  # a directory or a pipe stands in its place, or it is damaged
        if not is_damage(error):
            raise
        return b""


def is_dlrovers(store: Store, directory: str) -> bool:
    """Return whether the iteration directory `directory` holds optimizer state by rank.

    Without the distributed optimizer DLRover writes Megatron's own format `torch`, which this
    function does not recognise.
    """
    return any(_RANK_DIR.fullmatch(name) for name in _names(store, directory))


def dlrover_remark(store: Store, directory: str) -> str:
    """Return the remark on a checkpoint of DLRover: files that are missing, or how to use it."""
    present = _names(store, directory)
    ranks = {int(match[1]) for name in present if (match := _RANK_DIR.fullmatch(name))}
    # Not range(max(ranks)): the name of a foreign directory may have a number of any size.
    first_missing = next(rank for rank in itertools.count() if rank not in ranks)
    faults = [f"no rank_{first_missing:05d}"] if first_missing < max(ranks) else []
    if not any(name.startswith(_MODEL_DIR) for name in present):
        faults.append(f"no {_MODEL_DIR}*")
    if faults:
        return f"{', '.join(faults)}: committed incomplete"
    return "'flashckpt convert' reads it"


def dlrover_empty(store: Store, iteration: int) -> str | None:
    """Return the problem if DLRover committed `iteration` without any file, else None.

    DLRover's saver does so if trainers are killed while they copy into shared memory.
    """
    tracked = _small(store, _DLROVER_TRACKER, _SMALL_NBYTES).decode(errors="replace").strip()
    if tracked != str(iteration) or _names(store, iteration_dir(iteration)):
        return None
    others = [
        str(number)
        for name in _names(store, "")
        if (number := parse_iteration_dir(name)) is not None and _names(store, name)
    ]
    return (
        f"{store.place}/{iteration_dir(iteration)}: DLRover committed this iteration without any "
        f"file; resume from another iteration (available: {', '.join(others) or 'none'})"
    )


def dlrover_problem(store: Store, iteration: int) -> str | None:
    """Return the reason why no job can load `iteration` if DLRover wrote it, else None."""
    directory = iteration_dir(iteration)
    if is_dlrovers(store, directory):
        return (
            f"{store.place}/{directory}: is in DLRover's format, which neither Megatron nor "
            f"megatron_flashckpt loads; convert it: flashckpt convert {store.place} DST --to "
            f"flashckpt --iteration {iteration}, then start with --load DST (to load the weights "
            "alone, add --finetune or --no-load-optim)"
        )
    return dlrover_empty(store, iteration)
