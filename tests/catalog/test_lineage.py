"""Rules of the lineage, one by one. `test_lineage_model` tries them in random schedules."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_flashckpt.catalog.lineage import (
    NOTHING,
    Candidate,
    Facts,
    Save,
    Tracked,
    at,
    awaited,
    choose,
    descent,
    granted,
)
from megatron_flashckpt.file_format.file_names import RELEASE, run_name, save_name
from megatron_flashckpt.file_format.run_object import FOREIGN, Ancestor

FIRST, SECOND, THIRD = (run_name(number, "aaaa") for number in (1, 2, 3))
#: SECOND has left FIRST at iteration 20.
LEFT = (Ancestor(FIRST, 20),)


def saved(run: str, iteration: int, attempt: int = 1) -> Save:
    return Save(iteration, save_name(run, iteration, attempt))


#: FIRST has saved 10 to 40 and was set back to 20, from where SECOND has saved 25 and 30.
DEAD = [saved(FIRST, 30), saved(FIRST, 40)]
PATH = [saved(FIRST, 10), saved(FIRST, 20), saved(SECOND, 25), saved(SECOND, 30)]
FACTS = Facts(
    tracker=30,
    tracked=Tracked(30, PATH[-1].save_id),
    runs={FIRST: (), SECOND: LEFT},
    stored=[*DEAD, *PATH],
    numbers=[1, 2],
)


def facts(**changes: object) -> Facts:
    return dataclasses.replace(FACTS, **changes)  # type: ignore[arg-type]


def first(**changes: object) -> Candidate | None:
    candidates = choose(facts(**changes)).candidates
    return candidates[0] if candidates else None


def in_storage(save: Save) -> Candidate:
    return Candidate(save, in_memory=False)


def test_the_newest_of_the_newest_history_comes_first_and_older_ones_replace_it() -> None:
    choice = choose(FACTS)
    assert choice.candidates == tuple(map(in_storage, reversed(PATH)))
    assert choice.wish is None


def test_a_run_that_continues_a_checkpoint_counts_before_it_has_left_one() -> None:
    assert first(stored=[*DEAD, *PATH[:2]]) == in_storage(PATH[1])


def test_a_foreign_checkpoint_takes_the_place_of_one_in_memory_also_if_it_is_damaged() -> None:
    """A load that falls back does not take what `unused` says it does not use."""
    choice = choose(facts(stored=PATH[:3], held=[PATH[3]], foreign=[30]))
    assert choice.candidates == tuple(map(in_storage, [Save(30, ""), *reversed(PATH[:3])]))
    assert list(choice.unused) == [PATH[3]]


def test_of_one_iteration_memory_comes_first() -> None:
    assert choose(facts(held=[PATH[-1]])).candidates[:2] == (
        Candidate(PATH[-1], in_memory=True),
        in_storage(PATH[-1]),
    )


def test_memory_of_another_history_is_named_with_the_reason() -> None:
    unknown = saved(THIRD, 60)
    choice = choose(facts(held=[DEAD[1], unknown]))
    assert choice.candidates[0] == in_storage(PATH[-1])
    assert "another history" in choice.unused[DEAD[1]]
    assert "does not know its run" in choice.unused[unknown]


@pytest.mark.parametrize("named", [10, 20, 25])
def test_a_tracker_that_was_set_back_excludes_all_that_is_newer(named: int) -> None:
    choice = choose(facts(tracker=named, held=[saved(SECOND, 35)]))
    assert choice.wish == named
    assert choice.candidates[0].save.iteration == named
    assert "a person wrote" in choice.unused[saved(SECOND, 35)]


def test_a_tracker_that_names_a_dead_branch_or_nothing_is_no_wish() -> None:
    assert first(tracker=40) == in_storage(PATH[-1])
    assert first(tracker=77) == in_storage(PATH[-1])
    assert first(tracker=None, tracker_is_damaged=True) == in_storage(PATH[-1])


def test_a_checkpoint_of_no_known_run_is_a_wish_until_it_was_granted() -> None:
    copied = saved(run_name(2, "ffff"), 27)
    stored = [*FACTS.stored, copied]
    choice = choose(facts(tracker=27, stored=stored, held=[saved(SECOND, 26), saved(SECOND, 35)]))
    assert choice.candidates[0] == in_storage(copied)
    assert choice.candidates[1].save == saved(SECOND, 26)  # if the copy is damaged
    assert "no run of this directory has saved" in choice.unused[saved(SECOND, 35)]
    assert first(tracker=30, stored=stored) == in_storage(PATH[-1])
    given = granted(facts(tracker=27, stored=stored), THIRD)
    assert given == Tracked(27, copied.save_id, THIRD)
    assert first(tracker=27, stored=stored, tracked=given) == in_storage(PATH[-1])


def test_a_checkpoint_that_was_put_in_the_place_of_ours_is_a_wish() -> None:
    copied = saved(run_name(2, "ffff"), 30)
    assert first(stored=[*DEAD[1:], *PATH[:3], copied], held=[PATH[-1]]) == in_storage(copied)


def test_megatrons_own_checkpoint_is_of_the_history_that_continues_it() -> None:
    foreign = Save(50, "")
    assert first(tracker=50, foreign=[50]) == in_storage(foreign)
    runs = {**FACTS.runs, THIRD: descent(foreign, ())}
    assert runs[THIRD] == (Ancestor(FOREIGN, 50),)
    own = saved(THIRD, 60)
    assert first(tracker=50, foreign=[50], runs=runs, stored=[*PATH, own]) == in_storage(own)
    assert first(tracker=50, foreign=[45, 50], runs=runs) == in_storage(foreign)


def test_a_release_is_a_wish_and_has_no_other_history() -> None:
    weights = Save(RELEASE, PATH[1].save_id)
    stored = [*FACTS.stored, weights]
    choice = choose(facts(tracker=RELEASE, stored=stored, held=[PATH[-1]]))
    assert choice.candidates == (in_storage(weights),)
    assert first(stored=stored) == in_storage(PATH[-1])
    runs = {**FACTS.runs, THIRD: descent(weights, ())}
    own = saved(THIRD, 5)
    choice = choose(facts(tracker=RELEASE, runs=runs, stored=[*stored, own]))
    assert choice.candidates == (in_storage(own), in_storage(weights))


def test_a_removed_tracker_means_from_scratch_and_a_new_one_counts_anew() -> None:
    choice = choose(facts(tracker=None, held=[PATH[-1]]))
    assert (choice.candidates, choice.removed) == ((), True)
    assert "the tracker was removed" in choice.unused[PATH[-1]]
    scratch = granted(facts(tracker=None), THIRD)
    assert scratch == Tracked(NOTHING, THIRD)
    begun = {"tracker": None, "tracked": scratch, "runs": {**FACTS.runs, THIRD: ()}}
    assert first(**begun) is None
    own = saved(THIRD, 5)
    assert first(**begun, held=[own]) == Candidate(own, in_memory=True)
    again = {**begun, "tracker": 40}
    assert first(**again, held=[own]) == in_storage(DEAD[1])


def test_a_step_means_the_checkpoint_of_the_newest_history_or_else_the_latest() -> None:
    assert at(FACTS, 30) == PATH[-1]
    assert at(FACTS, 40) == DEAD[1]
    again = saved(FIRST, 40, attempt=2)
    assert at(facts(stored=[*DEAD, again]), 40) == again
    assert at(FACTS, 77) is None
    unknown = saved(THIRD, 30)
    assert at(facts(stored=[*PATH, unknown]), 30) == PATH[-1], "no run of this directory made it"


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({}, None),
        ({"tracker": 50}, "the checkpoint of iteration 50"),
        ({"tracker": 25}, "the tracker to name what its twin does"),
        ({"tracked": None}, "the tracker to name what its twin does"),
        ({"tracker": None}, "the tracker, which an agent has written"),
        # Run 3 began from scratch and left nothing; the object of run 4 shows that.
        ({"numbers": [1, 2, 4], "runs": {**FACTS.runs, run_name(4, "aaaa"): ()}}, "a run below"),
        # A save shows a run whose object is not seen yet.
        ({"stored": [*FACTS.stored, saved(THIRD, 50)]}, "the object of a run"),
        # Runs below the newest history decide nothing.
        ({"numbers": [2]}, None),
        ({"stored": [*FACTS.stored, saved(run_name(10**17, "aaaa"), 50)]}, "the object of a run"),
    ],
)
def test_a_load_knows_what_it_does_not_see(changes: dict[str, object], missing: str | None) -> None:
    reason = awaited(facts(**changes))
    assert reason is missing or (missing is not None and missing in str(reason))
