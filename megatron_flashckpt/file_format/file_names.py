"""Names of all files of a save directory, and their parsers.

A save's name is `000008-3fa9.12001.1`: the run (its number and four random hexadecimal digits), the
number of the save, which grows within the run (here the first save of iteration 12), and the
attempt to write it. The numbers are padded, so that names in a directory sort. A save has one name
for its end (`end_name`), which is created once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

TRACKER = "latest_checkpointed_iteration.txt"
#: Directory of this package's own files next to the checkpoints.
OWN = "flashckpt"
#: What this package last wrote into the tracker; see `catalog.lineage.Tracked`.
TRACKED = f"{OWN}/tracker.json"
#: Results of the last saves and the starts of the job, for people; no load reads them.
HISTORY = f"{OWN}/history"
RUNS = f"{OWN}/runs"
ALIVE = f"{OWN}/alive"
#: Names that the check of a save directory creates, and deletes again.
PROBES = f"{OWN}/probe"
#: The table of contents of format 1.
MANIFEST_OF_FORMAT_1 = "manifest.json"
#: The last commit that reads format 1, and converts it into Megatron's own formats.
LAST_OF_FORMAT_1 = "1f944679"

#: In place of an iteration: the checkpoint in Megatron's directory `release`.
RELEASE = -1

_RUN = re.compile(r"(\d{6,18})-([0-9a-f]{4})", re.ASCII)
_SAVE = r"\d{6,18}-[0-9a-f]{4}\.\d{5,18}\.\d{1,9}"
_SAVE_ID = re.compile(r"(\d{6,18}-[0-9a-f]{4})\.(\d{5,18})\.(\d{1,9})", re.ASCII)
_OF_A_SAVE = re.compile(
    rf"({_SAVE})\.(rank_\d{{5,}}\.safetensors|ranks_\d{{5,}}-\d{{5,}}\.record|common\.msgpack|due|end)",
    re.ASCII,
)
_SHARD = re.compile(rf"{_SAVE}\.rank_\d{{5,}}\.safetensors", re.ASCII)
_RECORD = re.compile(rf"({_SAVE})\.ranks_(\d{{5,}})-(\d{{5,}})\.record", re.ASCII)
_RUN_FILE = re.compile(r"(\d{6,18})\.json", re.ASCII)
_REQUEST = re.compile(r"(\d{6,18}-[0-9a-f]{4})\.(\d{1,18})", re.ASCII)
_EVENT = re.compile(rf"\d{{13,18}}\.({_SAVE}|\d{{6,18}}-[0-9a-f]{{4}})", re.ASCII)
#: More ranks than one node can have. A name that claims more is not a commit record's.
_MAX_RANKS_OF_RECORD = 2**16


# ---------------------------------------------------------------------- runs and saves


def run_name(number: int, nonce: str) -> str:
    """Return the name of the run with a number (from 1) and four random hexadecimal digits."""
    return f"{number:06d}-{nonce}"


def run_number(run: str) -> int:
    """Return the number in a run's name; 0 if `run` is not one."""
    match = _RUN.fullmatch(run)
    return int(match[1]) if match else 0


class SaveName(NamedTuple):
    """The parts of a save's name; later saves of a run, and later attempts, are greater."""

    number: int
    """Number of the run."""
    run: str
    sequence: int
    attempt: int


def parse_save(save_id: str) -> SaveName | None:
    """Return the parts of a save's name; None for other text."""
    match = _SAVE_ID.fullmatch(save_id)
    return match and SaveName(run_number(match[1]), match[1], int(match[2]), int(match[3]))


def save_name(run: str, sequence: int, attempt: int = 1) -> str:
    """Return the name of a run's save."""
    return f"{run}.{sequence:05d}.{attempt}"


def first_sequence(iteration: int) -> int:
    """Return the number of a run's first save of an iteration for storage, if none of a later
    iteration came before.
    """
    return 1000 * iteration + 1


def run_of(save_id: str) -> str:
    """Return the run of a save; "" if `save_id` is not the name of a save."""
    parsed = parse_save(save_id)
    return parsed.run if parsed else ""


def next_attempt(save_id: str) -> str:
    """Return the name under which a failed save is written again; equal on all nodes."""
    stem, _, attempt = save_id.rpartition(".")
    return f"{stem}.{int(attempt) + 1}"


def run_file(number: int) -> str:
    """Return the name of the object that a run creates to take its number."""
    return f"{RUNS}/{number:06d}.json"


def parse_run_file(name: str) -> int | None:
    """Return the number in the last part of a name that `run_file` made; None for others."""
    match = _RUN_FILE.fullmatch(name)
    return int(match[1]) if match else None


def alive_file(run: str) -> str:
    """Return the name of the object that the agent of a run's rank 0 renews."""
    return f"{ALIVE}/{run}"


def request_file(run: str, iteration: int) -> str:
    """Return the name of the empty object that asks the ranks of a run to save an iteration.

    It lies beside the run's sign of life, in a directory that exists while the run trains: a new
    one could be unseen on other nodes for a minute.
    """
    return f"{alive_file(run)}.{iteration}"


def parse_request_file(name: str) -> tuple[str, int] | None:
    """Return run and iteration in the last part of a name of `request_file`; None for others."""
    match = _REQUEST.fullmatch(name)
    return match and (match[1], int(match[2]))


def event_name(at: float, of: str) -> str:
    """Return the name of an event of the history; names sort by time.

    Args:
        at: seconds since 1970.
        of: the name of the save that ended, or of the run that started.
    """
    return f"{HISTORY}/{round(at * 1000):013d}.{of}"


def parse_event_name(name: str) -> str | None:
    """Return the save or run in the last part of a name of `event_name`; None for others."""
    match = _EVENT.fullmatch(name)
    return match and match[1]


# ---------------------------------------------------------------------- iteration directories


def iteration_dir(iteration: int) -> str:
    """Return Megatron's name of the directory of `iteration`."""
    return "release" if iteration == RELEASE else f"iter_{iteration:07d}"


def parse_iteration_dir(name: str) -> int | None:
    """Return the iteration of a name that `iteration_dir` made; None for others and `release`."""
    match = re.fullmatch(r"iter_(\d{7}|[1-9]\d{7,})", name, re.ASCII)
    return int(match[1]) if match else None


# ---------------------------------------------------------------------- files of a save


def end_name(save_id: str) -> str:
    """Return the name of the end of a save: a manifest, or the reason why the save failed."""
    return f"{save_id}.end"


def shard_name(rank: int, save_id: str) -> str:
    """Return the file name of a shard."""
    return f"{save_id}.rank_{rank:05d}.safetensors"


def is_shard_name(name: str) -> bool:
    """Return whether `name` has the form of `shard_name`, which contains no path."""
    return _SHARD.fullmatch(name) is not None


def common_name(save_id: str) -> str:
    """Return the name of the stand-alone file with args, scheduler and counters."""
    return f"{save_id}.common.msgpack"


def record_name(ranks: range, save_id: str) -> str:
    """Return the name of the file with the commit records of contiguous `ranks`.

    The file exists only if the shards of these ranks are durable.
    """
    return f"{save_id}.ranks_{ranks[0]:05d}-{ranks[-1]:05d}.record"


def save_of(name: str) -> str | None:
    """Return the save that a file in an iteration directory belongs to; None for other files."""
    match = _OF_A_SAVE.fullmatch(name)
    return match and match[1]


def ends_in(names: Iterable[str]) -> list[str]:
    """Return the saves that have an end among the files of a directory, the latest first."""
    saves = [name.removesuffix(".end") for name in names if name.endswith(".end")]
    parsed = {save: parse_save(save) for save in saves}
    known = [(where, save) for save, where in parsed.items() if where is not None]
    return [save for _, save in sorted(known, reverse=True)]


def due_name(save_id: str) -> str:
    """Return the name of the empty file that exists until `agent.on_durable` has ended."""
    return f"{save_id}.due"


def is_record_name(name: str) -> bool:
    """Return whether `name` has the form of `record_name`."""
    return _RECORD.fullmatch(name) is not None


def records_of(names: Iterable[str], save_id: str, world_size: int) -> dict[str, range]:
    """Return the commit records of a save among the files of its directory, with their ranks.

    A file that claims ranks beyond `world_size` is left out.
    """
    found = {}
    for name in names:
        match = _RECORD.fullmatch(name) if name.startswith(save_id) else None
        if match is None or match[1] != save_id:
            continue
        ranks = range(int(match[2]), int(match[3]) + 1)
        if 0 < len(ranks) <= _MAX_RANKS_OF_RECORD and ranks[-1] < world_size:
            found[name] = ranks
    return found


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
