"""Retention: the pure rules that keep checkpoints, of the newest history and of others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flashckpt.catalog.lineage import History, Save
from megatron_flashckpt.catalog.retention import (
    Stored,
    why_each_is_kept,
    why_kept,
)
from megatron_flashckpt.config import Best, Retention
from megatron_flashckpt.file_format.file_names import run_name, save_name
from megatron_flashckpt.file_format.manifest import CommitFacts
from megatron_flashckpt.file_format.run_object import Ancestor

LOSS = "lm loss validation"
HOUR = 3600.0
#: Run 2 resumed from iteration 20 of run 1, and run 3 from iteration 30 of run 2.
RUNS = {number: run_name(number, "abcd") for number in range(1, 5)}
NEWEST = History(RUNS[3], (Ancestor(RUNS[2], 30), Ancestor(RUNS[1], 20)))


def kept_by(rules: Retention, losses: dict[int, float | None], **more: object) -> list[int]:
    """Return the kept checkpoints of these losses; their commits are one hour apart."""
    commits = [
        CommitFacts(
            iteration=iteration,
            save_id=save_name(RUNS[1], iteration),
            trained_s=HOUR * n,
            metrics={} if loss is None else {LOSS: loss},
        )
        for n, (iteration, loss) in enumerate(sorted(losses.items()))
    ]
    situation = {"retain_interval": None, "tracked": max(losses), "previous": None, **more}
    reasons = why_kept(commits, rules, **situation)
    return sorted(iteration for iteration, why in reasons.items() if why)


TEN = dict.fromkeys(range(10, 110, 10))
MEASURED = {10: 3.0, 20: 1.0, 30: 2.0, 40: None, 50: 1.0, 60: 9.0}


@pytest.mark.parametrize(
    ("rules", "losses", "kept"),
    [
        (Retention(), TEN, list(TEN)),
        (Retention(latest=1), TEN, [100]),
        (Retention(latest=3), TEN, [80, 90, 100]),
        (Retention(latest=99), TEN, list(TEN)),
        (Retention(every=30), TEN, [30, 60, 90, 100]),
        (Retention(every=30, latest=2), TEN, [30, 60, 90, 100]),
        (Retention(every=50, latest=2), TEN, [50, 90, 100]),
        (Retention(max_age_hours=2.5), TEN, [80, 90, 100]),
        (Retention(max_age_hours=0), TEN, [100]),
        (Retention(max_age_hours=2.5, every=40), TEN, [40, 80, 90, 100]),
        # The newest of equal losses is kept.
        (Retention(best=Best(metric=LOSS)), MEASURED, [50, 60]),
        (Retention(best=Best(metric=LOSS, keep=3)), MEASURED, [20, 30, 50, 60]),
        (Retention(best=Best(metric=LOSS, keep=2, mode="max")), MEASURED, [10, 60]),
        (Retention(best=Best(metric=LOSS), latest=2, every=10), MEASURED, list(MEASURED)),
        (Retention(best=Best(metric="never reported")), MEASURED, list(MEASURED)),
    ],
)
def test_a_checkpoint_stays_if_any_rule_keeps_it(
    rules: Retention, losses: dict[int, float | None], kept: list[int]
) -> None:
    assert kept_by(rules, losses) == kept


def test_without_rules_megatrons_interval_removes_only_the_previous_checkpoint() -> None:
    assert kept_by(Retention(), TEN, retain_interval=20, previous=90) == sorted({*TEN} - {90})
    assert kept_by(Retention(), TEN, retain_interval=30, previous=90) == list(TEN)
    assert kept_by(Retention(latest=1), TEN, retain_interval=40, previous=90) == [40, 80, 100]


def kept_by_age(hours: float, *commits: tuple[int, float | None]) -> list[int]:
    """Return which of some commits a rule keeps; each has its run and hours, or no hours."""
    facts = [
        CommitFacts(
            iteration=iteration,
            save_id=save_name(RUNS[run], iteration),
            trained_s=None if trained is None else HOUR * trained,
        )
        for iteration, (run, trained) in enumerate(commits, 1)
    ]
    rules = Retention(max_age_hours=hours)
    reasons = why_kept(facts, rules, retain_interval=None, tracked=len(facts), previous=None)
    return [iteration for iteration, why in reasons.items() if f"age below {hours:g} h" in why]


def test_the_age_of_a_checkpoint_is_the_time_that_its_history_has_trained_since() -> None:
    runs = ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (4, 1))
    ages = (5, 4, 3, 2, 1, 0)
    for number, age in enumerate(ages, 1):
        assert number not in kept_by_age(age, *runs)
        assert number in kept_by_age(age + 0.01, *runs)


@pytest.mark.parametrize(
    ("hours", "commits", "kept"),
    [
        (2.5, ((1, 9), (1, 10), (1, 1), (1, 2)), [4, 3, 2, 1]),
        (2.0, ((1, 9), (1, 10), (1, 1), (1, 2)), [4, 3, 2]),
        (1.5, ((1, None), (1, None)), [2, 1]),
        (1.5, ((1, 1), (1, None), (1, 2), (1, None), (1, 3)), [5, 4, 3, 2]),
        (1.5, ((1, None), (2, 1), (2, 2)), [3, 2]),
    ],
)
def test_an_agent_that_counts_anew_and_an_unknown_age_make_no_checkpoint_older(
    hours: float, commits: tuple[tuple[int, float | None], ...], kept: list[int]
) -> None:
    assert kept_by_age(hours, *commits) == kept


RULES = st.builds(
    Retention,
    latest=st.none() | st.integers(1, 5),
    every=st.none() | st.integers(1, 5),
    best=st.none()
    | st.builds(
        Best,
        metric=st.sampled_from([LOSS, "other"]),
        keep=st.integers(1, 3),
        mode=st.sampled_from(["min", "max"]),
    ),
    max_age_hours=st.none() | st.floats(0, 20),
)


@settings(max_examples=300, deadline=None)
@given(
    rules=RULES,
    losses=st.dictionaries(st.integers(0, 30), st.none() | st.floats(-5, 5), min_size=1),
    tracked=st.integers(0, 30),
    retain_interval=st.none() | st.integers(1, 6),
    data=st.data(),
)
def test_no_rule_removes_a_checkpoint_newer_than_the_last_durable_one(
    rules: Retention,
    losses: dict[int, float | None],
    tracked: int,
    retain_interval: int | None,
    data: st.DataObject,
) -> None:
    previous = data.draw(st.none() | st.sampled_from(sorted(losses)))
    situation = {"tracked": tracked, "retain_interval": retain_interval, "previous": previous}
    kept = kept_by(rules, losses, **situation)
    gone = set(losses) - set(kept)
    assert all(iteration < tracked for iteration in gone)
    if rules == Retention():
        assert gone <= (set() if retain_interval is None else {previous})
    if rules.latest is not None:
        newest = sorted(number for number in losses if number <= tracked)[-rules.latest :]
        assert set(newest) <= set(kept)
    for interval in filter(None, (rules.every, retain_interval)):
        assert all(iteration % interval for iteration in gone)
    # A combination keeps every checkpoint that one of its rules keeps.
    for field in ("latest", "every", "best", "max_age_hours"):
        alone = Retention(**{field: getattr(rules, field)})
        if alone != Retention():
            assert set(kept_by(alone, losses, **situation)) <= set(kept)


# ---------------------------------------------------------------------- several runs


def stored(number: int, iteration: int, attempt: int = 1, **more: bool) -> Stored:
    facts = CommitFacts(
        iteration=iteration,
        save_id=save_name(RUNS[number], iteration, attempt),
        metrics={LOSS: 1.0 / iteration},
        trained_s=HOUR * iteration,
    )
    return Stored(facts, **more)


def gone_of(checkpoints: list[Stored], rules: Retention, tracked: int = 50) -> set[Save]:
    reasons = why_each_is_kept(
        checkpoints,
        NEWEST,
        rules,
        retain_interval=None,
        tracked=tracked,
        previous=None,
    )
    return {save for save, why in reasons.items() if not why}


def test_checkpoints_off_the_history_stay_until_it_has_passed_them_and_count_for_no_rule() -> None:
    history = [stored(1, 20), stored(2, 30), stored(3, 40), stored(3, 50)]
    off = [stored(1, 25), stored(2, 45), stored(2, 60)]
    best = Retention(best=Best(metric=LOSS, mode="min", keep=2))
    for rules, gone in (
        (Retention(latest=3), {history[0].save, off[0].save, off[1].save}),
        (best, {history[0].save, history[1].save, off[0].save, off[1].save}),
    ):
        assert gone_of([*history, *off], rules) == gone
        assert gone_of(off, rules) == set(), "the history has no checkpoint yet"


def test_rules_on_single_checkpoints_hold_off_the_history_too() -> None:
    """The age of such a checkpoint grows while later runs train."""
    off, first, last = stored(1, 25), stored(3, 40), stored(3, 90)
    metric = Best(metric="never reported")
    for rules in (Retention(every=25), Retention(best=metric), Retention()):
        assert off.save not in gone_of([off, first, last], rules)
    for hours, gone in ((51, set()), (50, {off.save, first.save})):
        assert gone_of([off, first, last], Retention(max_age_hours=hours), tracked=90) == gone


def test_a_checkpoint_that_was_saved_again_goes_whatever_the_rules() -> None:
    checkpoints = [stored(1, 30), stored(2, 30), stored(3, 40, 1), stored(3, 40, 2), stored(3, 50)]
    expected = {checkpoints[0].save, checkpoints[2].save}
    assert gone_of(checkpoints, Retention()) == expected
    assert gone_of(checkpoints, Retention(latest=9, every=1)) == expected
    assert gone_of(checkpoints, Retention(latest=9), tracked=30) == expected


def test_only_whole_checkpoints_count() -> None:
    broken = stored(3, 40, is_whole=False)
    checkpoints = [stored(2, 30), broken, stored(3, 50), stored(3, 60, is_whole=False)]
    assert gone_of(checkpoints, Retention(latest=2, every=20)) == {broken.save}
    assert gone_of(checkpoints, Retention(every=20), tracked=40) == set(), "a load falls back"
    assert gone_of(checkpoints, Retention()) == set(), "a person may repair it"
    late = stored(3, 40, is_whole=False, has_shards=False)
    assert gone_of([late, stored(3, 50)], Retention()) == {late.save}


def test_a_checkpoint_stays_until_its_command_has_ended() -> None:
    checkpoints = [stored(3, 30, is_due=True), stored(3, 40), stored(3, 50)]
    assert gone_of(checkpoints, Retention(latest=1)) == {checkpoints[1].save}
