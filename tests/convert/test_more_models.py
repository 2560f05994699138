"""Conversion of less common models and optimizers, with training in real Megatron.

Three launched jobs train all cases in turn. Stock trains 6 iterations and saves every second. Ours
resumes from stock's converted iteration 2. Stock resumes from our iteration 4, converted back.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_flashckpt.convert.common.contents import Contents
from megatron_flashckpt.convert.common.former_export import MARKER
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import convert, open_source
from megatron_flashckpt.convert.readers import dp_reshardable
from megatron_flashckpt.errors import CorruptCheckpointError, FlashCkptError, UnsupportedError
from tests.convert.made import differing
from tests.integration.flag_runs import Job, JobResult, run_jobs
from tests.support import megatron_jobs

BF16 = "--bf16 --train-iters 6"
ADAM = "--use-distributed-optimizer"
RESHARDABLE = f"{ADAM} --dist-ckpt-optim-fully-reshardable"
PP2 = "--pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"
UNTIED = "--untie-embeddings-and-output-weights"
BUCKETS = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
DECOUPLED, MUP = " ".join(megatron_jobs.DECOUPLED), " ".join(megatron_jobs.MUP)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--disable-bias-linear --swiglu --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model or optimizer."""

    flags: str
    format: str = "torch_dist"
    """Format in which stock saves."""
    back: str = "torch_dist"
    """Format in which stock gets our checkpoint."""
    stand_in: str = ""
    """One of `tests/support/jobs/stand_ins.py`."""

    def stand_in_of(self, entry_point: str) -> str:
        """Return the stand-in: stock 0.17.1 mixes up groups that differ in their rates alone."""
        has_rates = DECOUPLED in self.flags or MUP in self.flags
        return "group_marks" if has_rates and entry_point == "stock" else self.stand_in


CASES = {
    # A list of layers with experts makes Megatron number all layers in keys.
    "experts-tp2-ep2-etp1-numbered-layers": Case(
        f"{BF16} {ADAM} --num-layers 2 {TP2} --sequence-parallel {EXPERTS} --moe-layer-freq ([1]*2)"
        " --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
    ),
    "mtp-experts-pp2": Case(
        f"{BF16} {RESHARDABLE} --num-layers 2 {PP2} {UNTIED} "
        f"--mtp-num-layers 1 --position-embedding-type rope {EXPERTS}"
    ),
    "one-query-group-tp2-vocabulary": Case(
        f"{BF16} {ADAM} --num-layers 2 {TP2} --num-attention-heads 4 --group-query-attention "
        f"--num-query-groups 1 --swiglu --vocab-size 300 {UNTIED}"
    ),
    "fp16-dp2": Case(f"--fp16 --train-iters 6 {ADAM} --initial-loss-scale 4096"),
    # Stock 0.17.1 does not load its own torch_dist of SGD.
    "sgd-dp2": Case(f"{BF16} --optimizer sgd", back="torch"),
    "random-init-dp2": Case(f"{BF16} {RESHARDABLE} --data-parallel-random-init"),
    "instances": Case(
        f"{BF16} {ADAM} --num-distributed-optimizer-instances 2 --overlap-grad-reduce"
    ),
    "muon": Case(f"{BF16} --optimizer muon", stand_in="emerging"),
    # Stages differ: both have a bucket for the embedding, and the first stage has more buckets.
    "rates-tied-pp2-buckets": Case(
        f"{BF16} {ADAM} --num-layers 4 {PP2} --swiglu {BUCKETS} {DECOUPLED}"
    ),
    "rates-experts-ep2-buckets": Case(
        f"{BF16} {ADAM} --num-layers 2 {EP2} {EXPERTS} {DECOUPLED} {MUP}"
    ),
    "rates-plain-tp2": Case(f"{BF16} --num-layers 2 {TP2} {UNTIED} {DECOUPLED} {MUP}"),
    "fp32-pp2": Case(f"--train-iters 6 --num-layers 2 {PP2} {MUP}"),
    "rates-buckets-legacy": Case(
        f"{BF16} {ADAM} --num-layers 2 --swiglu {UNTIED} {BUCKETS} {DECOUPLED}", "torch", "torch"
    ),
    "rates-tied-pp2-plain-legacy": Case(
        f"{BF16} --num-layers 2 {PP2} --swiglu {DECOUPLED} {MUP}", "torch", "torch"
    ),
    "rates-experts-ep2-legacy": Case(
        f"{BF16} {ADAM} --num-layers 2 {EP2} {EXPERTS} {UNTIED} {DECOUPLED} {MUP}",
        *("torch", "torch"),
    ),
}
LEGACY = [name for name in CASES if name.endswith("legacy")]
SAVES = "--save {save} --save-interval 2"
#: TransformerEngine's optimizer keeps only the low halves of masters, which no format converts.
AWARE = f"--bf16 --train-iters 2 {ADAM} --use-precision-aware-optimizer"
LOW_HALVES = r"low halves .*--weights-only"
#: Flags, format and stand-in of jobs of stock whose optimizer state is refused; the reason.
REFUSED = {
    "aware-torch-dist": (AWARE, "torch_dist", "fused_adam", LOW_HALVES),
    "aware-reshardable": (
        f"{AWARE} --dist-ckpt-optim-fully-reshardable",
        *("torch_dist", "fused_adam", LOW_HALVES),
    ),
    "aware-torch": (AWARE, "torch", "fused_adam", LOW_HALVES),
    "muon-torch": (
        *("--bf16 --train-iters 2 --optimizer muon", "torch", "emerging"),
        "has the state of 2 optimizers, expected 1 by the args; .*--weights-only",
    ),
}


class Runs:
    """All jobs, and the conversions between them."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.a = self._run("a", dict.fromkeys(CASES, ""), "stock", lambda case: case.format)
        self.errors: dict[tuple[str, str], Exception] = {}
        loads = {name: self._converted("a", name, 2, "flashckpt") for name in CASES}
        self.b = self._run("b", loads, "ours", lambda case: "torch_dist")
        loads = {name: self._converted("b", name, 4, CASES[name].back) for name in CASES}
        self.c = self._run("c", loads, "stock", lambda case: case.back)

    def save(self, job: str, name: str) -> Path:
        if job in "abc":
            return self.where / job / ("ours" if job == "b" else "stock") / name
        return self.where / job / name

    def contents(self, job: str, name: str, iteration: int) -> Contents:
        return open_source(self.save(job, name), iteration, Options()).contents

    def _converted(self, job: str, name: str, iteration: int, to: str) -> str:
        destination = self.where / f"{job}-{to}" / name
        try:
            opened = open_source(self.save(job, name), iteration, Options())
            convert(opened, destination, to, Options())
        except Exception as error:
            self.errors[job, name] = error
        return f"--load {destination}"

    def _run(
        self,
        job: str,
        loads: dict[str, str],
        entry_point: str,
        format_of: Callable[[Case], str],
    ) -> dict[str, JobResult]:
        jobs = [
            Job(
                name,
                f"{case.flags} --ckpt-format {format_of(case)} {SAVES} {loads[name]}",
                entry_points=(entry_point,),
                options={"stand_in": case.stand_in_of(entry_point)},
            )
            for name, case in CASES.items()
        ]
        if job == "a":
            jobs += [
                Job(
                    name,
                    f"{flags} --ckpt-format {fmt} {SAVES}",
                    entry_points=("stock",),
                    options={"stand_in": stand_in},
                )
                for name, (flags, fmt, stand_in, _) in REFUSED.items()
            ]
        (self.where / job).mkdir()
        done = run_jobs(self.where / job, jobs, ranks=2, torchrun=False)
        return {name: next(iter(results.values())) for name, results in done.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("more"))


def groups(contents: Contents) -> list[dict]:
    return [group for entry in contents.optimizer or [] for group in entry["param_groups"]]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("job", ["b", "c"])
def test_training_continues_bit_for_bit_after_conversions(runs: Runs, job: str, name: str) -> None:
    whole, later = runs.a[name], getattr(runs, job)[name]
    assert whole.ended == "end", whole.output[-3000:]
    before = {"b": "a", "c": "b"}[job]
    if (before, name) in runs.errors:
        raise runs.errors[before, name]
    assert later.ended == "end", (later.ended, later.output[-3000:])
    first = 4 if job == "c" else 2
    assert later.iteration == first
    assert later.losses == [loss for loss in whole.losses if loss[0] > first]
    stock, other = runs.contents("a", name, 6), runs.contents(job, name, 6)
    assert differing(stock.tensors, other.tensors) == []
    assert groups(other) == groups(stock)
    if name.startswith("rates"):  # otherwise a mistake in their assignment could go unnoticed
        rates = {(group["max_lr"], group["wd_mult"], group["eps"]) for group in groups(stock)}
        assert len(rates) >= 3


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("to", ["flashckpt", "torch_dist", "torch"])
def test_optimizer_state_without_whole_masters_or_places_is_refused_with_the_reason(
    runs: Runs, tmp_path: Path, name: str, to: str
) -> None:
    assert runs.a[name].ended == "end", runs.a[name].output[-3000:]
    save = runs.save("a", name)
    with pytest.raises(FlashCkptError, match=REFUSED[name][-1]):
        convert(open_source(save, 2, Options()), tmp_path / "result", to, Options())
    assert not list(tmp_path.rglob("iter_*"))
    options = Options(weights_only=True)
    convert(open_source(save, 2, options), tmp_path / "weights", to, options)


def test_the_optimizers_of_muon_are_not_written_in_the_legacy_format(
    runs: Runs, tmp_path: Path
) -> None:
    source = open_source(runs.save("b", "muon"), 4, Options())
    with pytest.raises(UnsupportedError, match=r"--optimizer muon divides .*--weights-only"):
        convert(source, tmp_path, "torch", Options())
    assert not list(tmp_path.rglob("iter_*"))


# ---------------------------------------------------------------------- stock's own formats


def test_a_shifted_bucket_is_refused(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranges are shifted by one element, as by another alignment."""
    real_ranges = dp_reshardable._ranges

    def shifted(reader, name):
        read = real_ranges(reader, name)
        (numel,) = reader.tensors[name].shape
        return lambda start, end: read(min(start + 1, numel - end + start), min(end + 1, numel))

    monkeypatch.setattr(dp_reshardable, "_ranges", shifted)
    with pytest.raises(CorruptCheckpointError, match="differ from the rounded masters"):
        runs.contents("a", "rates-tied-pp2-buckets", 2)


@pytest.mark.parametrize("name", LEGACY)
def test_our_legacy_files_equal_megatrons_files(runs: Runs, name: str) -> None:
    """Every entry of every file of the iteration is equal bit for bit."""
    written, stocks = (runs.save(job, name) / "iter_0000004" for job in ("b-torch", "a"))
    names = sorted(path.relative_to(stocks) for path in stocks.rglob("*.pt"))
    assert names == sorted(
        path.relative_to(written)
        for path in written.rglob("*")
        if path.is_file() and path.name != MARKER
    )
    for file in names:
        ours, expected = (torch.load(d / file, weights_only=False) for d in (written, stocks))
        assert differences(ours, expected, str(file)) == []


#: Args in which the two jobs may differ: those about the start of the job, and about the rank
#: (our format keeps the args of rank 0).
IGNORED = re.compile(
    r".*/args/(save|load|rank|local_rank|iteration|num_floating_point_operations_so_far)"
    # Only legacy files keep this per data-parallel rank; Megatron's other formats have one.
    r"|.*/mp_rank_00_001/.*/rng_tracker_states/expert-parallel-rng"
)


def differences(one: object, other: object, path: str) -> list[str]:
    if isinstance(one, argparse.Namespace) and isinstance(other, argparse.Namespace):
        one, other = vars(one), vars(other)
    if isinstance(one, dict) and isinstance(other, dict):
        paths = [f"{path}/{key}" for key in one.keys() ^ other.keys()]
        for key in one.keys() & other.keys():
            paths += differences(one[key], other[key], f"{path}/{key}")
        return paths
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = zip(one, other, strict=True)
        return [line for n, pair in enumerate(pairs) for line in differences(*pair, f"{path}/{n}")]
    same = megatron_jobs.same(one, other) or IGNORED.fullmatch(f"/{path}")
    return [] if same else [path]
