"""Which committed checkpoints go, and how they go.

What there is comes from storage alone: the iteration directories with a valid manifest. Nothing is
remembered between commits, so a restart, another agent or another node changes nothing.

A checkpoint goes in three steps: its manifest is moved beside the tracker (`removal_name`), and
from that moment on nobody can load it; then its files are deleted, then the moved manifest. A
removal that was cut short is found by that name and finished after a later commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from megatron_flashckpt.catalog.manifest_facts import KnownManifests
from megatron_flashckpt.config import Best, Retention
from megatron_flashckpt.errors import FlashCkptError, for_listing
from megatron_flashckpt.failpoints import reach
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.manifest import CommitFacts
from megatron_flashckpt.storage.base import Storage
from megatron_flashckpt.storage.parallel import for_all

logger = logging.getLogger(__name__)

_SHOWN = 8
#: How NFS calls a deleted file that a process on the same node has open.
_OPEN_ELSEWHERE = ".nfs"
#: Directories of which the log has said that they hold nothing but such files.
_told_open: set[str] = set()
#: The time of the day when this process started, and that of a clock which nobody sets.
_STARTED = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)


def _now() -> float:
    """Return the seconds since 1970, however far somebody has set the clock forward meanwhile.

    A clock that jumps ahead must not make all checkpoints look old. One that is set back keeps
    them for longer, which costs space only.
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
    """Return by iteration the rules that keep it; what no rule keeps may go.

    Args:
        retain_interval: Megatron's; by itself it lets only the previous checkpoint go.
        tracked: what the tracker names: the last durable one.
        previous: what the tracker named before, if it was moved.
        now: seconds since 1970.
    """
    newest_first = sorted(commits, key=lambda commit: -commit.iteration)
    reasons: dict[int, list[str]] = {commit.iteration: [] for commit in newest_first}

    def keep(reason: str, wanted: Callable[[CommitFacts], bool]) -> None:
        for commit in filter(wanted, newest_first):
            reasons[commit.iteration].append(reason)

    keep("tracker", lambda it: it.iteration == tracked)
    # Also what a past left behind that training has gone back from.
    keep("newer", lambda it: it.iteration > tracked)
    if retain_interval is not None:
        keep(f"retain interval {retain_interval}", lambda it: it.iteration % retain_interval == 0)
    if rules == Retention():
        keep("no rule against it", lambda it: not retain_interval or it.iteration != previous)
    past = [commit for commit in newest_first if commit.iteration <= tracked]
    if rules.latest is not None:
        latest = past[: rules.latest]
        keep(f"latest {rules.latest}", lambda it: it in latest)
    if (every := rules.every) is not None:
        keep(f"every {every}", lambda it: it.iteration % every == 0)
    if rules.best is not None:
        reason, best = _best(past, rules.best)
        keep(reason, lambda it: it in best)
    if (hours := rules.max_age_hours) is not None:
        # Of unknown age: written by an older release. It is not ours to guess.
        keep(
            f"age below {hours:g} h",
            lambda it: it.committed_at is None or now - it.committed_at < 3600 * hours,
        )
    return reasons


def _best(past: list[CommitFacts], rule: Best) -> tuple[str, list[CommitFacts]]:
    """Return what to call the rule and what it keeps of `past`, which is newest first."""
    sign = 1 if rule.mode == "min" else -1
    measured = [commit for commit in past if rule.metric in commit.metrics]
    if not measured:
        # A name that is never reported must not cost anybody all checkpoints.
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
    """Remove what no rule keeps, and finish removals that were cut short.

    What cannot be removed stays and is said in the log.
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
) -> None:
    """Take away the manifests of what no rule keeps, so that nobody can load it any more.

    Called by the agent that commits while no tracker can move.
    """
    for commit in superfluous(
        storage,
        rules,
        retain_interval=retain_interval,
        tracked=tracked,
        previous=previous,
        manifests=manifests,
    ):
        reach("retain.chosen")
        _attempt(storage, commit.iteration, commit.save_id, _hide)


def finish(storage: Storage) -> None:
    """Delete the files of all checkpoints whose manifests were taken away."""
    for name in storage.list(""):
        if (removed := file_names.parse_removal_name(name)) and storage.kind(name) == "file":
            _attempt(storage, *removed, _clear)


def superfluous(
    storage: Storage,
    rules: Retention,
    *,
    retain_interval: int | None,
    tracked: int | None,
    previous: int | None,
    manifests: KnownManifests | None = None,
) -> list[CommitFacts]:
    """Return the checkpoints that no rule keeps; none if there are no rules, or no tracker."""
    if tracked is None or (rules == Retention() and retain_interval is None):
        return []
    if rules == Retention():
        # The one that Megatron looks at; no need to read the others.
        directories = [] if previous is None else [file_names.iteration_dir(previous)]
    else:
        directories = storage.list("")
    commits, unreadable = survey(storage, directories, manifests)
    for iteration, error in unreadable.items():
        logger.warning(
            "retention leaves iteration %d alone: %s", iteration, for_listing(str(error))
        )
    reasons = why_kept(
        commits,
        rules,
        retain_interval=retain_interval,
        tracked=tracked,
        previous=previous,
        now=_now(),
    )
    if rules.best is not None and not any(rules.best.metric in it.metrics for it in commits):
        logger.warning(
            "no checkpoint has the metric '%s' that 'retention.best' is to rank by, so none is "
            "removed; report it with megatron_flashckpt.report_metric",
            rules.best.metric,
        )
    return [commit for commit in commits if not reasons[commit.iteration]]


def committed(storage: Storage, directories: Iterable[str]) -> list[CommitFacts]:
    """Return what is known of the checkpoints of ours in `directories`; see `survey`."""
    return survey(storage, directories)[0]


def survey(
    storage: Storage, directories: Iterable[str], manifests: KnownManifests | None = None
) -> tuple[list[CommitFacts], dict[int, FlashCkptError | OSError]]:
    """Return the checkpoints of ours in `directories`, and by iteration why one cannot be read.

    Whatever else `directories` names is passed over. Links are not followed: what they lead to is
    somebody else's. A damaged manifest is no checkpoint: it takes nobody's place, and its directory
    stays for its owner to look at.
    """
    manifests = manifests or KnownManifests()
    found = []
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
            found.append(facts)
    return found, unreadable


def _attempt(
    storage: Storage,
    iteration: int,
    save_id: str,
    step: Callable[[Storage, int, str], None],
) -> None:
    """Take a step of a removal; one that fails does not keep the others from theirs."""
    try:
        step(storage, iteration, save_id)
    except (FlashCkptError, OSError) as error:
        logger.warning("cannot remove the checkpoint of iteration %d: %s", iteration, error)


def _hide(storage: Storage, iteration: int, save_id: str) -> None:
    manifest = f"{file_names.iteration_dir(iteration)}/{file_names.MANIFEST}"
    # In one step it cannot be loaded any more, and whoever commits next knows what is left to do.
    storage.move(manifest, file_names.removal_name(iteration, save_id))
    reach("retain.hidden")


def _clear(storage: Storage, iteration: int, save_id: str) -> None:
    """Delete the files of a checkpoint whose manifest was moved away, then that manifest."""
    directory = file_names.iteration_dir(iteration)
    left = []

    def delete(path: str) -> None:
        if storage.kind(path) == "file":
            storage.delete(path)
            reach("retain.file")

    if storage.kind(directory) == "directory":
        # Only this save's: another one of the same iteration may be on its way there.
        mine = [name for name in storage.list(directory) if file_names.save_id_of(name) == save_id]
        for_all(delete, [f"{directory}/{name}" for name in mine])
        left = storage.list(directory)
        if not left:
            storage.delete_directory(directory)
    place = f"{storage.place}/{directory}"
    if left and all(name.startswith(_OPEN_ELSEWHERE) for name in left):
        if place not in _told_open:
            _told_open.add(place)
            logger.info(
                "%s: a process on some node still reads from it (%s); it is removed after a later "
                "commit",
                place,
                ", ".join(left[:_SHOWN]),
            )
        return
    foreign = [
        name for name in left if name != file_names.MANIFEST and not file_names.save_id_of(name)
    ]
    foreign = [name for name in foreign if not name.startswith(_OPEN_ELSEWHERE)]
    if foreign:
        logger.warning(
            "%s: stays without a checkpoint, because it holds what is not ours: %s",
            place,
            ", ".join(foreign[:_SHOWN]),
        )
    reach("retain.deleted")
    storage.delete(file_names.removal_name(iteration, save_id))
    logger.info("removed the checkpoint of iteration %d (save %s)", iteration, save_id)
