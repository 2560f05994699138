"""Listing of a save directory from file names and manifests; needs no torch, changes no file."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_flashckpt.catalog import foreign
from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, read_manifest
from megatron_flashckpt.catalog.tracker import tracked_iteration
from megatron_flashckpt.errors import (
    CorruptCheckpointError,
    FlashCkptError,
    NotCommittedError,
    for_listing,
    is_damage,
)
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.manifest import MAX_MANIFEST_NBYTES
from megatron_flashckpt.file_format.shard_file import decode_header, header_nbytes
from megatron_flashckpt.storage.base import Storage, read_whole
from megatron_flashckpt.storage.opening import open_storage
from megatron_flashckpt.storage.patient import RetryingStorage

COMMITTED = "committed"
DAMAGED = "damaged"
NOT_COMMITTED = "not committed"
UNREADABLE = "unreadable"
MEGATRON = "Megatron's own"

_RELEASE = "release"
_OF_RANKS = (".safetensors", ".commit", ".failed")
#: Short names of the parallel sizes in a description.
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}
#: Ranks or files that a message names, at most.
_SHOWN = 8
_MAX_RANKS = 1 << 20
#: Files whose size is queried at the same time; hides the latency of slow storage.
_THREADS = 16
#: Bytes to read of a failure note, at most.
_SMALL_NBYTES = 4096


@dataclasses.dataclass(frozen=True)
class IterationEntry:
    """Iteration directory and its state."""

    directory: str
    iteration: int | None
    """Iteration; None for Megatron's `release`."""
    state: str
    remark: str = ""
    """Reason if the state is not `committed`; the format of a checkpoint that is not ours."""
    ranks: int | None = None
    nbytes: int | None = None
    layout: str = ""
    committed_at: float | None = None
    """Seconds since 1970; None if no manifest records the time."""


def save_directory(directory: str) -> Storage:
    """Return the storage of a save directory; it retries reads after transient errors.

    Raises:
        NotCommittedError: `directory` is not a save directory, or is one checkpoint inside one.
    """
    if not directory.strip():
        # An unset variable in a script; Path("") is the working directory.
        raise NotCommittedError(
            f"{directory!r}: names no directory; give Megatron's --save directory"
        )
    path = Path(directory)
    storage = RetryingStorage(open_storage(path))
    if not storage.with_retries(path.is_dir):
        raise NotCommittedError(
            f"{directory}: is not a directory; give Megatron's --save directory"
        )
    iteration = file_names.parse_iteration_dir(path.absolute().name)
    if iteration is not None and not storage.present("", [file_names.TRACKER]):
        raise NotCommittedError(
            f"{directory}: is one checkpoint; give its save directory: "
            f"{path.absolute().parent} --iteration {iteration}"
        )
    return storage


def open_checkpoint(storage: Storage, iteration: int) -> StoredCheckpoint:
    """Return the committed checkpoint of `iteration`.

    Raises:
        NotCommittedError: no such checkpoint, or one in Megatron's or DLRover's format.
        CorruptCheckpointError: the manifest is damaged.
        FormatVersionError: a newer release wrote the manifest.
    """
    try:
        encoded = read_manifest(storage, iteration)
    except NotCommittedError as error:
        if problem := foreign.dlrover_problem(storage, iteration):
            raise NotCommittedError(problem) from error
        megatron = foreign.megatron_format(storage, file_names.iteration_dir(iteration))
        if megatron is None:
            raise
        raise NotCommittedError(
            f"{storage.place}/{file_names.iteration_dir(iteration)}: is in Megatron's own format "
            f"'{megatron}', which this command does not read; Megatron itself loads it, and "
            "'flashckpt convert' converts it"
        ) from error
    return StoredCheckpoint(storage, iteration, encoded)


def chosen_iteration(storage: Storage) -> int:
    """Return the iteration that a job would load: the tracked one, else the newest committed.

    Raises:
        NotCommittedError: the tracker names no iteration, and no checkpoint of ours is committed.
    """
    tracked = tracked_iteration(storage)
    return loadable_iterations(storage)[-1] if tracked is None else tracked


def committed_iterations(storage: Storage) -> list[int]:
    """Return our committed iterations in order, and those whose directory cannot be listed."""
    iterations = []
    for iteration, directory in _directories(storage):
        try:
            committed = file_names.MANIFEST in storage.list(directory)
        except FlashCkptError as error:
            if not is_damage(error):
                raise
            committed = True  # perhaps; opening the checkpoint reports the damage
        if committed and iteration is not None:
            iterations.append(iteration)
    return iterations


def newest_durable(storage: Storage) -> int | None:
    """Return the newest iteration that is committed, or tracked and there; None: there is none."""
    tracked = tracked_iteration(storage)
    for iteration, directory in sorted(_iterations(storage), reverse=True):
        if iteration == tracked or storage.present(directory, [file_names.MANIFEST]):
            return iteration
    return None


def _iterations(storage: Storage) -> list[tuple[int, str]]:
    return [
        (iteration, directory)
        for iteration, directory in _directories(storage)
        if iteration is not None
    ]


def loadable_iterations(storage: Storage) -> list[int]:
    """Return in order the iterations that a job may load: committed ones, and the tracked one.

    Leaves out iterations in Megatron's own formats and in DLRover's.

    Raises:
        NotCommittedError: no such iteration.
    """
    iterations = set(committed_iterations(storage))
    tracked = tracked_iteration(storage)
    if tracked is not None and not _is_foreign(storage, file_names.iteration_dir(tracked)):
        iterations.add(tracked)
    if not iterations:
        raise NotCommittedError(
            f"{storage.place}: holds no committed checkpoint; 'flashckpt ls DIR' lists its contents"
        )
    return sorted(iterations)


def _is_foreign(storage: Storage, directory: str) -> bool:
    return (
        foreign.is_dlrovers(storage, directory)
        or foreign.megatron_format(storage, directory) is not None
    )


def checkpoints(storage: Storage) -> list[IterationEntry]:
    """Return all iteration directories in order, whatever their state."""
    entries = []
    removals = {file_names.parse_removal_name(name) for name in storage.list("")}
    removed = {file_names.iteration_dir(removal[0]) for removal in removals if removal is not None}
    for iteration, directory in _directories(storage):
        try:
            present = set(storage.list(directory))
            if file_names.MANIFEST in present and iteration is not None:
                entries.append(_committed(open_checkpoint(storage, iteration), present))
            elif file_names.MANIFEST in present:
                entries.append(_release(storage, directory, present))
            elif foreign.is_dlrovers(storage, directory):
                remark = foreign.dlrover_remark(storage, directory)
                entries.append(IterationEntry(directory, iteration, foreign.DLROVER, remark))
            elif megatron := foreign.megatron_format(storage, directory):
                entries.append(IterationEntry(directory, iteration, MEGATRON, megatron))
            elif directory in removed:
                remark = "its removal was interrupted; the next commit completes it"
                entries.append(IterationEntry(directory, iteration, NOT_COMMITTED, remark))
            else:
                entries.append(_uncommitted(storage, directory, iteration, present))
        except (FlashCkptError, OSError) as error:
            entries.append(
                IterationEntry(directory, iteration, UNREADABLE, for_listing(str(error)))
            )
    tracked = tracked_iteration(storage)
    if tracked is not None and foreign.dlrover_empty(storage, tracked):
        directory = file_names.iteration_dir(tracked)
        entries = [entry for entry in entries if entry.directory != directory]
        remark = "committed without any file"
        entries.append(IterationEntry(directory, tracked, foreign.DLROVER, remark))
    return entries


def _directories(storage: Storage) -> list[tuple[int | None, str]]:
    directories: list[tuple[int | None, str]] = []
    for name in storage.list(""):
        iteration = file_names.parse_iteration_dir(name)
        # `iter_10` parses too, but a load looks only for `iter_0000010`.
        if name == _RELEASE or (
            iteration is not None and name == file_names.iteration_dir(iteration)
        ):
            directories.append((iteration, name))
    return sorted(directories, key=lambda pair: -1 if pair[0] is None else pair[0])


def _release(storage: Storage, directory: str, present: set[str]) -> IterationEntry:
    """Return the entry of one of our checkpoints under Megatron's name `release`."""
    encoded = read_whole(storage, f"{directory}/{file_names.MANIFEST}", MAX_MANIFEST_NBYTES)
    entry = _committed(StoredCheckpoint(storage, file_names.RELEASE, encoded), present)
    remark = entry.remark or f"iteration {entry.iteration}; a load takes its weights alone"
    return dataclasses.replace(entry, iteration=None, remark=remark)


def _committed(stored: StoredCheckpoint, present: set[str]) -> IterationEntry:
    manifest = stored.manifest
    problem = damage(stored, present)
    return IterationEntry(
        directory=stored.directory,
        iteration=manifest.iteration,
        state=DAMAGED if problem else COMMITTED,
        remark=problem,
        ranks=manifest.world_size,
        nbytes=sum(shard.nbytes for shard in manifest.shards),
        layout=layout_of(manifest.description),
        committed_at=manifest.committed_at,
    )


def damage(stored: StoredCheckpoint, present: set[str]) -> str:
    """Return the files that are missing or have another length; empty if none. Reads no file."""
    shards = stored.manifest.shards
    files = [file_names.common_name(stored.manifest.save_id), *(shard.file for shard in shards)]
    missing = [file for file in files if file not in present]
    present_shards = [shard for shard in shards if shard.file in present]
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        sizes = pool.map(
            lambda shard_entry: stored.storage.size(f"{stored.directory}/{shard_entry.file}"),
            present_shards,
        )
        changed = [
            f"{shard.file} ({nbytes} bytes instead of {shard.nbytes})"
            for shard, nbytes in zip(present_shards, sizes, strict=True)
            if nbytes != shard.nbytes
        ]
    problems = {"missing": missing, "of another length": changed}
    return "; ".join(
        f"{problem}: {_first_few(affected)}" for problem, affected in problems.items() if affected
    )


def _uncommitted(
    storage: Storage, directory: str, iteration: int | None, present: set[str]
) -> IterationEntry:
    """Return an entry that describes the progress of each attempt to save this iteration."""
    saves: dict[str, list[str]] = defaultdict(list)
    for name in sorted(present):
        save_id = file_names.save_id_of(name)
        if save_id is not None and name.endswith(_OF_RANKS):
            saves[save_id].append(name)
    if not saves:
        return IterationEntry(directory, iteration, NOT_COMMITTED, "no files of ours in it")
    remarks, ranks, nbytes = [], None, 0
    for save_id, own_files in saves.items():
        shards = [name for name in own_files if name.endswith(".safetensors")]
        nbytes += sum(storage.size(f"{directory}/{name}") for name in shards)
        failed = [name for name in own_files if name.endswith(".failed")]
        if failed:
            note = storage.read(f"{directory}/{failed[0]}", 0, _SMALL_NBYTES)
            reason = for_listing(note.decode(errors="replace"))
            remarks.append(f"the save failed: {reason}")
            continue
        ranks = _world_size(storage, directory, shards)
        durable = file_names.ranks_with_record(own_files, save_id, ranks or _MAX_RANKS)
        remark = f"no {file_names.MANIFEST}; {len(durable)} of {ranks or '?'} ranks are durable"
        missing = [rank for rank in range(ranks or 0) if rank not in durable]
        remarks.append(f"{remark}, missing: {_first_few(missing)}" if missing else remark)
    return IterationEntry(directory, iteration, NOT_COMMITTED, "; ".join(remarks), ranks, nbytes)


def _world_size(storage: Storage, directory: str, shards: list[str]) -> int | None:
    """Return the world size in the first complete shard; a shard's header is written last."""
    for name in (f"{directory}/{shard}" for shard in shards):
        try:
            nbytes = header_nbytes(storage.read(name, 0, 8), name)
            header = storage.read(name, 0, min(nbytes, storage.size(name)))
            world_size = decode_header(header, name).metadata.world_size
        except CorruptCheckpointError:
            continue
        # A damaged file may claim so many ranks that a list of them would not fit into memory.
        return world_size if 0 < world_size <= _MAX_RANKS else None
    return None


def layout_of(description: dict[str, Any]) -> str:
    """Return the parallel sizes as `tp2 pp1 dp4`, without vpp, cp and ep of 1."""
    return " ".join(
        f"{short}{description[name]}"
        for short, name in _SIZES.items()
        if description.get(name) is not None
        and (short in ("tp", "pp", "dp") or description[name] != 1)
    )


def _first_few(items: Sequence[object]) -> str:
    """Return the first few of `items` and the number of further ones, for a message."""
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(map(str, items[:_SHOWN])) + more
