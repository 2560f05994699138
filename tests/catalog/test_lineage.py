"""Rules of the lineage that `test_lineage_model` does not try in its random schedules."""

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
from megatron_flashckpt.file_format.file_names import run_name, save_name
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


def in_storage(save: Save) -> Candidate:
    return Candidate(save, in_memory=False)


def test_a_foreign_checkpoint_takes_the_place_of_one_in_memory_also_if_it_is_damaged() -> None:
    """A load that falls back does not take what `unused` says it does not use."""
    choice = choose(facts(stored=PATH[:3], held=[PATH[3]], foreign=[30]))
    assert choice.candidates == tuple(map(in_storage, [Save(30, ""), *reversed(PATH[:3])]))
    assert list(choice.unused) == [PATH[3]]


def test_the_newest_checkpoint_comes_first_and_of_one_iteration_memory() -> None:
    """Memory may hold the parts of all ranks of an older save only, after a node was replaced."""
    assert choose(facts(held=[PATH[1], PATH[3]])).candidates == (
        Candidate(PATH[3], in_memory=True),
        in_storage(PATH[3]),
        in_storage(PATH[2]),
        Candidate(PATH[1], in_memory=True),
        in_storage(PATH[1]),
        in_storage(PATH[0]),
    )


def test_a_damaged_tracker_is_nobody_s_wish() -> None:
    choice = choose(facts(tracker=None, tracker_is_damaged=True))
    assert choice.candidates[0] == in_storage(PATH[-1])


NEWER = saved(SECOND, 35)
COPIED = saved(run_name(2, "ffff"), 27)


@pytest.mark.parametrize(
    ("changes", "held", "reason"),
    [
        ({}, DEAD[1], "another history"),
        ({}, saved(THIRD, 60), "does not know its run"),
        ({"tracker": 25}, NEWER, "a person wrote"),
        ({"tracker": 27, "stored": [*PATH, COPIED]}, NEWER, "no run of this directory has saved"),
        ({"tracker": None}, NEWER, "the tracker was removed"),
    ],
)
def test_memory_that_is_not_used_is_named_with_the_reason(
    changes: dict[str, object], held: Save, reason: str
) -> None:
    choice = choose(facts(**changes, held=[held]))
    assert reason in choice.unused[held]
    assert all(not candidate.in_memory for candidate in choice.candidates)


def test_a_copied_checkpoint_is_a_wish_until_it_was_granted() -> None:
    stored = [*FACTS.stored, COPIED]
    choice = choose(facts(tracker=27, stored=stored, held=[saved(SECOND, 26)]))
    assert [save for save, _ in choice.candidates[:2]] == [COPIED, saved(SECOND, 26)]
    given = granted(facts(tracker=27, stored=stored), THIRD)
    assert given == Tracked(27, COPIED.save_id, THIRD)
    assert choose(facts(tracker=27, stored=stored, tracked=given)).candidates[0].save == PATH[-1]


def test_a_wish_for_a_save_of_an_older_run_has_the_history_of_that_run() -> None:
    """A person wrote the tracker after a run had begun without one."""
    choice = choose(facts(tracker=20, tracked=Tracked(NOTHING, THIRD)))
    assert choice.candidates == (in_storage(PATH[1]), in_storage(PATH[0]))


def test_megatrons_own_checkpoint_is_of_the_history_that_continues_it() -> None:
    foreign, own = Save(50, ""), saved(THIRD, 60)
    runs = {**FACTS.runs, THIRD: descent(foreign, ())}
    assert runs[THIRD] == (Ancestor(FOREIGN, 50),)
    for changes, first in (
        ({"foreign": [50]}, foreign),
        ({"foreign": [50], "runs": runs, "stored": [*PATH, own]}, own),
        ({"foreign": [45, 50], "runs": runs}, foreign),
    ):
        assert choose(facts(tracker=50, **changes)).candidates[0] == in_storage(first)


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
