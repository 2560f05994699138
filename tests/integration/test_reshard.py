"""A checkpoint of one parallel layout loads under another bit for bit, and training continues.

A cell is an ordered pair of a family's layouts, run by real Megatron on CPU ranks. In each cell:

- every global tensor that the destination saves again at once equals the source's;
- every tensor of a destination rank, duplicates included and described by Megatron's own accessors,
  equals its part of the source's tensor;
- steps, schedule, samples and random state follow Megatron's rules for a changed world;
- training continues as the source's did: the change of the masters over the next two iterations is
  compared. It differs if a loaded tensor is not the one that training uses.

`layouts.py` chooses the cells. `scripts/reshard` runs every pair.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from tests.integration.layouts import (
    AFTER,
    BEFORE,
    FAMILIES,
    GLOBAL_BATCH,
    JOBS,
    Layout,
    Pair,
    interrupted_pairs,
    layouts_of,
    pairs,
    plan,
)
from tests.support.megatron_jobs import REPO, Result, assemble, run_job, succeeded

Wholes = dict[tuple[str, str], torch.Tensor]
#: Bounds on a right load's distance from the source under another layout, which rounds otherwise: 5
#: times that of Megatron's own load. Loads without moments, with swapped ones or with a wrong step
#: are farther away.
BOUND, BOUNDS = 0.033, {"fp32": 1e-6}
MATRIX = [pair for family in FAMILIES for pair in pairs(family)]


class ReshardJobs:
    """The jobs, each run when the first of its cells is requested, and their results."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.job = functools.cache(self._job)
        self.source = functools.cache(self.saved)
        self.digest = functools.cache(self._digest)
        self.distance = functools.cache(self._distance)
        self.problems = functools.cache(self._problems)

    def _job(self, name: str) -> Result:
        job = JOBS[name]
        cases = self.tmp_path / f"{name}.json"
        cases.write_text(json.dumps(plan(job.families, self.tmp_path)))
        return run_job(
            self.tmp_path,
            name,
            [],
            ranks=job.ranks,
            entry_point="stock",
            env={
                "CASES": str(cases),
                "CPU_CUDA_STUBS": "triton apex" if job.fused_adam else "triton",
            },
            script=REPO / "tests/support/jobs/reshard_cells.py",
            timeout_s=600,
        )

    def steps(self, cell: Layout | Pair, step: str) -> list[dict]:
        """Return the trace of one kind of step on every rank, in rank order."""
        layout = cell.destination if isinstance(cell, Pair) else cell
        (job,) = [name for name, job in JOBS.items() if layout.family in job.families]
        events = self.job(job).named(cell.name)
        for event in events:
            assert event["step"] != "failed", f"rank {event['rank']}: {event['error']}"
        events_of_step = [event for event in events if event["step"] == step]
        ranks = {event["rank"] for event in events_of_step}
        if ranks != set(range(layout.world)):
            succeeded(self.job(job))  # shows the log of a failed job
            raise AssertionError(f"{cell.name}: '{step}' of ranks {sorted(ranks)} only")
        return events_of_step

    def saved(self, cell: Layout | Pair, iteration: int) -> Wholes:
        """Return the global tensors that a cell saved."""
        for event in self.steps(cell, "save"):
            assert event["errors"] == [None]
        return assemble(self.tmp_path / cell.name, iteration)

    def _digest(self, source: Layout, kind: str, key: str, *part: Any) -> str:
        """Return the digest of a part of the source's global tensor."""
        shape, offset, box_shape, start, end = part
        whole = resized(self.source(source, BEFORE)[kind, key], shape)
        box = tuple(slice(o, o + s) for o, s in zip(offset, box_shape, strict=True))
        content = whole[box].reshape(-1)[start:end].contiguous()
        return xxhash.xxh3_64_hexdigest(content.view(torch.uint8).numpy())

    def _distance(self, pair: Pair) -> float:
        """Return the relative L2 difference of the masters' change from the source's."""
        before, after = self.source(pair.source, BEFORE), self.source(pair.source, AFTER)
        other = self.saved(pair, AFTER)
        apart = change = 0.0
        stepped = "weight" if pair.source.family == "fp32" else "master"
        for name in before:
            if name[0] == stepped:
                apart += float((other[name] - after[name]).double().square().sum())
                change += float((after[name] - before[name]).double().square().sum())
        return math.sqrt(apart / change)

    def _problems(self, pair: Pair) -> list[str]:
        """Return the faults of a cell of the matrix."""
        try:
            return [
                *unequal(self, pair),
                *wrongly_held(self, pair),
                *wrong_side_state(self, pair),
                *beyond_rounding(self, pair),
            ]
        except AssertionError as error:
            return [str(error)]


def resized(whole: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return `whole` with rows cut off or zero rows appended, as vocabularies are resized."""
    if len(whole) == shape[0]:
        return whole
    missing = max(0, shape[0] - len(whole))
    return torch.cat([whole[: shape[0]], whole.new_zeros(missing, *whole.shape[1:])])


def unequal(ran: ReshardJobs, pair: Pair) -> list[str]:
    """Return global tensors that differ after the source's save, the load and the second save."""
    expected, saved = ran.source(pair.source, BEFORE), ran.saved(pair, BEFORE)
    if expected.keys() != saved.keys():
        return [f"other tensors: {sorted(expected.keys() ^ saved.keys())}"]
    changed = {name for name in saved if saved[name].shape != expected[name].shape}
    if bool(changed) != pair.resizes_vocabulary:
        return [f"of other shapes: {sorted(changed)}"]
    return [
        f"{kind}/{key} is not equal"
        for (kind, key), whole in saved.items()
        if not torch.equal(whole, resized(expected[kind, key], tuple(whole.shape)))
    ]


def wrongly_held(ran: ReshardJobs, pair: Pair) -> list[str]:
    """Return tensors that a rank holds wrongly after the load, duplicates included."""
    wrong = []
    for event in ran.steps(pair, "hold"):
        kinds = {"weight", "exp_avg", "exp_avg_sq"}
        if pair.source.family != "fp32":
            kinds.add("master")
        assert {kind for kind, *_ in event["held"]} >= kinds
        for kind, key, shape, offset, box, start, end, digest in event["held"]:
            part = (tuple(shape), tuple(offset), tuple(box), start, end)
            if ran.digest(pair.source, kind, key, *part) != digest:
                wrong.append(f"rank {event['rank']} holds a wrong {kind}/{key}")
    return wrong


def wrong_side_state(ran: ReshardJobs, pair: Pair) -> list[str]:
    """Return state other than tensors that breaks Megatron's rules for a changed world."""
    saved = [event for event in ran.steps(pair.source, "save") if event["iteration"] == BEFORE]
    # Ranks at the same coordinates have equal random state. A rank at coordinates that the source
    # lacks gets the state of the first source rank with the same first two coordinates.
    random_states = {}
    for event in saved:
        for place in (tuple(event["place"]), tuple(event["place"][:2])):
            random_states.setdefault(place, event["rng"])
    kept = pair.source.model_parallel == pair.destination.model_parallel
    wrong = []
    for event in ran.steps(pair, "load"):
        place = tuple(event["place"])
        if place not in random_states:
            place = place[:2]
        expected = {
            "iteration": BEFORE,
            "consumed": BEFORE * GLOBAL_BATCH,
            "steps": [BEFORE],
            "scheduler": saved[0]["scheduler"],
            "scalers": saved[0]["scalers"],
            # Random state belongs to coordinates in the model; under other TP or PP it is kept.
            "rng": random_states[place] if kept else event["before"]["rng"],
        }
        wrong += [
            f"rank {event['rank']}: {name} is {event[name]}, not {value}"
            for name, value in expected.items()
            if event[name] != value
        ]
    # If parameters shared a step counter, each of them would increment it.
    last = [event for event in ran.steps(pair, "save") if event["iteration"] == AFTER]
    wrong += [
        f"{AFTER} steps were counted as {event['steps']}"
        for event in last
        if event["steps"] != [AFTER]
    ]
    return [
        *wrong,
        *wrong_settings(ran, pair, "load", BEFORE),
        *wrong_settings(ran, pair, "save", AFTER),
    ]


def settings_by_key(ran: ReshardJobs, layout: Layout, iteration: int) -> dict[str, Any]:
    """Return the settings of every parameter of a source; all of its ranks must agree."""
    by_key: dict[str, Any] = {}
    for event in ran.steps(layout, "save"):
        if event["iteration"] == iteration:
            for key, (values,) in event["settings"].items():
                assert by_key.setdefault(key, values) == values
    return by_key


def wrong_settings(ran: ReshardJobs, pair: Pair, step: str, iteration: int) -> list[str]:
    """Return parameters whose settings differ from the source's at `iteration`.

    A group without parameters on its rank has the settings of any group of the source.
    """
    expected = settings_by_key(ran, pair.source, iteration)
    wrong, seen = [], set()
    for event in ran.steps(pair, step):
        if event["iteration"] != iteration:
            continue
        where = f"rank {event['rank']}, {step} at {iteration}"
        for key, of_key in event["settings"].items():
            seen.add(key)
            if of_key != [expected[key]]:
                wrong.append(f"{where}: {key} has settings {of_key}, not {expected[key]}")
        wrong += [
            f"{where}: a group without parameters has settings {values}"
            for values in event["settings_of_empty"]
            if values not in expected.values()
        ]
    return wrong + [f"{key} is in no group" for key in expected.keys() - seen]


def beyond_rounding(ran: ReshardJobs, pair: Pair) -> list[str]:
    """Return the distance of continued training from the source's if it exceeds the bound."""
    if pair.resizes_vocabulary:
        # Padding takes part in the softmax, so other padding gives another loss.
        return []
    bound = 0.0 if pair.source == pair.destination else BOUNDS.get(pair.source.family, BOUND)
    distance = ran.distance(pair)
    return [] if distance <= bound else [f"the masters' change differs by {distance:.3g}"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> ReshardJobs:
    return ReshardJobs(tmp_path_factory.mktemp("reshard"))


def names(cell: Layout | Pair) -> str:
    return cell.name


@pytest.mark.parametrize("pair", MATRIX, ids=names)
def test_cell(ran: ReshardJobs, pair: Pair) -> None:
    assert ran.problems(pair) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_at_least_three_groups_that_differ(ran: ReshardJobs, family: str) -> None:
    """With fewer groups, a load that gives two groups equal settings could go unnoticed."""
    rates = ("max_lr", "min_lr", "eps", "wd_mult")
    for layout in layouts_of(family):
        settings = settings_by_key(ran, layout, BEFORE).values()
        assert len({tuple(values[name] for name in rates) for values in settings}) >= 3


def test_destinations_start_from_other_random_states(ran: ReshardJobs) -> None:
    """With equal states, the checks of restored and of kept random state could not fail."""
    for pair in pairs("dense"):
        saved = [event["rng"] for event in ran.steps(pair.source, "save")]
        for event in ran.steps(pair, "load"):
            for generator, state in event["before"]["rng"].items():
                assert state not in [states[generator] for states in saved]


@pytest.mark.parametrize("pair", interrupted_pairs("dense"), ids=names)
def test_only_an_unchanged_layout_runs_a_step_again(ran: ReshardJobs, pair: Pair) -> None:
    """Megatron restores its rerun state only if world size, TP, PP and DP are unchanged."""
    same = pair.source.model_parallel == pair.destination.model_parallel
    for event in ran.steps(pair, "load"):
        assert event["before"]["rerun"] == "NOT_RUNNING_YET"
        assert event["rerun"] == ("WILL_RERUN_FROM_CHECKPOINT" if same else "NOT_RUNNING_YET")
