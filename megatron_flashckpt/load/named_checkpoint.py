"""The checkpoints that a load directory and host memory offer, as rank 0 sees them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from megatron_flashckpt.catalog import foreign
from megatron_flashckpt.catalog.directory import read_facts
from megatron_flashckpt.catalog.lineage import Candidate, Choice, Facts, Save, at, choose
from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.catalog.tracker import tracker_text
from megatron_flashckpt.collectives import Attempt, ErrorReport, attempt
from megatron_flashckpt.errors import (
    ANOTHER,
    ConfigError,
    NotCommittedError,
    StorageError,
    is_damage,
)
from megatron_flashckpt.file_format.file_names import (
    RELEASE,
    TRACKER,
    ends_in,
    iteration_dir,
    parse_iteration_dir,
)
from megatron_flashckpt.file_format.run_object import Ancestors
from megatron_flashckpt.load.late_names import read_settled
from megatron_flashckpt.storage.opening import is_url
from megatron_flashckpt.storage.store import Store

logger = logging.getLogger(__name__)

#: Pattern of the name of a checkpoint's directory.
_NAME = "iter_NNNNNNN"


class Missing(NamedTuple):
    """The iteration that tracker or `--ckpt-step` names, which cannot be loaded, and why."""

    iteration: int
    report: ErrorReport


class Offered(NamedTuple):
    """The checkpoints that a load may use. Equal on all ranks."""

    candidates: tuple[Candidate, ...] = ()
    """The best one first. One of another program stands alone; Megatron loads it."""
    named: int | None = None
    """The iteration that `--ckpt-step` or the tracker names."""
    missing: Missing | None = None
    problem: str | None = None
    """Defect of the tracker."""
    foreign: str | None = None
    """The reason why the first candidate, written by DLRover, cannot be loaded."""
    unused: Mapping[Save, str] = {}
    """Saves in memory that do not count, with the reason."""


def refuse_path_inside(load_dir: str, store: Store) -> None:
    """Raise if `load_dir` is a file or one checkpoint: a job would start from scratch.

    Args:
        store: that of `load_dir`.

    Raises:
        ConfigError: names the save directory.
    """
    is_one = False
    place = store.place
    with contextlib.suppress(OSError):  # the load retries what may pass, and reports what does not
        if not is_url(load_dir):
            place = os.path.realpath(load_dir, strict=True)  # people make links to checkpoints
            if Path(load_dir).is_file():
                raise ConfigError(
                    f"{load_dir}: is a file; name the directory that holds it with --load"
                )
        names = {entry.name for entry in store.list("", sizes=False)}
        is_one = TRACKER not in names and _is_checkpoint(place, names)
    if not is_one:
        return
    parent, _, name = place.rpartition("/")
    iteration = parse_iteration_dir(name)
    if iteration is not None:
        remedy = f"start with --load {parent} --ckpt-step {iteration}"
    elif name == iteration_dir(RELEASE):
        remedy = f"write '{name}' into {parent}/{TRACKER}, and start with --load {parent}"
    else:
        remedy = (
            f"rename it to {parent}/{_NAME} with the number of its iteration, and start with "
            f"--load {parent} --ckpt-step of that number"
        )
    raise ConfigError(f"{load_dir}: is one checkpoint, not a save directory; {remedy}")


def _is_checkpoint(place: str, names: Collection[str]) -> bool:
    """Return whether files of these names in a directory are a checkpoint of any program."""
    is_named = parse_iteration_dir(place.rpartition("/")[2]) is not None
    return bool(names) and (is_named or bool(ends_in(names)) or foreign.is_foreign(names))


def offered_by(
    store: Store,
    step: int | None,
    held: Mapping[Save, Ancestors] | None = None,
    wait_s: float = 0.0,
) -> tuple[Facts, Offered]:
    """Return what the directory offers, and the facts on which that depends. Rank 0 calls this.

    Args:
        step: `--ckpt-step`; then only the checkpoint of this iteration is offered.
        held: the saves in memory, with the ancestors of their runs.
        wait_s: longest wait in seconds for names that come late.

    Raises:
        FormatVersionError: the directory is of format 1.
        StorageError: storage does not answer.
    """
    facts = read_settled(lambda: read_facts(store, held), store.place, 0.0 if step else wait_s)
    named = facts.tracker if step is None else step
    facts, missing, of_dlrover = _with_named(store, facts, named)
    if of_dlrover is not None:
        return facts, Offered(named=named, foreign=of_dlrover)
    if step is not None:
        save = at(facts, step)
        choice = Choice(() if save is None else (Candidate(save, in_memory=False),))
    else:
        choice = choose(facts)
        _warn(store, facts, choice)
    candidates = choice.candidates
    first = candidates[0].save if candidates else None
    if first is not None and not first.save_id and first.iteration == named:
        of_dlrover = foreign.dlrover_problem(store, named)
        candidates = candidates[:1]
    else:  # Megatron loads what its tracker or `--ckpt-step` names, and only that
        candidates = tuple(other for other in candidates if other.save.save_id)
    defect = _tracker_defect(store) if facts.tracker_is_damaged and step is None else None
    return facts, Offered(candidates, named, missing, defect, of_dlrover, choice.unused)


def _with_named(
    store: Store, facts: Facts, named: int | None
) -> tuple[Facts, Missing | None, str | None]:
    """Add the named checkpoint if it was put there by a link; or return why it cannot be loaded.

    Links are not entered otherwise: nothing is listed, kept or removed through a link.

    Returns:
        The facts, the reason for this package's checkpoints, and that for DLRover's.
    """
    if named is None or any(save.iteration == named for save in facts.in_storage()):
        return facts, None, None
    if named == RELEASE:
        gone = NotCommittedError(
            f"{store.place}/{iteration_dir(RELEASE)}: is missing, although {TRACKER} names it; "
            f"write the iteration to resume from into that file, or {ANOTHER}"
        )
        report = Attempt(None, gone).report
        return facts, report and Missing(named, report), None
    if problem := foreign.dlrover_empty(store, named):
        return facts, None, problem
    tried = attempt(lambda: open_checkpoint(store, named).save)
    if tried.report is None and tried.value is not None:
        stored = [*facts.stored, tried.value]
        return dataclasses.replace(facts, stored=stored), None, None
    if tried.error is not None and not is_damage(tried.error):
        raise tried.error
    return facts, tried.report and Missing(named, tried.report), None


def _tracker_defect(store: Store) -> str:
    """Return why the tracker names no iteration."""
    try:
        text = tracker_text(store) or ""
    except StorageError as error:
        return str(error.strerror)
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    return f"{store.place}/{TRACKER}: {shown!r} is no iteration"


def _warn(store: Store, facts: Facts, choice: Choice) -> None:
    """Log why the tracker is not followed. Without a word, a person would not expect this."""
    stored = [save for save, in_memory in choice.candidates if not in_memory]
    if choice.removed and facts.stored:
        logger.warning(
            "%s: has no %s, so none of its checkpoints is loaded; to resume from the newest, write "
            "%d into that file",
            *(store.place, TRACKER, max(save.iteration for save in facts.stored)),
        )
        return
    named = facts.tracker
    if choice.wish is not None:
        return
    is_there = any(save.iteration == named for save in facts.stored)
    if is_there and all(save.iteration != named for save in stored):
        logger.warning(
            "%s/%s is not of the newest run's history, although %s names it; to resume from it, "
            "start with --ckpt-step %d",
            *(store.place, iteration_dir(named or 0), TRACKER, named),
        )
    elif stored and stored[0].save_id and (named is None or stored[0].iteration > named):
        logger.warning(
            "iteration %d is committed, although %s does not name it yet",
            *(stored[0].iteration, TRACKER),
        )


def loadable_saves(store: Store, step: int | None) -> list[Save]:
    """Return the checkpoints of this package that a load would try in storage, the best first.

    Raises:
        FlashCkptError: the named iteration cannot be loaded, and there is no other.
    """
    _, offered = offered_by(store, step)
    saves = [save for save, _ in offered.candidates]
    if saves and not saves[0].save_id:
        return []  # Megatron loads its own checkpoint
    if not saves and offered.missing is not None:
        raise offered.missing.report.error()
    return saves
