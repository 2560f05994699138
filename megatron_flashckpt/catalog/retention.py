"""Retention: the pure rules by which committed checkpoints stay; `agent.janitor` removes the rest.

No state is kept between commits, so a restart, another agent or another node decides in the same
way. Only whole checkpoints of the newest history count for a rule; see `lineage`.

No clock is read, and no times of two hosts are compared: the age of a checkpoint is the time for
which the runs of the history have trained since, as each of them has measured it. Time in which no
run trained makes nothing older.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable

from megatron_flashckpt.catalog.lineage import History, Save
from megatron_flashckpt.config import Best, Retention
from megatron_flashckpt.file_format.file_names import run_number, run_of
from megatron_flashckpt.file_format.manifest import CommitFacts

_NO_RULE = "no rule against it"
_DUE = "its command 'agent.on_durable' has not ended"


@dataclasses.dataclass(frozen=True)
class Stored:
    """A committed checkpoint in storage."""

    facts: CommitFacts
    is_whole: bool = True
    """True if a listing showed every file with its size."""
    has_shards: bool = True
    """False: an agent that woke up late has put the end of a save that was removed before."""
    is_due: bool = False
    """The command `agent.on_durable` has not ended for this checkpoint."""

    @property
    def save(self) -> Save:
        return Save(self.facts.iteration, self.facts.save_id)


def newest_of(stored: Collection[Stored], history: History) -> int:
    """Return the iteration of the newest whole checkpoint of a history; -1: there is none."""
    return max(_counting(stored, history), default=-1)


def why_each_is_kept(
    stored: Collection[Stored],
    history: History,
    rules: Retention,
    *,
    retain_interval: int | None,
    tracked: int,
    previous: int | None,
) -> dict[Save, list[str]]:
    """Return for each checkpoint in storage what keeps it; without a reason it may be removed.

    A checkpoint of an earlier run that is not of the history, or one that lacks files, stays until
    the history has passed it. Then it stays if a rule keeps it by its own facts: it is none of the
    `latest` and `best` ones.

    Args:
        history: of the newest run.
        retain_interval, tracked, previous: see `why_kept`.
    """
    counting = _counting(stored, history)
    newest = max(counting, default=-1)
    commits = [checkpoint.facts for checkpoint in counting.values()]
    by_rules = why_kept(
        commits,
        rules,
        retain_interval=retain_interval,
        tracked=tracked,
        previous=previous,
    )
    ages = _ages(commits)
    all_count_as_best = rules.best is not None and not _measured(commits, rules.best)

    def reasons(checkpoint: Stored) -> list[str]:
        iteration = checkpoint.save.iteration
        if checkpoint is counting.get(iteration):
            return by_rules[iteration]
        if run_number(checkpoint.save.run) > run_number(history.run):
            return ["of a later run"]
        if iteration in counting:  # a load takes the other one
            return []
        if iteration >= newest:
            return ["not passed by the newest run"]
        found = ["tracker"] if iteration == tracked else []
        if not checkpoint.has_shards:
            return found
        if rules == Retention():
            return [*found, _NO_RULE]
        if checkpoint.is_whole:
            # It is at least as old as the checkpoints that were begun later.
            name = checkpoint.save.order[1]
            later = (number for number, other in counting.items() if other.save.order[1] > name)
            age_s = max(map(ages.__getitem__, later), default=0.0)
            found += _by_own_facts(checkpoint.facts, rules, retain_interval, age_s)
            if rules.best is not None and all_count_as_best:
                found.append(_unmeasured(rules.best))
        return found

    return {
        checkpoint.save: [*reasons(checkpoint), *([_DUE] if checkpoint.is_due else [])]
        for checkpoint in stored
    }


def _counting(stored: Collection[Stored], history: History) -> dict[int, Stored]:
    """Return by iteration the whole checkpoints of a history; of two the later one counts."""
    ascending = sorted(stored, key=lambda checkpoint: checkpoint.save.order)
    return {
        checkpoint.save.iteration: checkpoint
        for checkpoint in ascending
        if checkpoint.is_whole and history.holds(checkpoint.save)
    }


def _ages(commits: Iterable[CommitFacts]) -> dict[int, float]:
    """Return for each iteration for how many seconds its history has trained since, at least.

    Another agent of a run begins to count anew, and a checkpoint may have no time.
    """
    ages: dict[int, float] = {}
    age_s = 0.0
    #: The time of the nearest later checkpoint, until the start of its run is reached.
    run, left_s = "", 0.0
    for commit in sorted(commits, key=lambda commit: -commit.iteration):
        if run_of(commit.save_id) != run:
            age_s += left_s
            run, left_s = run_of(commit.save_id), 0.0
        if commit.trained_s is not None:
            age_s += max(left_s - commit.trained_s, 0.0)
            left_s = commit.trained_s
        ages[commit.iteration] = age_s
    return ages


def why_kept(
    commits: Iterable[CommitFacts],
    rules: Retention,
    *,
    retain_interval: int | None,
    tracked: int,
    previous: int | None,
) -> dict[int, list[str]]:
    """Return by iteration the rules that keep it; a checkpoint without a rule may be removed.

    Args:
        commits: the whole checkpoints of the newest history.
        retain_interval: Megatron's `--save-retain-interval`; alone it removes only `previous`.
        tracked: iteration that the tracker names: the last durable one.
        previous: iteration that the tracker has passed with the last commit; None: none.
    """
    newest_first = sorted(commits, key=lambda commit: -commit.iteration)
    reasons: dict[int, list[str]] = {commit.iteration: [] for commit in newest_first}

    def keep(reason: str, wanted: Callable[[CommitFacts], bool]) -> None:
        for commit in filter(wanted, newest_first):
            reasons[commit.iteration].append(reason)

    keep("tracker", lambda facts: facts.iteration == tracked)
    # The tracker may be set back, or may not have moved yet.
    keep("newer", lambda facts: facts.iteration > tracked)
    if rules == Retention():
        keep(_NO_RULE, lambda facts: not retain_interval or facts.iteration != previous)
    past = [commit for commit in newest_first if commit.iteration <= tracked]
    if rules != Retention() and past and past[0].iteration != tracked:
        # The tracker names a checkpoint that is missing, damaged or not ours; a load falls back.
        keep("newest below the tracker", lambda facts: facts is past[0])
    if rules.latest is not None:
        latest = past[: rules.latest]
        keep(f"latest {rules.latest}", lambda facts: facts in latest)
    if rules.best is not None:
        reason, best = _best(past, rules.best)
        keep(reason, lambda facts: facts in best)
    ages = _ages(newest_first)
    for commit in newest_first:
        age_s = ages[commit.iteration]
        reasons[commit.iteration] += _by_own_facts(commit, rules, retain_interval, age_s)
    return reasons


def _by_own_facts(
    facts: CommitFacts, rules: Retention, retain_interval: int | None, age_s: float
) -> list[str]:
    """Return the rules that keep a checkpoint, whatever other checkpoints there are."""
    reasons = []
    if retain_interval is not None and facts.iteration % retain_interval == 0:
        reasons.append(f"retain interval {retain_interval}")
    if rules.every is not None and facts.iteration % rules.every == 0:
        reasons.append(f"every {rules.every}")
    if (hours := rules.max_age_hours) is not None and age_s < 3600 * hours:
        reasons.append(f"age below {hours:g} h")
    return reasons


def _measured(commits: Iterable[CommitFacts], rule: Best) -> list[CommitFacts]:
    return [commit for commit in commits if rule.metric in commit.metrics]


def _unmeasured(rule: Best) -> str:
    """Return the reason that keeps all: a misspelled metric must not remove all checkpoints."""
    return f"none has metric '{rule.metric}'"


def _best(past: list[CommitFacts], rule: Best) -> tuple[str, list[CommitFacts]]:
    """Return a name of the rule, and the checkpoints of `past` (newest first) that it keeps."""
    sign = 1 if rule.mode == "min" else -1
    measured = _measured(past, rule)
    if not measured:
        return _unmeasured(rule), past
    measured.sort(key=lambda commit: sign * commit.metrics[rule.metric])
    return f"best {rule.keep} by '{rule.metric}'", measured[: rule.keep]
