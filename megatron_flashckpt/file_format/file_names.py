"""Names of all files of a checkpoint and of its directory, and their parsers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

import xxhash

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
#: Results of the last saves, for people; no load reads this file.
HISTORY = "flashckpt-history.jsonl"
#: The run that writes to the save directory; see `agent.claim`.
CLAIM = "flashckpt-writer.msgpack"

_SHARD = re.compile(r"rank_\d{5,}-[0-9a-f]{8,32}\.safetensors")
_RECORD = re.compile(r"rank(s?)_(\d{5,})(?:-(\d{5,}))?-[0-9a-f]{8,32}\.commit", re.ASCII)
#: More ranks than one node can have. A name that claims more is not a commit record's.
_MAX_RANKS_OF_RECORD = 2**16
_OF_A_SAVE = re.compile(
    r"rank_\d{5,}-(?P<shard>[0-9a-f]{8,32})\.(safetensors|commit|failed)"
    r"|ranks_\d{5,}-\d{5,}-(?P<records>[0-9a-f]{8,32})\.commit"
    r"|common-(?P<common>[0-9a-f]{8,32})\.msgpack"
    r"|committed-(?P<marker>[0-9a-f]{8,32})\.msgpack"
)
_REMOVAL = re.compile(r"\.iter_(\d{7,})-([0-9a-f]{8,32})\.removed")


def run_of(save_id: str) -> str:
    """Return the part of a save id that all saves of one start of a job share."""
    return save_id[:8]


def next_attempt(save_id: str) -> str:
    """Return the id under which a failed save is written again; equal on all nodes.

    Failure notes and files of the first attempt do not belong to the new id.
    """
    return xxhash.xxh3_64_hexdigest(f"{save_id} again".encode())


#: In place of an iteration: the checkpoint in Megatron's directory `release`.
RELEASE = -1


def iteration_dir(iteration: int) -> str:
    """Return Megatron's name of the directory of `iteration`."""
    return "release" if iteration == RELEASE else f"iter_{iteration:07d}"


def parse_iteration_dir(name: str) -> int | None:
    """Return the iteration of a directory name, or None if it is not one of Megatron's."""
    match = re.fullmatch(r"iter_(\d{7,})", name)
    return int(match[1]) if match else None


def shard_name(rank: int, save_id: str) -> str:
    """Return the file name of a shard.

    The name carries the save id, so that saving the same iteration again never touches the bytes of
    the committed save.
    """
    return f"rank_{rank:05d}-{save_id}.safetensors"


def is_shard_name(name: str) -> bool:
    """Return whether `name` has the form of `shard_name`, which contains no path."""
    return _SHARD.fullmatch(name) is not None


def common_name(save_id: str) -> str:
    """Return the name of the stand-alone file with args, scheduler and counters."""
    return f"common-{save_id}.msgpack"


def save_id_of_common(name: str) -> str | None:
    """Return the save id in a name that `common_name` made; None for other names."""
    match = _OF_A_SAVE.fullmatch(name)
    return match and match["common"]


def marker_name(save_id: str) -> str:
    """Return the name of the marker that reports a committed save to other nodes; see `marker`."""
    return f"committed-{save_id}.msgpack"


def save_id_of_marker(name: str) -> str | None:
    """Return the save id in a name that `marker_name` made; None for other names."""
    match = _OF_A_SAVE.fullmatch(name)
    return match and match["marker"]


def record_name(rank: int, save_id: str, count: int = 1) -> str:
    """Return the name of the file with the commit records of `count` ranks, from `rank` on.

    The file exists only if the shards of these ranks are durable.
    """
    if count == 1:
        return f"rank_{rank:05d}-{save_id}.commit"
    return f"ranks_{rank:05d}-{rank + count - 1:05d}-{save_id}.commit"


def ranks_of_record(name: str) -> range | None:
    """Return the ranks in a name that `record_name` made; None for other names."""
    match = _RECORD.fullmatch(name)
    if match is None:
        return None
    first = int(match[2])
    ranks = range(first, int(match[3] or first) + 1)
    save_id = name.removesuffix(".commit").rpartition("-")[2]
    is_sane = 0 < len(ranks) <= _MAX_RANKS_OF_RECORD
    return ranks if is_sane and record_name(first, save_id, len(ranks)) == name else None


def records_of(names: Iterable[str], save_id: str, world_size: int) -> dict[str, range]:
    """Return the commit records of a save among the files of its directory, with their ranks.

    A file that claims ranks beyond `world_size` is left out.
    """
    suffix = f"-{save_id}.commit"
    parsed = {name: ranks_of_record(name) for name in names if name.endswith(suffix)}
    return {
        name: ranks
        for name, ranks in parsed.items()
        if ranks is not None and ranks[-1] < world_size
    }


def ranks_with_record(names: Iterable[str], save_id: str, world_size: int) -> set[int]:
    """Return the ranks of a save whose shards are durable, according to the file names."""
    return set(itertools.chain.from_iterable(records_of(names, save_id, world_size).values()))


def runs_of(ranks: Iterable[int]) -> list[range]:
    """Return the runs of contiguous ranks, in order; a record file holds such a run."""
    runs: list[range] = []
    for rank in sorted(ranks):
        if runs and runs[-1].stop == rank:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    return runs


def failure_name(rank: int, save_id: str) -> str:
    """Return the name of the note in which an agent reports a failed shard to the others."""
    return f"rank_{rank:05d}-{save_id}.failed"


def save_id_of(name: str) -> str | None:
    """Return the id of the save that a file in an iteration directory belongs to.

    None for the manifest, whose name has no id, and for names of other programs.
    """
    match = _OF_A_SAVE.fullmatch(name)
    return match and (match["shard"] or match["records"] or match["common"] or match["marker"])


def save_id_in(path: str) -> str | None:
    """Return the id of the save that a file belongs to, even if the file is incomplete."""
    _, _, name = path.rpartition("/")
    match = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}\.tmp", name)
    return save_id_of(match[1] if match else name)


def removal_name(iteration: int, save_id: str) -> str:
    """Return the name, next to the tracker, of the manifest of a checkpoint being removed."""
    return f".{iteration_dir(iteration)}-{save_id}.removed"


def parse_removal_name(name: str) -> tuple[int, str] | None:
    """Return iteration and save id in a name that `removal_name` made; None for other names."""
    match = _REMOVAL.fullmatch(name)
    return (int(match[1]), match[2]) if match else None
