"""Listing of a save directory from file names and manifests; needs no torch, changes no file."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_flashckpt.catalog import foreign
from megatron_flashckpt.catalog.directory import iteration_entries, read_facts
from megatron_flashckpt.catalog.lineage import Facts, History, Save, choose
from megatron_flashckpt.catalog.stored_checkpoint import (
    StoredCheckpoint,
    ends_of,
    newest_history_of,
    read_manifest,
    that_counts,
)
from megatron_flashckpt.catalog.tracker import tracked_iteration
from megatron_flashckpt.errors import (
    CorruptCheckpointError,
    FlashCkptError,
    NotCommittedError,
    first_few,
    for_listing,
    is_damage,
)
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.manifest import CommitFacts
from megatron_flashckpt.file_format.shard_file import decode_header, header_nbytes
from megatron_flashckpt.storage.opening import is_url, open_store
from megatron_flashckpt.storage.retrying_store import RetryingStore, load_patience_s
from megatron_flashckpt.storage.store import Entry, Store

COMMITTED = "committed"
DAMAGED = "damaged"
OFF_LINEAGE = "of another history"
NOT_COMMITTED = "not committed"
FAILED = "failed"
UNREADABLE = "unreadable"
MEGATRON = "Megatron's own"
FORMAT_1 = "format 1"

#: Short names of the parallel sizes in a description.
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}
_MAX_RANKS = 1 << 20


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
    commit: CommitFacts | None = None
    """Facts of the save that counts in this directory; None: no save is committed."""


def save_directory(directory: str) -> RetryingStore:
    """Return the store of a save directory; it retries reads after transient errors.

    Args:
        directory: a path, or the URL of a copy in an object store.

    Raises:
        ConfigError: `directory` is a URL that cannot be opened.
        NotCommittedError: `directory` is not a save directory, or is one checkpoint inside one.
    """
    if not directory.strip():
        # An unset variable in a script; Path("") is the working directory.
        raise NotCommittedError(
            f"{directory!r}: names no directory; give Megatron's --save directory"
        )
    store = RetryingStore(open_store(directory), total_s=load_patience_s())
    if not is_url(directory) and not store.with_retries(Path(directory).is_dir):
        raise NotCommittedError(
            f"{directory}: is not a directory; give Megatron's --save directory"
        )
    parent, _, name = store.place.rpartition("/")
    iteration = file_names.parse_iteration_dir(name)
    if iteration is not None and store.stat(file_names.TRACKER) is None:
        raise NotCommittedError(
            f"{directory}: is one checkpoint; give its save directory: "
            f"{parent} --iteration {iteration}"
        )
    return store


def chosen_iteration(store: Store) -> int:
    """Return the iteration that a job would load: the tracked one, else the newest committed.

    Raises:
        NotCommittedError: the tracker names no iteration, and no checkpoint of ours is committed.
    """
    tracked = tracked_iteration(store)
    return loadable_iterations(store)[-1] if tracked is None else tracked


def committed_iterations(store: Store) -> list[int]:
    """Return our committed iterations in order, and those whose directory cannot be listed."""
    iterations = []
    for iteration, entry in iteration_entries(store).items():
        if iteration == file_names.RELEASE:
            continue
        try:
            ends = ends_of(store, iteration, _names(store, entry.name))
            committed = None in ends.values()
        except FlashCkptError as error:
            if not is_damage(error):
                raise
            committed = True  # perhaps; opening the checkpoint reports the damage
        if committed:
            iterations.append(iteration)
    return iterations


def newest_durable(store: Store) -> int | None:
    """Return the iteration from which a restart would resume; None: it would find nothing."""
    candidates = choose(read_facts(store)).candidates
    return candidates[0].save.iteration if candidates else None


def loadable_iterations(store: Store) -> list[int]:
    """Return in order the iterations that a job may load: committed ones, and the tracked one.

    Leaves out iterations in Megatron's own formats and in DLRover's.

    Raises:
        NotCommittedError: no such iteration.
    """
    iterations = set(committed_iterations(store))
    tracked = tracked_iteration(store)
    if tracked is not None:
        names = _names(store, file_names.iteration_dir(tracked))
        iterations |= set() if foreign.is_foreign(names) else {tracked}
    if not iterations:
        raise NotCommittedError(
            f"{store.place}: holds no committed checkpoint; 'flashckpt ls DIR' lists its contents"
        )
    return sorted(iterations)


def _names(store: Store, directory: str) -> set[str]:
    return {entry.name for entry in store.list(directory, sizes=False)}


def checkpoints(store: Store) -> list[IterationEntry]:
    """Return all iteration directories in order, whatever their state."""
    try:
        facts = read_facts(store)
    except (FlashCkptError, OSError):  # the entries of the directories name the error
        facts = Facts(tracker=None, tracked=None, runs={}, stored=())
    history = newest_history_of(facts)
    entries = []
    for number, directory in iteration_entries(store).items():
        iteration = None if number == file_names.RELEASE else number
        try:
            entry = _entry(store, iteration, directory.name, facts, history)
        except (FlashCkptError, OSError) as error:
            entry = IterationEntry(directory.name, iteration, UNREADABLE, for_listing(str(error)))
        if directory.kind == "link":
            entry = _with_remark(entry, "is a symbolic link to another directory")
        entries.append(entry)
    tracked = tracked_iteration(store)
    if tracked is not None and foreign.dlrover_empty(store, tracked):
        directory_name = file_names.iteration_dir(tracked)
        entries = [entry for entry in entries if entry.directory != directory_name]
        remark = "committed without any file"
        entries.append(IterationEntry(directory_name, tracked, foreign.DLROVER, remark))
    return entries


def _entry(
    store: Store, iteration: int | None, directory: str, facts: Facts, history: History | None
) -> IterationEntry:
    """Return the entry of one iteration directory."""
    present = {entry.name: entry for entry in store.list(directory)}
    number = file_names.RELEASE if iteration is None else iteration
    ends = ends_of(store, number, present)
    committed = [save for save, failure in ends.items() if failure is None]
    if committed:
        return _committed(store, committed, present, facts, history)
    if file_names.MANIFEST_OF_FORMAT_1 in present:
        remark = f"commit {file_names.LAST_OF_FORMAT_1} of megatron_flashckpt reads and converts it"
        return IterationEntry(directory, iteration, FORMAT_1, remark)
    if foreign.is_dlrovers(store, directory):
        remark = foreign.dlrover_remark(store, directory)
        return IterationEntry(directory, iteration, foreign.DLROVER, remark)
    if megatron := foreign.megatron_format(store, directory):
        return IterationEntry(directory, iteration, MEGATRON, megatron)
    failed = {save.save_id: failure.failed for save, failure in ends.items() if failure}
    return _uncommitted(store, directory, iteration, present, failed)


def _committed(
    store: Store,
    committed: Sequence[Save],
    present: Mapping[str, Entry],
    facts: Facts,
    history: History | None,
) -> IterationEntry:
    """Return the entry of a directory with committed saves: the state of the one that counts."""
    save = that_counts(committed, history)
    stored = StoredCheckpoint(store, save, read_manifest(store, save))
    manifest = stored.manifest
    is_release = save.iteration == file_names.RELEASE
    remark = f"iteration {manifest.iteration}; a load takes its weights alone" if is_release else ""
    state = COMMITTED
    if problem := damage(stored, present):
        state, remark = DAMAGED, problem
    elif not is_release and (reason := off_lineage(save, facts, history)):
        state, remark = OFF_LINEAGE, reason
    entry = IterationEntry(
        directory=stored.directory,
        iteration=None if is_release else manifest.iteration,
        state=state,
        remark=remark,
        ranks=manifest.world_size,
        nbytes=sum(shard.nbytes for shard in manifest.shards),
        layout=layout_of(manifest.description),
        # The manifest is one, too, but as large as a table of contents.
        commit=CommitFacts(
            **{name: getattr(manifest, name) for name in CommitFacts.__struct_fields__}
        ),
    )
    others = [other.save_id for other in committed if other != save]
    return _with_remark(entry, f"also holds {first_few(others)}") if others else entry


def _with_remark(entry: IterationEntry, remark: str) -> IterationEntry:
    remarks = filter(None, (entry.remark, remark))
    return dataclasses.replace(entry, remark="; ".join(remarks))


def off_lineage(save: Save, facts: Facts, history: History | None) -> str:
    """Return the reason why a committed save does not count; empty if it counts.

    Args:
        history: of the newest run; None if no run is known.
    """
    if history is None or history.holds(save):
        return ""
    if save.run not in facts.runs:
        return "no run of this directory has saved it"
    if not history.ancestors:
        return f"run {history.run} began from scratch"
    chain = [history.run, *(ancestor.run for ancestor in history.ancestors)]
    # The run that left the save's run; for a run outside the chain, the newest one.
    index = chain.index(save.run) - 1 if save.run in chain else 0
    left_at = history.ancestors[index].left_at
    return f"run {chain[index]} went on from iteration {left_at}"


def damage(stored: StoredCheckpoint, present: Mapping[str, Entry]) -> str:
    """Return the files that are missing or have another length; empty if none. Reads no file.

    Args:
        present: the entries of the checkpoint's directory by name, with sizes.
    """
    shards = stored.manifest.shards
    files = [file_names.common_name(stored.manifest.save_id), *(shard.file for shard in shards)]
    missing = [file for file in files if file not in present]
    changed = [
        f"{shard.file} ({present[shard.file].nbytes} bytes instead of {shard.nbytes})"
        for shard in shards
        if shard.file in present and present[shard.file].nbytes != shard.nbytes
    ]
    problems = {"missing": missing, "of another length": changed}
    return "; ".join(
        f"{problem}: {first_few(affected)}" for problem, affected in problems.items() if affected
    )


def _uncommitted(
    store: Store,
    directory: str,
    iteration: int | None,
    present: Mapping[str, Entry],
    failed: Mapping[str, str],
) -> IterationEntry:
    """Return an entry that describes the progress of each attempt to save this iteration.

    Args:
        failed: the reasons of saves whose end says that they failed.
    """
    saves: dict[str, list[str]] = defaultdict(list)
    for name in sorted(present):
        if save_id := file_names.save_of(name):
            saves[save_id].append(name)
    if not saves:
        return IterationEntry(directory, iteration, NOT_COMMITTED, "no complete file of ours in it")
    remarks, ranks, nbytes = [], None, 0
    for save_id, own_files in saves.items():
        shards = [name for name in own_files if file_names.is_shard_name(name)]
        nbytes += sum(present[name].nbytes for name in shards)
        if save_id in failed:
            remarks.append(f"{save_id} failed: {for_listing(failed[save_id])}")
            continue
        ranks = _world_size(store, directory, shards)
        durable = file_names.ranks_with_record(own_files, save_id, ranks or _MAX_RANKS)
        remark = f"{save_id}: {len(durable)} of {ranks or '?'} ranks are durable"
        missing = [rank for rank in range(ranks or 0) if rank not in durable]
        remarks.append(f"{remark}, missing: {first_few(missing)}" if missing else remark)
    state = FAILED if saves.keys() == failed.keys() else NOT_COMMITTED
    return IterationEntry(directory, iteration, state, "; ".join(remarks), ranks, nbytes)


def _world_size(store: Store, directory: str, shards: list[str]) -> int | None:
    """Return the world size in the first undamaged shard."""
    for name in (f"{directory}/{shard}" for shard in shards):
        try:
            nbytes = header_nbytes(store.get(name, 0, 8), name)
            world_size = decode_header(store.get(name, 0, nbytes), name).metadata.world_size
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
