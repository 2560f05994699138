"""A checkpoint of one parallel layout loads under another bit for bit, and training continues.

A cell is an ordered pair of a family's layouts, run by real Megatron on CPU ranks. In each cell:

- every global tensor that the destination saves again at once equals the source's;
- every tensor of a destination rank, duplicates included and described by Megatron's own accessors,
  equals its part of the source's tensor;
- steps, schedule, samples and random state follow Megatron's rules for a changed world;
- training continues as the source's did. The loss alone would not reveal a wrong optimizer state,
  so the test compares the change of the masters over the next two iterations. Layouts round
  differently: Megatron's own save and load measure by how much in the same run.

`layouts.py` chooses the cells. `scripts/reshard` runs every pair and prints the tables.
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

from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.cli.plan import sizes_of
from megatron_flashckpt.layout.copies import main_kind
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.sizing import gpt_size
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.integration.layouts import (
    AFTER,
    BEFORE,
    EVERY_CELL,
    FAMILIES,
    GLOBAL_BATCH,
    JOBS,
    STOCK,
    Layout,
    Pair,
    interrupted_pairs,
    pairs,
    plan,
    rescheduled_pairs,
    spoiled_pairs,
    stock_pairs,
)
from tests.support.megatron_jobs import REPO, TINY, Result, assemble, run_job, succeeded

Wholes = dict[tuple[str, str], torch.Tensor]
#: Bound on a right load's distance from the source, in multiples of stock's own noise. Wrong loads
#: are farther away (`test_a_corrupted_state_exceeds_the_bound`).
MARGIN = 5.0
MATRIX = [pair for family in FAMILIES for pair in pairs(family)]
MEASURED = [pair for family in STOCK for pair in stock_pairs(family)]


class ReshardJobs:
    """The jobs, each run when the first of its cells is requested, and their results."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.job = functools.cache(self._job)
        self.source = functools.cache(self._source)
        self.digest = functools.cache(self._digest)
        self.figures = functools.cache(self._figures)
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

    def _source(self, layout: Layout, iteration: int) -> Wholes:
        return self.saved(layout, iteration)

    def _digest(self, source: Layout, kind: str, key: str, *part: Any) -> str:
        """Return the digest of a part of the source's global tensor."""
        shape, offset, box_shape, start, end = part
        whole = resized(self.source(source, BEFORE)[kind, key], shape)
        box = tuple(slice(o, o + s) for o, s in zip(offset, box_shape, strict=True))
        content = whole[box].reshape(-1)[start:end].contiguous()
        return xxhash.xxh3_64_hexdigest(content.view(torch.uint8).numpy())

    def losses(self, cell: Layout | Pair) -> dict[int, float]:
        """Return the loss of the global batch by iteration; every last stage has the same."""
        events = self.steps(cell, "train")
        losses_by_iteration = {e["iteration"]: e["loss"] for e in events if e["loss"] is not None}
        assert all(e["loss"] in (None, losses_by_iteration[e["iteration"]]) for e in events)
        return losses_by_iteration

    def _figures(self, pair: Pair) -> tuple[float, float]:
        """Return the distance of the next iterations from the source's.

        The first figure is the relative L2 difference of the masters' change, the second the
        largest difference of losses.
        """
        before, after = self.source(pair.source, BEFORE), self.source(pair.source, AFTER)
        other = self.saved(pair, AFTER)
        apart = change = 0.0
        stepped = "weight" if pair.source.family == "fp32" else "master"
        for name in before:
            if name[0] == stepped:
                apart += float((other[name] - after[name]).double().square().sum())
                change += float((after[name] - before[name]).double().square().sum())
        ours, expected = self.losses(pair), self.losses(pair.source)
        loss = max(abs(ours[i] - expected[i]) for i in range(BEFORE + 1, AFTER + 1))
        return math.sqrt(apart / change), loss

    def noise(self, family: str) -> tuple[float, float]:
        """Return the largest figures of stock's own loads under another layout."""
        measured = [
            self.figures(pair) for pair in stock_pairs(family if family in STOCK else "dense")
        ]
        # Losses around 6 have a resolution of 5e-7.
        return max(figure for figure, _ in measured), max(1e-6, *(loss for _, loss in measured))

    def _problems(self, pair: Pair) -> list[str]:
        """Return the faults of a cell of the matrix."""
        try:
            return [
                *unequal(self, pair),
                *wrongly_held(self, pair),
                *wrong_side_state(self, pair),
                *beyond_noise(self, pair),
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
    extra = {name: state for event in saved for name, state in event["extra"].items()}
    wrong += [
        f"rank {event['rank']}: {name} has the extra state {state}, not {extra[name]}"
        for event in ran.steps(pair, "load")
        for name, state in event["extra"].items()
        if state != extra[name]
    ]
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


def beyond_noise(ran: ReshardJobs, pair: Pair) -> list[str]:
    """Return figures of continued training that exceed stock's noise."""
    if pair.resizes_vocabulary:
        # Padding takes part in the softmax, so other padding gives another loss.
        return []
    figures = ran.figures(pair)
    if pair.source == pair.destination:
        return [] if figures == (0, 0) else [f"the same layout goes on differently: {figures}"]
    return [
        f"{name} differs by {figure:.3g}, stock's by up to {noise:.3g}"
        for name, figure, noise in zip(
            ("the masters' change", "the loss"),
            figures,
            ran.noise(pair.source.family),
            strict=True,
        )
        if not figure <= MARGIN * noise
    ]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> ReshardJobs:
    return ReshardJobs(tmp_path_factory.mktemp("reshard"))


def names(cell: Layout | Pair) -> str:
    return cell.name


@pytest.mark.parametrize("pair", MATRIX, ids=names)
def test_cell(ran: ReshardJobs, pair: Pair) -> None:
    assert ran.problems(pair) == []


@pytest.mark.parametrize("pair", MEASURED, ids=names)
def test_noise_is_measured_on_a_state_that_stock_restored_exactly(
    ran: ReshardJobs, pair: Pair
) -> None:
    assert wrongly_held(ran, pair) == []
    assert ran.figures(pair)[0] < 0.2


@pytest.mark.parametrize(
    "pair", [pair for family in STOCK for pair in spoiled_pairs(family)], ids=names
)
def test_a_corrupted_state_exceeds_the_bound(ran: ReshardJobs, pair: Pair) -> None:
    """Negative control: a silently wrong load would exceed the bound."""
    figure, _ = ran.figures(pair)
    noise, _ = ran.noise(pair.source.family)
    assert figure > MARGIN * noise > 0


@pytest.mark.parametrize(
    "layout",
    [layout for family in ("dense", "moe", "fp32") for layout in FAMILIES[family]],
    ids=names,
)
def test_flashckpt_plan_has_the_bytes_of_every_ranks_shard(
    ran: ReshardJobs, layout: Layout
) -> None:
    """Totals of a data-parallel group are exact; no rank exceeds the upper bound."""
    ran.steps(layout, "save")
    words = [*TINY, *layout.arguments]
    sizes = sizes_of(words, layout.world, None)
    args = gpt_size.parse(words)
    per_parameter, stages = gpt_size.parameter_nbytes(args), gpt_size.stages(args)
    manifest = open_checkpoint(PosixStore(ran.tmp_path / layout.name), BEFORE).manifest
    groups: dict[tuple[int, int], int] = {}
    for shard in manifest.shards:
        items = manifest.template(shard.template).items
        state = sum(
            item.numel * itemsize(item.dtype)
            for item in items
            if main_kind(item.kind) in ("weight", "master", "exp_avg", "exp_avg_sq")
        )
        assert state <= sizes.largest_nbytes
        # The rest is the header, random states and Megatron's buffers.
        assert 0 < shard.nbytes - state < 2**17
        place = (shard.coordinates.tp, shard.coordinates.pp)
        groups[place] = groups.get(place, 0) + state
    if "--num-experts" not in words:
        assert groups == {(tp, pp): stages[pp].numel * per_parameter for tp, pp in groups}
    assert sum(groups.values()) == sizes.total_nbytes


@pytest.mark.parametrize("pair", rescheduled_pairs("fp32"), ids=names)
def test_groups_with_changed_rates_are_identified_by_their_parameters(
    ran: ReshardJobs, pair: Pair
) -> None:
    """The checkpoint's rates take effect, as in Megatron."""
    before = [event["before"]["settings"] for event in ran.steps(pair, "load")]
    saved = settings_by_key(ran, pair.source, BEFORE)
    assert rates_of(before).isdisjoint(rates_of([{key: [values] for key, values in saved.items()}]))
    assert wrong_settings(ran, pair, "load", BEFORE) == []


def rates_of(settings: list[dict[str, Any]]) -> set[float]:
    return {
        values["max_lr"] for of_rank in settings for of_key in of_rank.values() for values in of_key
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_at_least_three_groups_that_differ(ran: ReshardJobs, family: str) -> None:
    """With fewer groups, a load that gives two groups equal settings could go unnoticed."""
    rates = ("max_lr", "min_lr", "eps", "wd_mult")
    for layout in FAMILIES[family]:
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


@pytest.mark.skipif(not EVERY_CELL, reason="a sample of the cells: run scripts/reshard")
def test_the_matrix(ran: ReshardJobs, capsys: pytest.CaptureFixture) -> None:
    """Print every cell as a Markdown table per family; each cell is the result of a run."""
    text = "\n\n".join(table(ran, family) for family in FAMILIES)
    with capsys.disabled():
        print(f"\n\n{text}\n")
    assert "\u2717" not in text


def table(ran: ReshardJobs, family: str) -> str:
    """Return a family's matrix in Markdown, and the distance of training from the source's."""
    layouts = FAMILIES[family]
    cells = {(pair.source, pair.destination): pair for pair in pairs(family)}
    lines = [
        "| "
        + " | ".join(
            [f"{family}: saved under \\ loaded under", *(layout.label for layout in layouts)]
        ),
        "|---" * (len(layouts) + 1),
    ]
    for source in layouts:
        ticks = [
            "\u2717" if ran.problems(cells[source, layout]) else "\u2713" for layout in layouts
        ]
        lines.append("| " + " | ".join([source.label, *ticks]))
    lines = [f"{line} |" if line.startswith("| ") else f"{line}|" for line in lines]
    valid = [
        ran.figures(pair)[0]
        for pair in cells.values()
        if pair.source != pair.destination
        and not pair.resizes_vocabulary
        and not ran.problems(pair)
    ]
    if valid:
        noise, _ = ran.noise(family)
        lines.append(
            f"\nThe change of the masters over {AFTER - BEFORE} more iterations is apart from the "
            f"source's by at most {max(valid):.2g} of it; by {noise:.2g} with Megatron's own load."
        )
    return "\n".join(lines)
