"""Megatron's flags have the same effect with us as in stock: both run in turn in one process.

Losses are compared bit for bit, as are the end of the job, the loaded iteration and the remaining
checkpoints. The final save of a resumed job must equal, element for element, the save of the job
that was never interrupted. `flag_cells.py` calls Megatron's own `pretrain` for each job. Optimizers
that need GPU packages are replaced by stand-ins with the same state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flashckpt.layout.piece import UNUSED
from tests.integration.flag_runs import (
    DIST,
    ENTRY_POINTS,
    EVERY_2,
    TORCH,
    Job,
    Runs,
    assert_equal_ends,
    assert_nothing_lost,
    resumed,
    run_jobs,
)
from tests.support.megatron_jobs import assemble, committed, tensors

#: Multi-token prediction with tied embeddings.
_MTP = f"{TORCH} --num-layers 2 --mtp-num-layers 1 --position-embedding-type rope"
#: Each job comes with `NAME-2`, which resumes from the middle of NAME.
_SHARDED = f"{DIST} --use-distributed-optimizer"
_AWARE = f"{_SHARDED} --use-precision-aware-optimizer"
_OFFLOAD = (
    f"{_AWARE} --optimizer-cpu-offload --optimizer-offload-fraction 0.5 "
    "--overlap-cpu-optimizer-d2h-h2d"
)
_NON_PERSISTENT = (
    f"{DIST} --train-iters 6 --save-interval 3 --non-persistent-save-interval 1 "
    "--non-persistent-ckpt-type global"
)
#: After a resume, stock trains differently from the uninterrupted job; ours must not.
STOCK_LOSES = ("offload",)
#: Stock does not resume these jobs.
STOCK_FAILS = ("sgd-without-momentum",)
RESUMED = [
    *resumed("whole", TORCH),
    *resumed("fp32", "--train-iters 4 --ckpt-format torch"),
    # A scale of 2^32 overflows: steps are skipped until the scale is low enough.
    *resumed("fp16", "--fp16 --train-iters 4 --ckpt-format torch --loss-scale-window 2"),
    *resumed("sgd-without-momentum", f"{DIST} --optimizer sgd --sgd-momentum 0.0"),
    *resumed("async", f"{DIST} --async-save --use-persistent-ckpt-worker --async-strategy mcore"),
    *resumed("no-save-rng", f"{DIST} --no-save-rng"),
    *resumed("inference-rng-tracker", f"{DIST} --inference-rng-tracker"),
    *resumed("lion", f"{DIST} --optimizer muon --muon-scalar-optimizer lion", stand_in="emerging"),
    *resumed("aware", _AWARE, stand_in="fused_adam"),
    *resumed("aware-bf16", f"{_AWARE} --exp-avg-dtype bf16", stand_in="fused_adam"),
    *resumed("offload", _OFFLOAD, stand_in="devices"),
]
RESUMED_BY_2 = [
    *resumed("overlap", f"{_SHARDED} --overlap-grad-reduce --overlap-param-gather"),
    # Megatron's own sharded state dict cannot list this model.
    *resumed("mtp", f"{_MTP} --pipeline-model-parallel-size 2"),
    # Local attention refuses context parallelism, so only the process groups are those of CP2.
    *resumed(
        "context-parallel",
        f"{_SHARDED} --context-parallel-size 2",
        attributes={"context_parallel_size": 1},
    ),
    *resumed("two-instances", f"{_SHARDED} --num-distributed-optimizer-instances 2"),
    *resumed(
        "dist-muon",
        f"{DIST} --num-layers 2 --num-experts 4 --moe-router-topk 2 --disable-bias-linear "
        "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 "
        "--optimizer dist_muon",
        stand_in="emerging",
    ),
]
#: Jobs that load the save of `mtp` under other stages, and save it unchanged.
_AS_IT_IS = "--save {save} --save-interval 3"
OTHER_STAGES = [
    Job("mtp-one-stage", f"{_MTP} --load {{mtp}} {_AS_IT_IS}", entry_points=("ours",)),
    Job(
        "mtp-two-stages",
        f"{_MTP} --pipeline-model-parallel-size 2 --load {{mtp-one-stage}} {_AS_IT_IS}",
        entry_points=("ours",),
    ),
]
_CONVERTED = f"{EVERY_2} --ckpt-convert-format torch_dist --ckpt-convert-save {{save}}"
_EXPERTS = (
    f"{DIST} --train-iters 8 --use-cpu-initialization --disable-bias-linear --num-experts 2 "
    "--ffn-hidden-size 128"
)
#: Jobs that must agree at both entry points in everything that is compared.
ALIKE = [
    Job("ckpt-step", f"{TORCH} --load {{whole}} --ckpt-step 2"),
    Job("finetune", f"{TORCH} --load {{whole}} --finetune"),
    Job("finetune-in-place", f"{TORCH} --load {{save}} {EVERY_2} --finetune", ("whole", 4)),
    Job("no-load-optim", f"{TORCH} --load {{whole}} --ckpt-step 2 --no-load-optim"),
    Job("no-load-rng", f"{TORCH} --load {{whole}} --ckpt-step 2 --no-load-rng"),
    Job("no-save-optim", f"{TORCH} {EVERY_2} --no-save-optim", options={"hold_copies": 1}),
    Job(
        "no-save-optim-2",
        f"{TORCH} {EVERY_2} --load {{save}} --no-save-optim --no-load-optim",
        ("no-save-optim", 2),
    ),
    Job("swiglu", f"{TORCH} {EVERY_2} --swiglu --disable-bias-linear"),
    Job("use-checkpoint-args", f"{TORCH} --load {{swiglu}} --ckpt-step 2 --use-checkpoint-args"),
    Job("use-checkpoint-args-none", f"{TORCH} --load {{save}} --use-checkpoint-args"),
    Job("convert-format", f"{TORCH} --load {{whole}} --ckpt-step 2 {_CONVERTED}"),
    Job("convert-format-2", f"{DIST} --load {{convert-format}}/torch_dist"),
    Job("exit-on-missing", f"{TORCH} --load {{save}} --exit-on-missing-checkpoint"),
    Job("pretrained", f"{TORCH} --load {{save}} {EVERY_2} --pretrained-checkpoint {{whole}}"),
    Job("pretrained-none", f"{TORCH} --load {{save}} --pretrained-checkpoint {{save}}/no"),
    Job("exit-interval", f"{TORCH} --save {{save}} --save-interval 9 --exit-interval 3"),
    Job("at-the-end", f"{TORCH} --train-iters 3 {EVERY_2}"),
    Job(
        "retain",
        f"{TORCH} --train-iters 8 --save {{save}} --save-interval 1 --save-retain-interval 3",
    ),
    Job("rerun", f"{DIST} --save {{save}} --save-interval 9", options={"spoil": 3}),
    Job("rerun-2", f"{DIST} --load {{rerun}}", options={"spoil": 3}),
    # Megatron saves iteration 2 again, now with the state of the rerun.
    Job("rerun-saved", f"{DIST} {EVERY_2}", options={"spoil": 3}),
    Job("rerun-saved-2", f"{DIST} --load {{rerun-saved}}", options={"spoil": 3}),
    Job("dense", f"{DIST} --use-cpu-initialization {EVERY_2} --disable-bias-linear"),
    Job(
        "upcycle",
        f"{_EXPERTS} --save {{save}} --save-interval 4 --load {{dense}} --moe-use-upcycling",
        options={"hold_copies": 2},  # the rate of the first step is 0
    ),
    Job("upcycle-2", f"{_EXPERTS} --load {{upcycle}} --ckpt-step 1 --no-load-optim"),
    Job(
        "data-loader",
        f"{TORCH} {EVERY_2}",
        options={"stand_in": "saving_loader", "attributes": {"dataloader_save": "{save}"}},
    ),
]


def of_ours(name: str, flags: str, **options: Any) -> Job:
    """Return a job that runs at our entry point alone."""
    return Job(name, flags, entry_points=("ours",), options=options)


#: Flags of a job that loads another optimizer's state, its source, and the flags that the error
#: names. Stock refuses these loads, too, or reads the states in another type.
OTHER_STATES = {
    "aware-to-plain": (_SHARDED, "aware-bf16", "--use-precision-aware-optimizer --exp-avg-dtype"),
    "another-type": (_AWARE, "aware-bf16", "--exp-avg-dtype bf16"),
}
OTHER = [
    # Only newer releases know this flag.
    of_ours(
        "override",
        f"{TORCH} --load {{whole}} --ckpt-step 2",
        attributes={"override_ckpt_iteration": 1},
    ),
    Job("no-save-optim-asked", f"{TORCH} --load {{no-save-optim}}"),
    Job("non-persistent", f"{_NON_PERSISTENT} --save {{save}} --exit-interval 4"),
    Job("non-persistent-2", f"{_NON_PERSISTENT} --save {{save}} --load {{non-persistent}}"),
    of_ours("from-torch-dist", f"{DIST} --load {{stock:async}} --ckpt-step 2"),
    of_ours("aware-fp16", f"{_AWARE} --exp-avg-dtype fp16 {EVERY_2}", stand_in="fused_adam"),
    *(
        of_ours(name, f"{flags} --load {{{source}}} --train-iters 6", stand_in="fused_adam")
        for name, (flags, source, _) in OTHER_STATES.items()
    ),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run_jobs(tmp_path_factory.mktemp("one"), [*RESUMED, *ALIKE, *OTHER], ranks=1)


@pytest.fixture(scope="module")
def runs_by_2(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    jobs = [*RESUMED_BY_2, *OTHER_STAGES]
    return run_jobs(tmp_path_factory.mktemp("two"), jobs, ranks=2, torchrun=False)


@pytest.mark.parametrize("job", RESUMED[::2], ids=lambda job: job.name)
def test_a_resumed_job_trains_bit_for_bit_like_the_uninterrupted_one(runs: Runs, job: Job) -> None:
    if job.name != "no-save-rng":
        assert_nothing_lost(runs, job.name)
    assert_equal_ends(runs, job.name)
    later = runs[f"{job.name}-2"]
    if job.name in STOCK_LOSES:
        assert later["stock"].losses != later["ours"].losses, "stock agrees: compare it"
    elif job.name in STOCK_FAILS:
        assert later["stock"].ended != "end", "stock resumes: compare it"
    else:
        assert_equal_ends(runs, f"{job.name}-2")


@pytest.mark.parametrize("job", RESUMED_BY_2[::2], ids=lambda job: job.name)
def test_two_resumed_ranks_train_bit_for_bit_like_uninterrupted_ones(
    runs_by_2: Runs, job: Job
) -> None:
    assert_nothing_lost(runs_by_2, job.name)
    assert_equal_ends(runs_by_2, job.name)
    assert_equal_ends(runs_by_2, f"{job.name}-2")


def test_a_save_holds_unused_weights_that_other_stages_do_not_need(runs_by_2: Runs) -> None:
    """The last of several stages has an output layer of its own, although embeddings are tied."""
    saved, one, two = (
        assemble(runs_by_2[name]["ours"].save, 4)
        for name in ("mtp", "mtp-one-stage", "mtp-two-stages")
    )
    unused = {name for name in saved if name[1].endswith(UNUSED)}
    assert unused == {
        (kind, "output_layer.weight (unused)")
        for kind in ("weight", "master", "exp_avg", "exp_avg_sq")
    }
    assert one.keys() == saved.keys() - unused
    assert one.keys() < two.keys()
    for name in one:
        assert torch.equal(saved[name], one[name]), name
        assert torch.equal(saved[name], two[name]), name


@pytest.mark.parametrize("job", ALIKE, ids=lambda job: job.name)
def test_a_flag_means_what_it_means_in_stock(runs: Runs, job: Job) -> None:
    assert_equal_ends(runs, job.name)


def test_each_flag_changes_the_losses_or_the_end_of_its_job(runs: Runs) -> None:
    """Each of these jobs differs from the job without the flag, so the comparisons can fail."""
    whole = runs["whole-2"]["ours"]
    for name in ("no-load-optim", "no-load-rng", "finetune", "no-save-rng-2"):
        assert runs[name]["ours"].losses != whole.losses, name
    assert runs["ckpt-step"]["ours"].losses == whole.losses
    ended = {name: run["ours"].ended for name, run in runs.items()}
    assert [ended[name] for name in ("exit-interval", "rerun", "rerun-2")] == [
        ["exit", 0],
        ["exit", 16],
        ["exit", 16],
    ]
    assert ended["exit-on-missing"] == ["exit", None]
    assert ended["pretrained-none"][0] == "FileNotFoundError"
    assert runs["retain"]["ours"].left[0] == ["iter_0000003", "iter_0000006", "iter_0000008"]
    upcycled = runs["upcycle"]["ours"].save
    assert any("experts" in name for _, name in tensors(upcycled, 4))
    assert 1 in committed(upcycled)


def test_megatron_reads_its_own_checkpoints(runs: Runs) -> None:
    assert runs["from-torch-dist"]["ours"].losses == runs["async-2"]["stock"].losses


def test_the_state_of_a_data_loader_is_where_stock_saves_it(runs: Runs) -> None:
    def files(save: Path) -> list[str]:
        return sorted(str(file.relative_to(save)) for file in save.rglob("train_dataloader*"))

    ours, stock = (files(runs["data-loader"][entry].save) for entry in ("ours", "stock"))
    assert ours == stock
    assert "iter_0000004/mp_rank_00/train_dataloader_dprank000.pt" in ours


def test_a_load_without_saved_optimizer_state_names_the_flag_to_add(
    runs: Runs,
) -> None:
    asked = runs["no-save-optim-asked"]
    assert asked["stock"].ended == ["KeyError", "'optimizer'"]
    kind, message = asked["ours"].ended
    assert kind == "MissingStateError"
    assert "has no optimizer state (it was saved with --no-save-optim" in message
    assert "--no-load-optim or --finetune" in message


def test_a_job_resumes_from_non_persistent_saves_without_their_directory(runs: Runs) -> None:
    for entry_point in ENTRY_POINTS:
        assert runs["non-persistent"][entry_point].ended == ["exit", 0]
    assert runs["non-persistent"]["stock"].left[0] == ["iter_0000003"]
    assert (runs["non-persistent"]["stock"].save / "non_persistent/iter_0000004").is_dir()
    # The last save was only in memory when the job ended, and was then written to storage.
    assert runs["non-persistent"]["ours"].left == (["iter_0000003", "iter_0000004"], "4")
    later = runs["non-persistent-2"]
    assert later["ours"].losses == later["stock"].losses
    assert {iteration for iteration, _ in later["ours"].losses} == {5, 6}


def test_a_conversion_by_megatron_writes_the_format_that_its_flag_names(runs: Runs) -> None:
    converted = runs["convert-format"]["ours"]
    assert "> converted checkpoint: torch -> torch_dist." in converted.output
    assert (converted.save / "torch_dist/iter_0000002/metadata.json").is_file()
    assert committed(converted.save / "torch_dist") == []
    assert "flashckpt: saves to" not in converted.output
    assert runs["convert-format-2"]["ours"].losses == runs["whole-2"]["ours"].losses


def test_an_overridden_iteration_also_rewinds_the_data(runs: Runs) -> None:
    """The rows of iteration 2 again, with the weights and the random state after it."""
    override, whole = runs["override"]["ours"], runs["whole"]["ours"]
    assert override.ended == "end", override.output[-3000:]
    assert sorted({iteration for iteration, _ in override.losses}) == [2, 3, 4]
    assert "start at iteration 1 (consumed_train_samples 4)" in override.output
    assert override.losses[:2] != whole.losses[2:4]


@pytest.mark.parametrize("name", OTHER_STATES)
def test_the_error_names_the_flags_of_the_job_that_saved(runs: Runs, name: str) -> None:
    ended = runs[name]["ours"].ended
    assert ended[0] == "MissingStateError", ended
    assert f"Start with {OTHER_STATES[name][2]}" in ended[1], ended[1]
    kind, message = runs["aware-fp16"]["ours"].ended  # states with scales
    assert (kind, "--exp-avg-dtype torch.float16" in message) == ("UnsupportedError", True)
