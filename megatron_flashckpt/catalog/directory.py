"""Reads a save directory into the `lineage.Facts` on which every choice depends. Changes no file.

Loads, agents and commands call this. The cost does not grow with the number of earlier runs, for
each run's object repeats all ancestors: only the newest objects are read, and those of runs that
have left checkpoints.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from megatron_flashckpt.catalog.foreign import is_foreign
from megatron_flashckpt.catalog.lineage import Facts, Save, Tracked
from megatron_flashckpt.catalog.tracker import iteration_in, tracker_text
from megatron_flashckpt.errors import (
    UNDECODABLE,
    CorruptCheckpointError,
    FormatVersionError,
    StorageError,
    is_damage,
)
from megatron_flashckpt.file_format.end import HEAD_NBYTES, End, kind_of
from megatron_flashckpt.file_format.file_names import (
    LAST_OF_FORMAT_1,
    MANIFEST_OF_FORMAT_1,
    RELEASE,
    RUNS,
    TRACKED,
    end_name,
    ends_in,
    iteration_dir,
    parse_iteration_dir,
    parse_run_file,
    run_file,
    run_number,
    run_of,
)
from megatron_flashckpt.file_format.manifest import MAX_MANIFEST_NBYTES, decode_facts
from megatron_flashckpt.file_format.run_object import Ancestors, RunObject, decode_run
from megatron_flashckpt.file_format.seal import broken_seal, seal
from megatron_flashckpt.storage.parallel import for_all
from megatron_flashckpt.storage.store import Entry, Store, read_whole

logger = logging.getLogger(__name__)

#: Bytes to read of a run's object, and of `tracker.json`, at most.
_SMALL_NBYTES = 2**20
_TRACKED = msgspec.json.Decoder(Tracked)


# ---------------------------------------------------------------------- facts


def read_facts(store: Store, held: Mapping[Save, Ancestors] | None = None) -> Facts:
    """Return all that a choice of a checkpoint depends on.

    Args:
        held: saves that all their ranks hold in memory, with the ancestors of their runs.

    Raises:
        FormatVersionError: the directory is of format 1.
        StorageError: the store does not answer.
    """
    ended, foreign = _list_iterations(store)
    stored = _committed(store, ended)
    in_memory = held or {}
    numbers = run_numbers(store)
    left = {save.run for save in (*stored, *in_memory)}
    objects = _objects_of(store, numbers, left)
    runs = {run.name: run.ancestors for run in objects.values() if run is not None}

    def repeats_object(save: Save) -> bool:
        """Return whether the object of the save's run is gone or damaged, so the save replaces it.

        All objects are gone if a person has removed `flashckpt/` or copied only the checkpoints. A
        run that has no object beside others is of another directory.
        """
        number = run_number(save.run)
        return number in objects and objects[number] is None if numbers else bool(stored)

    runs |= {save.run: ancestors for save, ancestors in in_memory.items() if repeats_object(save)}
    runs |= _repeated_by_saves(store, filter(repeats_object, reversed(stored)))
    iteration, is_damaged = _tracker(store)
    return Facts(
        tracker=iteration,
        tracked=tracked(store),
        runs=runs,
        stored=stored,
        foreign=foreign,
        held=list(in_memory),
        tracker_is_damaged=is_damaged,
        numbers=numbers,
    )


def tracked(store: Store) -> Tracked | None:
    """Return the contents of `tracker.json`; None if it is missing or damaged."""
    try:
        encoded = store.get(TRACKED, 0, _SMALL_NBYTES)
        if (problem := broken_seal(encoded)) is not None:
            raise ValueError(problem)
        return _TRACKED.decode(encoded)
    except FileNotFoundError:
        return None
    except (ValueError, *UNDECODABLE) as error:
        logger.warning("%s/%s: is damaged and not used: %s", store.place, TRACKED, error)
    except StorageError as error:
        if not is_damage(error):
            raise
        logger.warning("%s", error)
    return None


def _tracker(store: Store) -> tuple[int | None, bool]:
    """Return the iteration in the tracker, and whether the tracker exists but names none."""
    try:
        text = tracker_text(store)
    except StorageError as error:
        if not is_damage(error):
            raise
        return None, True
    if text is None:
        return None, False
    iteration = RELEASE if text == iteration_dir(RELEASE) else iteration_in(text)
    return iteration, iteration is None


# ---------------------------------------------------------------------- iterations


def _list_iterations(store: Store) -> tuple[list[Save], list[int]]:
    """Return the saves that have an end, and the iterations that another program has written.

    Links are not entered.
    """
    entries = iteration_entries(store)
    iterations = [iteration for iteration, entry in entries.items() if entry.kind == "directory"]
    listed = for_all(lambda iteration: _names_in(store, iteration), iterations)
    ended: list[Save] = []
    foreign: list[int] = []
    for iteration, names in zip(iterations, listed, strict=True):
        saves = [Save(iteration, save_id) for save_id in ends_in(names)]
        ended += saves
        if not saves and is_foreign(names):
            foreign.append(iteration)
    return ended, foreign


def iteration_entries(store: Store) -> dict[int, Entry]:
    """Return the entries with the names of iteration directories, by iteration in order.

    They may be links or files. Loads look for these names only: `iter_10` is none.
    """
    entries: dict[int, Entry] = {}
    for entry in store.list("", sizes=False):
        is_release = entry.name == iteration_dir(RELEASE)
        iteration = RELEASE if is_release else parse_iteration_dir(entry.name)
        if iteration is not None:
            entries[iteration] = entry
    return dict(sorted(entries.items()))


def _names_in(store: Store, iteration: int) -> list[str]:
    directory = iteration_dir(iteration)
    names = [entry.name for entry in store.list(directory, sizes=False)]
    if MANIFEST_OF_FORMAT_1 in names:
        raise FormatVersionError(
            f"{store.place}/{directory}/{MANIFEST_OF_FORMAT_1}: is of format 1, which this release "
            f"does not read; convert it with commit {LAST_OF_FORMAT_1} (flashckpt convert), or "
            "train into another directory"
        )
    return names


def _committed(store: Store, ended: Sequence[Save]) -> list[Save]:
    """Return those of the ended saves that are checkpoints, in ascending order."""
    ends = for_all(lambda save: _end(store, save), ended)
    committed = [save for save, end in zip(ended, ends, strict=True) if end is End.COMMITTED]
    return sorted(committed, key=lambda save: save.order)


def _end(store: Store, save: Save) -> End | None:
    """Return what the end of a save says; None if it was removed since."""
    try:
        name = f"{iteration_dir(save.iteration)}/{end_name(save.save_id)}"
        return kind_of(store.get(name, 0, HEAD_NBYTES))
    except FileNotFoundError:
        return None
    except StorageError as error:  # a load of this save reports the damage
        if not is_damage(error):
            raise
        return End.COMMITTED


# ---------------------------------------------------------------------- runs


def run_numbers(store: Store) -> list[int]:
    """Return the numbers of all runs that have an object, in ascending order."""
    parsed = (parse_run_file(entry.name) for entry in store.list(RUNS, sizes=False))
    return sorted(number for number in parsed if number is not None)


def later_run(store: Store, number: int) -> RunObject | None:
    """Return the highest run above `number`; None if there is none."""
    later = [other for other in run_numbers(store) if other > number]
    for other in reversed(later):
        if (run := _read_objects(store, [other])[other]) is not None:
            return run
    return None


def check_run_is_known(store: Store, save_id: str) -> None:
    """Check that the directory is the one of a save's run, so that a missing name is missing there.

    A mount point without its mount has no name of any save. The directory that has the object of a
    run is that of the run. A save of a run that was never opened passes.

    Raises:
        StorageError: another directory is in its place, perhaps for a moment.
    """
    number = run_number(run_of(save_id))
    if number and store.stat(run_file(number)) is None:
        raise StorageError(
            errno.ENOTCONN,
            f"{store.place}: is away, or something else is in its place, because it lacks "
            f"{run_file(number)}: {store.advice.away}",
        )


def _objects_of(
    store: Store, numbers: Sequence[int], left: Collection[str]
) -> dict[int, RunObject | None]:
    """Return the objects of runs on which the choice of the newest history depends, by number.

    The newest run, and lower ones while the runs above have neither ancestors nor left anything.
    None for a damaged object.

    Args:
        numbers: of all runs, in ascending order.
        left: runs that have left a checkpoint, in storage or memory; their objects are read, too.
    """
    objects = _read_objects(store, {*map(run_number, left)} & {*numbers})
    descending = list(reversed(numbers))
    count = 1
    while descending:
        # Runs that died early may be many: read more at once with every step.
        some, descending, count = descending[:count], descending[count:], 2 * count
        objects |= _read_objects(store, [number for number in some if number not in objects])
        runs = (objects[number] for number in some)
        if any(run is not None and (run.ancestors or run.name in left) for run in runs):
            break
    return objects


def _read_objects(store: Store, numbers: Iterable[int]) -> dict[int, RunObject | None]:
    """Return the objects of runs; None for a damaged or missing one, with one warning for all."""

    def read(number: int) -> RunObject | str | None:
        name = run_file(number)
        try:
            run = decode_run(store.get(name, 0, _SMALL_NBYTES), f"{store.place}/{name}")
            if run_number(run.name) != number:
                return f"{store.place}/{name}: is the object of run {run.name}"
            return run
        except FileNotFoundError:
            return None
        except (CorruptCheckpointError, StorageError) as error:
            if not is_damage(error):
                raise
            return str(error)

    ordered = list(numbers)
    results = dict(zip(ordered, for_all(read, ordered), strict=True))
    problems = [result for result in results.values() if isinstance(result, str)]
    if problems:
        logger.warning("objects of runs are damaged and not used: %s", "; ".join(problems))
    return {
        number: None if isinstance(result, str) else result for number, result in results.items()
    }


def _repeated_by_saves(store: Store, saves: Iterable[Save]) -> dict[str, Ancestors]:
    """Return the ancestors of the runs of `saves`, as these repeat them."""
    by_run: dict[str, list[Save]] = {}
    for save in saves:
        by_run.setdefault(save.run, []).append(save)

    def ancestors(saves: list[Save]) -> Ancestors | None:
        read = (_ancestors_in(store, save) for save in saves)
        return next((found for found in read if found is not None), None)

    repeated = zip(by_run, for_all(ancestors, list(by_run.values())), strict=True)
    return {run: found for run, found in repeated if found is not None}


def _ancestors_in(store: Store, save: Save) -> Ancestors | None:
    """Return the ancestors in the manifest of a save; None if it is damaged or gone."""
    name = f"{iteration_dir(save.iteration)}/{end_name(save.save_id)}"
    try:
        encoded = read_whole(store, name, MAX_MANIFEST_NBYTES)
        return decode_facts(encoded, f"{store.place}/{name}").ancestors
    except (FileNotFoundError, CorruptCheckpointError, FormatVersionError):
        return None
    except StorageError as error:
        if not is_damage(error):
            raise
        return None


def put_tracked(store: Store, contents: Tracked) -> None:
    """Put `tracker.json`."""
    store.put(TRACKED, seal(msgspec.json.encode(contents)))
