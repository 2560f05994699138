"""Checkpoints that others wrote into a save directory, told by the names of their files.

Torch-free; changes nothing.
"""

from __future__ import annotations

import re

import msgspec

from megatron_flashckpt.file_format.file_names import iteration_dir, parse_iteration_dir
from megatron_flashckpt.storage.base import Storage

DLROVER = "DLRover's"
#: DLRover's own tracker, which it moves together with Megatron's.
_DLROVER_TRACKER = "dlrover_latest.txt"
#: Directory of one rank's optimizer shards; our files have longer names.
_RANK_DIR = re.compile(r"rank_(\d{5,})")
_MODEL_DIR = "mp_rank_"
#: No more is read of a tracker and of Megatron's metadata.json, however long they are.
_SMALL_NBYTES = 4096
_METADATA_NBYTES = 2**16


def megatron_format(storage: Storage, directory: str) -> str | None:
    """Return the name of Megatron's own format that `directory` is in; None if it is in none."""
    present = storage.list(directory)
    if any(name.startswith(_MODEL_DIR) for name in present):
        return "torch"
    if "metadata.json" in present:
        try:
            encoded = storage.read(f"{directory}/metadata.json", 0, _METADATA_NBYTES)
            said = msgspec.json.decode(encoded)
        except (msgspec.DecodeError, RecursionError):
            said = None
        return str(said.get("sharded_backend", "?")) if isinstance(said, dict) else "?"
    return "torch.distributed" if ".metadata" in present else None


def is_dlrovers(storage: Storage, directory: str) -> bool:
    """Return whether `directory`, of one iteration, holds optimizer state by rank.

    Without the distributed optimizer DLRover writes Megatron's own format `torch`.
    """
    return any(_RANK_DIR.fullmatch(name) for name in storage.list(directory))


def dlrover_remark(storage: Storage, directory: str) -> str:
    """Return what can be seen of a checkpoint of DLRover's, and how to go on from it."""
    present = storage.list(directory)
    ranks = {int(match[1]) for name in present if (match := _RANK_DIR.fullmatch(name))}
    missing = sorted(set(range(max(ranks))) - ranks)
    faults = [f"no rank_{rank:05d}" for rank in missing[:1]]
    if not any(name.startswith(_MODEL_DIR) for name in present):
        faults.append(f"no {_MODEL_DIR}*")
    if faults:
        return f"{', '.join(faults)}: committed incomplete"
    return "'flashckpt convert' reads it"


def dlrover_empty(storage: Storage, iteration: int) -> str | None:
    """Return the problem if DLRover committed `iteration` without any file; None: it did not.

    Its saver does so if trainers are killed while they copy into shared memory.
    """
    try:
        said = storage.read(_DLROVER_TRACKER, 0, _SMALL_NBYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    if said != str(iteration) or storage.list(iteration_dir(iteration)):
        return None
    others = [
        str(number)
        for name in storage.list("")
        if (number := parse_iteration_dir(name)) is not None and storage.list(name)
    ]
    return (
        f"{storage.place}/{iteration_dir(iteration)}: DLRover committed it with no files in it; go "
        f"on from another iteration ({', '.join(others) or 'none'} there)"
    )


def dlrover_problem(storage: Storage, iteration: int) -> str | None:
    """Return why no job can load `iteration` if DLRover wrote it; None: it did not."""
    directory = iteration_dir(iteration)
    if is_dlrovers(storage, directory):
        return (
            f"{storage.place}/{directory}: is in DLRover's format, which neither Megatron nor "
            f"megatron_flashckpt loads; convert it: flashckpt convert {storage.place} DST --to "
            f"flashckpt --iteration {iteration}, then --load DST (its weights alone are loaded "
            "with --finetune or --no-load-optim)"
        )
    return dlrover_empty(storage, iteration)
