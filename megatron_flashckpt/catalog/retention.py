"""Retention: selection and removal of old checkpoints.

Retention considers the iteration directories in storage that have a valid manifest. It keeps no
state between commits, so a restart, another agent or another node decides in the same way.

A removal has three steps. First the manifest is moved next to the tracker (`removal_name`), so that
the checkpoint cannot be loaded any more; then its files are deleted; then the moved manifest. An
interrupted removal is recognised by the moved manifest, and completed after a later commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from megatron_flashckpt.catalog.manifest_facts import KnownManifests
from megatron_flashckpt.config import Best, Retention
from megatron_flashckpt.errors import FlashCkptError, for_listing
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.manifest import CommitFacts
from megatron_flashckpt.storage.base import Storage
from megatron_flashckpt.storage.parallel import for_all

logger = logging.getLogger(__name__)

_SHOWN = 8
#: Prefix of NFS for a deleted file that a process on the same node still has open.
_OPEN_ELSEWHERE = ".nfs"
#: Directories with only such files for which a line was logged already.
_told_open: set[str] = set()
#: Start of this process: seconds since 1970, and seconds of a clock that cannot be set.
_STARTED = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)


def _now() -> float:
    """Return the seconds since 1970, without jumps ahead since this process started.

    A clock that is set forward must not make all checkpoints look old. A clock that is set back
    only keeps checkpoints longer, which needs space.
    """
    wall, steady = _STARTED
    return min(time.time(), wall + time.clock_gettime(time.CLOCK_BOOTTIME) - steady)


def why_kept(
    commits: Iterable[CommitFacts],
    rules: Retention,
    *,
    retain_interval: int | None,
    tracked: int,
    previous: int | None,
    now: float,
) -> dict[int, list[str]]:
    """Return by iteration the rules that keep it; a checkpoint without a rule may be removed.

    Args:
        retain_interval: Megatron's `--save-retain-interval`; alone it removes only `previous`.
        tracked: iteration that the tracker names: the last durable one.
        previous: iteration that the tracker named before, if the tracker was moved.
        now: seconds since 1970.
    """
    newest_first = sorted(commits, key=lambda commit: -commit.iteration)
    reasons: dict[int, list[str]] = {commit.iteration: [] for commit in newest_first}

    def keep(reason: str, wanted: Callable[[CommitFacts], bool]) -> None:
        for commit in filter(wanted, newest_first):
            reasons[commit.iteration].append(reason)

    keep("tracker", lambda facts: facts.iteration == tracked)
    # After a restart from an older iteration, newer checkpoints of the former run may remain.
    keep("newer", lambda facts: facts.iteration > tracked)
    if retain_interval is not None:
        keep(
            f"retain interval {retain_interval}",
            lambda facts: facts.iteration % retain_interval == 0,
        )
    if rules == Retention():
        keep("no rule against it", lambda facts: not retain_interval or facts.iteration != previous)
    past = [commit for commit in newest_first if commit.iteration <= tracked]
    if rules != Retention() and past and past[0].iteration != tracked:
        # The tracker names a checkpoint that is missing, damaged or not ours; a load falls back.
        keep("newest below the tracker", lambda facts: facts is past[0])
    if rules.latest is not None:
        latest = past[: rules.latest]
        keep(f"latest {rules.latest}", lambda facts: facts in latest)
    if (every := rules.every) is not None:
        keep(f"every {every}", lambda facts: facts.iteration % every == 0)
    if rules.best is not None:
        reason, best = _best(past, rules.best)
        keep(reason, lambda facts: facts in best)
    if (hours := rules.max_age_hours) is not None:
        # A checkpoint of an older release has no commit time; it is kept.
        keep(
            f"age below {hours:g} h",
            lambda facts: facts.committed_at is None or now - facts.committed_at < 3600 * hours,
        )
    return reasons


def _best(past: list[CommitFacts], rule: Best) -> tuple[str, list[CommitFacts]]:
    """Return a name of the rule, and the checkpoints of `past` (newest first) that it keeps."""
    sign = 1 if rule.mode == "min" else -1
    measured = [commit for commit in past if rule.metric in commit.metrics]
    if not measured:
        # A misspelled metric must not remove all checkpoints.
        return f"none has metric '{rule.metric}'", past
    measured.sort(key=lambda commit: sign * commit.metrics[rule.metric])
    return f"best {rule.keep} by '{rule.metric}'", measured[: rule.keep]


def retire(
    storage: Storage,
    rules: Retention,
    *,
    retain_interval: int | None,
    tracked: int | None,
    previous: int | None,
) -> None:
    """Remove checkpoints that no rule keeps, and complete interrupted removals.

    A checkpoint that cannot be removed is kept and logged.
    """
    hide(storage, rules, retain_interval=retain_interval, tracked=tracked, previous=previous)
    finish(storage)


def hide(
    storage: Storage,
    rules: Retention,
    *,
    retain_interval: int | None,
    tracked: int | None,
    previous: int | None,
    manifests: KnownManifests | None = None,
    is_current: Callable[[], bool] = lambda: True,
) -> None:
    """Move away the manifests of checkpoints that no rule keeps, so that none can be loaded.

    The committing agent calls this while the tracker cannot move.

    Args:
        is_current: returns whether the next manifest may be moved.
    """
    for commit in removable(
        storage,
        rules,
        retain_interval=retain_interval,
        tracked=tracked,
        previous=previous,
        manifests=manifests,
    ):
        if not is_current():
            return
        hit("retain.chosen")
        _attempt(storage, commit.iteration, commit.save_id, _hide)


def finish(storage: Storage) -> None:
    """Delete the files of all checkpoints whose manifests were moved away."""
    for name in storage.list(""):
        if (removed := file_names.parse_removal_name(name)) and storage.kind(name) == "file":
            _attempt(storage, *removed, _clear)


def removable(
    storage: Storage,
    rules: Retention,
    *,
    retain_interval: int | None,
    tracked: int | None,
    previous: int | None,
    manifests: KnownManifests | None = None,
) -> list[CommitFacts]:
    """Return the checkpoints that no rule keeps; none without a rule or a tracker."""
    if tracked is None or (rules == Retention() and retain_interval is None):
        return []
    if rules == Retention():
        # Megatron's interval concerns only this checkpoint.
        directories = [] if previous is None else [file_names.iteration_dir(previous)]
    else:
        directories = storage.list("")
    commits, unreadable = survey(storage, directories, manifests)
    for iteration, error in unreadable.items():
        logger.warning(
            "retention keeps iteration %d, because its manifest cannot be read: %s",
            iteration,
            for_listing(str(error)),
        )
    reasons = why_kept(
        commits,
        rules,
        retain_interval=retain_interval,
        tracked=tracked,
        previous=previous,
        now=_now(),
    )
    if rules.best is not None and not any(rules.best.metric in facts.metrics for facts in commits):
        logger.warning(
            "no checkpoint has the metric '%s' that 'retention.best' names, so none is removed; "
            "report the metric with megatron_flashckpt.report_metric",
            rules.best.metric,
        )
    return [commit for commit in commits if not reasons[commit.iteration]]


def committed(storage: Storage, directories: Iterable[str]) -> list[CommitFacts]:
    """Return the facts of our committed checkpoints in `directories`; see `survey`."""
    return survey(storage, directories)[0]


def survey(
    storage: Storage, directories: Iterable[str], manifests: KnownManifests | None = None
) -> tuple[list[CommitFacts], dict[int, FlashCkptError | OSError]]:
    """Return our committed checkpoints in `directories`, and by iteration the errors of others.

    Directories without a manifest are skipped, and links, whose target may belong to another job. A
    checkpoint with a damaged manifest does not count for any rule, and is never removed.
    """
    manifests = manifests or KnownManifests()
    checkpoints = []
    unreadable: dict[int, FlashCkptError | OSError] = {}
    for directory in directories:
        iteration = file_names.parse_iteration_dir(directory)
        if iteration is None or storage.kind(directory) != "directory":
            continue
        try:
            facts = manifests.facts(storage, directory)
        except FileNotFoundError:
            continue
        except (FlashCkptError, OSError) as error:
            unreadable[iteration] = error
            continue
        if file_names.iteration_dir(facts.iteration) == directory:
            checkpoints.append(facts)
    return checkpoints, unreadable


def _attempt(
    storage: Storage,
    iteration: int,
    save_id: str,
    step: Callable[[Storage, int, str], None],
) -> None:
    """Run one step of a removal; log an error, so that other removals continue."""
    try:
        step(storage, iteration, save_id)
    except (FlashCkptError, OSError) as error:
        logger.warning("cannot remove the checkpoint of iteration %d: %s", iteration, error)


def _hide(storage: Storage, iteration: int, save_id: str) -> None:
    manifest = f"{file_names.iteration_dir(iteration)}/{file_names.MANIFEST}"
    # One atomic step: no load finds the checkpoint, and the next commit finds the removal.
    storage.move(manifest, file_names.removal_name(iteration, save_id))
    hit("retain.hidden")


def _clear(storage: Storage, iteration: int, save_id: str) -> None:
    """Delete the files of a checkpoint whose manifest was moved away, then that manifest."""
    directory = file_names.iteration_dir(iteration)
    remaining = []
    present, unreadable = survey(storage, [directory])
    if unreadable:  # it may be that of this checkpoint, put back
        raise unreadable[iteration]
    if save_id in {facts.save_id for facts in present}:
        logger.warning(
            "%s/%s: stays, because its manifest was put back after retention had moved it away",
            *(storage.place, directory),
        )
        storage.delete(file_names.removal_name(iteration, save_id))
        return

    def delete(path: str) -> None:
        if storage.kind(path) == "file":
            storage.delete(path)
            hit("retain.file")

    if storage.kind(directory) == "directory":
        # Only files of this save: another save of this iteration may be writing there.
        own_files = [
            name for name in storage.list(directory) if file_names.save_id_of(name) == save_id
        ]
        for_all(delete, [f"{directory}/{name}" for name in own_files])
        remaining = storage.list(directory)
        if not remaining:
            storage.delete_directory(directory)
    place = f"{storage.place}/{directory}"
    if remaining and all(name.startswith(_OPEN_ELSEWHERE) for name in remaining):
        if place not in _told_open:
            _told_open.add(place)
            logger.info(
                "%s: a process still has deleted files open (%s); a later commit removes the "
                "directory",
                place,
                ", ".join(remaining[:_SHOWN]),
            )
        return
    foreign = [
        name
        for name in remaining
        if name != file_names.MANIFEST and not file_names.save_id_of(name)
    ]
    foreign = [name for name in foreign if not name.startswith(_OPEN_ELSEWHERE)]
    if foreign:
        logger.warning(
            "%s: the checkpoint was removed, but the directory stays, because it holds files of "
            "other programs: %s",
            place,
            ", ".join(foreign[:_SHOWN]),
        )
    hit("retain.deleted")
    storage.delete(file_names.removal_name(iteration, save_id))
    logger.info("removed the checkpoint of iteration %d (save %s)", iteration, save_id)
