"""The names of all files of a checkpoint and of its directory, and how to read them back."""

from __future__ import annotations

import re

import xxhash

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
#: What became of the last saves, for people; no load reads it.
HISTORY = "flashckpt-history.jsonl"
#: Which run writes to the save directory; see `agent.claim`.
CLAIM = "flashckpt-writer.msgpack"

_SHARD = re.compile(r"rank_\d{5,}-[0-9a-f]{8,32}\.safetensors")
_OF_A_SAVE = re.compile(
    r"rank_\d{5,}-(?P<shard>[0-9a-f]{8,32})\.(safetensors|commit|failed)"
    r"|common-(?P<common>[0-9a-f]{8,32})\.msgpack"
    r"|committed-(?P<marker>[0-9a-f]{8,32})\.msgpack"
)
_REMOVAL = re.compile(r"\.iter_(\d{7,})-([0-9a-f]{8,32})\.removed")


def run_of(save_id: str) -> str:
    """Return the part of a save's id that all saves of one start of a job have in common."""
    return save_id[:8]


def next_attempt(save_id: str) -> str:
    """Return the id under which a save that failed is written once more; the same on all nodes.

    Notes and files of the first attempt have nothing to do with it.
    """
    return xxhash.xxh3_64_hexdigest(f"{save_id} again".encode())


def iteration_dir(iteration: int) -> str:
    """Return Megatron's name of the directory of `iteration`."""
    return f"iter_{iteration:07d}"


def parse_iteration_dir(name: str) -> int | None:
    """Return the iteration of a directory name, or None if it is not one of Megatron's."""
    match = re.fullmatch(r"iter_(\d{7,})", name)
    return int(match[1]) if match else None


def shard_name(rank: int, save_id: str) -> str:
    """Return the file name of a shard.

    It carries the save's id, so that saving the same iteration again never touches the bytes of
    the committed one.
    """
    return f"rank_{rank:05d}-{save_id}.safetensors"


def is_shard_name(name: str) -> bool:
    """Return whether `shard_name` can have made `name`; such a name leads out of no directory."""
    return _SHARD.fullmatch(name) is not None


def common_name(save_id: str) -> str:
    """Return the name of the stand-alone file with args, scheduler and counters."""
    return f"common-{save_id}.msgpack"


def save_id_of_common(name: str) -> str | None:
    """Return the id that `common_name` made `name` of, or None if it did not make it."""
    match = _OF_A_SAVE.fullmatch(name)
    return match and match["common"]


def marker_name(save_id: str) -> str:
    """Return the name of the marker that tells other nodes of a committed save; see `marker`."""
    return f"committed-{save_id}.msgpack"


def save_id_of_marker(name: str) -> str | None:
    """Return the id that `marker_name` made `name` of, or None if it did not make it."""
    match = _OF_A_SAVE.fullmatch(name)
    return match and match["marker"]


def record_name(rank: int, save_id: str) -> str:
    """Return the name of a rank's commit record: its presence means that the shard is durable."""
    return f"rank_{rank:05d}-{save_id}.commit"


def failure_name(rank: int, save_id: str) -> str:
    """Return the name of the note by which an agent tells the others that a shard failed."""
    return f"rank_{rank:05d}-{save_id}.failed"


def save_id_of(name: str) -> str | None:
    """Return the id of the save that a file in an iteration directory belongs to.

    None for the manifest, whose name says nothing, and for what is not ours.
    """
    match = _OF_A_SAVE.fullmatch(name)
    return match and (match["shard"] or match["common"] or match["marker"])


def save_id_in(path: str) -> str | None:
    """Return the id of the save that a file belongs to, also one that is not complete yet."""
    _, _, name = path.rpartition("/")
    match = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}\.tmp", name)
    return save_id_of(match[1] if match else name)


def removal_name(iteration: int, save_id: str) -> str:
    """Return the name, beside the tracker, that the manifest of a checkpoint being removed has."""
    return f".{iteration_dir(iteration)}-{save_id}.removed"


def parse_removal_name(name: str) -> tuple[int, str] | None:
    """Return the iteration and the save that `removal_name` made `name` of; None if of none."""
    match = _REMOVAL.fullmatch(name)
    return (int(match[1]), match[2]) if match else None
