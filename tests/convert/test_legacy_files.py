"""The legacy format without a job: exact round trips of every layout, and refused damage."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flashckpt.convert.common import ddp_buckets
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import OpenCheckpoint, convert, open_source
from megatron_flashckpt.convert.readers.legacy import MODEL_FILE, OPTIMIZER_FILE
from megatron_flashckpt.convert.writers.legacy import write_legacy
from megatron_flashckpt.errors import (
    CorruptCheckpointError,
    FlashCkptError,
    MissingStateError,
    UnsupportedError,
)
from megatron_flashckpt.megatron_lm.rebuild.rank_model import Chunk, LocalTensor, RankModel
from megatron_flashckpt.megatron_lm.rebuild.rank_models import rank_models
from megatron_flashckpt.megatron_lm.tensor_geometry import Geometry
from tests.convert.made import differing, save_as_ranks, whole
from tests.convert.rebuilt import ITERATION, arguments, contents

DISTRIBUTED = {"use_distributed_optimizer": True}
PP2_VPP2 = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "add_bias_linear": False, "swiglu": True}
EP2 = {"expert_model_parallel_size": 2, "moe_router_enable_expert_bias": True}
FUSED = {"transformer_impl": "transformer_engine"}
BUCKETS = {"overlap_grad_reduce": True, "ddp_bucket_size": 1000}
#: Layout in the form of the args of early 2024.
LEGACY_GPT = {
    "use_mcore_models": False,
    "group_query_attention": True,
    "num_query_groups": 4,
    "position_embedding_type": "learned_absolute",
    "swiglu": True,
    "add_bias_linear": True,
    "normalization": "LayerNorm",
    "untie_embeddings_and_output_weights": False,
}

FP32 = {"params_dtype": torch.float32, "bf16": False}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
GROUPED = {"moe_grouped_gemm": True}

LAYOUTS = {
    "plain": {},
    "fp32": FP32,
    "fp32-distributed": {**FP32, **DISTRIBUTED},
    "fp16-scaler": {"params_dtype": torch.float16, "bf16": False, "fp16": True, **DISTRIBUTED},
    "tp2-buckets": {**TP2, "swiglu": True, **DISTRIBUTED, **BUCKETS},
    "tp2-grads-16bit": {**TP2, "accumulate_allreduce_grads_in_fp32": False, **DISTRIBUTED},
    "pp2-vpp2-tied-buckets": {**PP2_VPP2, **DISTRIBUTED, **BUCKETS},
    "pp2-vpp2-overlap-step": {
        **(PP2_VPP2 | DISTRIBUTED | BUCKETS),
        "overlap_param_gather_with_optimizer_step": True,
    },
    "pp2-vpp2-plain": PP2_VPP2,
    "legacy-gpt-pp2-vpp2-tied-buckets": {**LEGACY_GPT, **PP2_VPP2, **DISTRIBUTED, **BUCKETS},
    "early-mcore-pp2-tied": {"use_mcore_models": True, **PP2, **DISTRIBUTED, **BUCKETS},
    "legacy-gpt-tp2-plain": {**LEGACY_GPT, **TP2},
    "decoupled-lr-mup": {
        "decoupled_lr": 0.5,
        "untie_embeddings_and_output_weights": True,
        "use_mup": True,
        "mup_base_hidden_size": 12,
    },
    "experts-ep2-tp2-pp2": {
        **(EXPERTS | EP2 | DISTRIBUTED | TP2 | PP2),
        "sequence_parallel": True,
    },
    "experts-ep2-plain": {**EXPERTS, **EP2},
    "transformer-engine-grouped-experts": {**FUSED, **EXPERTS, **EP2, **DISTRIBUTED, **GROUPED},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_every_layout_survives_a_round_trip(layout: dict, tmp_path: Path) -> None:
    args = arguments(**layout)
    if "moe_router_enable_expert_bias" in layout:
        args.moe_router_score_function = "sigmoid"
    made = contents(args)
    if args.fp16:
        made.optimizer[0]["grad_scaler"] = {"scale": 1024.0}
    if "use_mup" in layout:
        groups = made.optimizer[0]["param_groups"]
        apart = {**groups[0], "max_lr": 0.5, "default_config": False}
        scaled = {**apart, "eps": 5e-9}
        groups[:] = [{**group, "eps": 1e-8} for group in (*groups, apart)]
        groups += [scaled, {**scaled, "max_lr": 5e-4}]
    if "overlap_param_gather_with_optimizer_step" in layout:
        made.optimizer.append({**made.optimizer[0]})
    write_legacy(made, tmp_path, Options())
    read = open_source(tmp_path, None, Options()).contents
    assert read.iteration == ITERATION
    assert differing(read.tensors, made.tensors) == []
    steps = [
        entry["step"] if entry["step"] is not None else group["step"]
        for entry in read.optimizer
        for group in entry["param_groups"]
    ]
    assert set(steps) == {10.0}
    assert read.optimizer[0]["grad_scaler"] == made.optimizer[0]["grad_scaler"]
    assert read.common["opt_param_scheduler"] == made.common["opt_param_scheduler"]


def test_groups_without_the_names_of_their_parameters_are_refused(tmp_path: Path) -> None:
    made = contents(arguments(decoupled_lr=0.5))
    with pytest.raises(
        UnsupportedError, match=r"param group of embedding\.word_embeddings\.weight does not"
    ):
        write_legacy(made, tmp_path, Options())
    assert not list(tmp_path.iterdir())


def test_a_sharded_vocabulary_is_padded_for_the_layout_of_the_args(tmp_path: Path) -> None:
    """Rows that the source lacks are filled with zeros, as in Megatron."""
    small = contents(arguments(padded_vocab_size=90))
    small.args.padded_vocab_size = 96
    small.args.tensor_model_parallel_size = 2
    write_legacy(small, tmp_path, Options(weights_only=True))
    tensors, padded_tensors = (
        {tensor.name: whole(tensor) for tensor in read.tensors}
        for read in (small, open_source(tmp_path, None, Options()).contents)
    )
    padded = padded_tensors["weight/embedding.word_embeddings.weight"]
    assert torch.equal(padded[:90], tensors["weight/embedding.word_embeddings.weight"])
    assert padded.shape[0] == 96
    assert not padded[90:].any()


def test_buckets_of_early_2024_hold_at_least_two_parameters() -> None:
    """The `GradBuffer` of that time requires `len(bucket_params) > 1`."""
    args = arguments(**LEGACY_GPT, **DISTRIBUTED, **BUCKETS)
    args.ddp_bucket_size = 1  # less than any parameter
    (model,) = rank_models(args)
    (chunks,) = ddp_buckets.sub_optimizers(model, args, experts=False)
    dtypes = {(0, parameter.name): torch.bfloat16 for parameter in model.chunks[0].parameters}
    (buffer,) = ddp_buckets.buffers(model, args, chunks, dtypes, ddp_buckets.EARLY)
    counts = Counter(place.bucket for place in buffer.places)
    assert set(list(counts.values())[:-1]) == {2}
    assert len(counts) == len(buffer.bucket_numels) > 10


def test_buckets_grow_with_context_parallel_ranks_since_core_0_12() -> None:
    """Three parameters of 30 million elements; a bucket holds a million for each replica."""
    args = arguments(data_parallel_size=16, context_parallel_size=4, overlap_grad_reduce=True)
    names = [f"decoder.layers.{number}.weight" for number in range(3)]
    parameters = tuple(
        LocalTensor(Geometry(name, (), main=True, replica=0, resizable=False), (30_000, 1000))
        for name in names
    )
    chunk = Chunk(parameters, (), (), ())
    model = RankModel(0, 0, 0, first_replica=True, dense_group=0, expert_group=0, chunks=(chunk,))
    chunks = [(0, list(parameters))]
    dtypes = {(0, name): torch.bfloat16 for name in names}
    for stored in ([(90_000_000,)], [(60_000_000, 30_000_000)]):
        (buffer,) = ddp_buckets.layout(model, args, chunks, dtypes, stored, "here", by_bucket=True)
        assert buffer.bucket_numels == stored[0]
    (newest,) = ddp_buckets.buffers(model, args, chunks, dtypes, ddp_buckets.RULES[0])
    assert newest.bucket_numels == (90_000_000,)


# ---------------------------------------------------------------------- damage


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """A save directory under TP 2 with the distributed optimizer."""
    made = contents(arguments(**LAYOUTS["tp2-buckets"]))
    write_legacy(made, tmp_path / "save", Options())
    return tmp_path / "save"


def change(save: Path, name: str, function: Callable[[Any], object]) -> None:
    path = save / f"iter_{ITERATION:07d}/mp_rank_00/{name}"
    stored = torch.load(path, weights_only=False)
    function(stored)
    torch.save(stored, path)


def refused(save: Path, error: type[FlashCkptError]) -> str:
    with pytest.raises(error) as caught:
        open_source(save, None, Options())
    return str(caught.value)


def of_args(**values: object) -> Callable[[Any], None]:
    return lambda state: vars(state["args"]).update(values)


@pytest.mark.parametrize(
    ("name", "function", "error", "message"),
    [
        (
            *(MODEL_FILE, of_args(overlap_grad_reduce=False), CorruptCheckpointError),
            "buffers have .* by the args",
        ),
        (
            *(OPTIMIZER_FILE, lambda buffers: buffers.pop("buckets_coalesced"), UnsupportedError),
            "lacks the sizes of its buckets.*--weights-only",  # as before 2024
        ),
        (
            *(MODEL_FILE, lambda state: state.update(iteration=5), CorruptCheckpointError),
            "holds files of another save: mp_rank_00 of iteration 5",
        ),
        (
            *(MODEL_FILE, of_args(num_layers=5, add_bias_linear=False), UnsupportedError),
            r"decoder\.layers\.0\.mlp\.linear_fc2\.bias is \(24,\), expected none by the args.* and"
            r" \d+ more; load it with megatron_flashckpt in a job of the Megatron that wrote it",
        ),
        (
            *(MODEL_FILE, lambda state: state.pop("checkpoint_version"), CorruptCheckpointError),
            "lacks checkpoint_version; convert another",
        ),
    ],
    ids=["buckets", "2023", "two iterations", "another model", "version"],
)
def test_files_that_contradict_each_other_are_refused_with_the_reason(
    save: Path,
    name: str,
    function: Callable[[Any], object],
    error: type[FlashCkptError],
    message: str,
) -> None:
    change(save, name, function)
    result = refused(save, error)
    assert re.search(message, result)
    assert len(result) < 800


def test_a_weight_that_differs_from_its_rounded_master_is_named(save: Path) -> None:
    def damage(state: Any) -> None:
        state["model"]["decoder.final_layernorm.bias"][5] += 1

    change(save, MODEL_FILE, damage)
    message = refused(save, CorruptCheckpointError)
    assert "1 weights differ from the rounded masters" in message
    assert message.count("decoder.final_layernorm.bias") == 1
    assert "--weights-only" in message
    weights = open_source(save, None, Options(weights_only=True)).contents
    assert {tensor.kind for tensor in weights.tensors} == {"weight"}
    assert weights.optimizer is None

    def shift(buffers: Any) -> None:
        (tensors,) = buffers[0].values()
        tensors["param"] = tensors["param"].roll(64)

    change(save, OPTIMIZER_FILE, shift)
    assert re.search(r"\d\d weights differ from", refused(save, CorruptCheckpointError))


def test_states_of_another_shape_than_their_parameter_are_refused(tmp_path: Path) -> None:
    """FP32 parameters have no masters that show which state belongs to which parameter."""

    def exchange(stored: Any) -> None:
        states = stored["optimizer"]["state"]
        states[0], states[1] = states[1], states[0]

    made = contents(arguments(params_dtype=torch.float32, bf16=False))
    write_legacy(made, tmp_path, Options())
    change(tmp_path, MODEL_FILE, exchange)
    message = refused(tmp_path, CorruptCheckpointError)
    assert re.search(
        r"exp_avg of .* has the shape \(.*\), expected \(.*; .*--weights-only", message
    )


@pytest.mark.parametrize("damaged", ["", OPTIMIZER_FILE, MODEL_FILE])
def test_a_missing_or_truncated_file_is_named(save: Path, damaged: str) -> None:
    path = save / f"iter_{ITERATION:07d}/mp_rank_01" / damaged
    if not damaged:
        shutil.rmtree(path)
    elif damaged == OPTIMIZER_FILE:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-5000])
    assert str(path.relative_to(save)) in refused(save, CorruptCheckpointError)


def test_a_file_whose_pickle_would_run_code_is_refused(save: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class PickledCall:
        def __reduce__(self) -> Any:
            return Path.touch, (ran,)

    change(save, MODEL_FILE, of_args(evil=PickledCall()))
    assert "could run code" in refused(save, UnsupportedError)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("weight", r"{key} is missing, expected .* by the args"),
        ("exp_avg", r"lacks exp_avg/{key}"),
    ],
)
def test_writing_refuses_contents_with_holes(tmp_path: Path, missing: str, message: str) -> None:
    made = contents(arguments(**DISTRIBUTED))
    key = made.tensors[0].key
    lost = (missing,) if missing == "exp_avg" else ("weight", "master", "exp_avg", "exp_avg_sq")
    made.tensors[:] = [t for t in made.tensors if t.key != key or t.kind not in lost]
    with pytest.raises(MissingStateError, match=message.format(key=re.escape(key))):
        write_legacy(made, tmp_path, Options())
    assert list(tmp_path.iterdir()) == []


def test_missing_attributes_of_args_are_named_with_a_remedy(tmp_path: Path) -> None:
    made = contents(arguments(**DISTRIBUTED, overlap_grad_reduce=True))
    opened = OpenCheckpoint("flashckpt", made, (tmp_path / "source", tmp_path / "source/iter_1"))
    complete = dict(vars(made.args))
    lacking = ("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_size", "num_layers")
    for name in lacking:
        delattr(made.args, name)
    with pytest.raises(UnsupportedError, match="convert with --to torch_dist, which") as caught:
        convert(opened, tmp_path / "torch", "torch", Options())
    assert all(name in str(caught.value) for name in lacking)
    assert convert(opened, tmp_path / "dist", "torch_dist", Options()).is_dir()
    vars(made.args).update(complete)
    del made.args.data_parallel_size  # determines the sizes of buckets
    needs = r"nowhere: its training arguments lack 'data_parallel_size', which .* load and save it"
    with pytest.raises(UnsupportedError, match=needs):
        convert(opened, tmp_path / "torch", "torch", Options())
    assert not list(tmp_path.glob("torch/iter_*"))


def test_weights_alone_can_be_written(save: Path, tmp_path: Path) -> None:
    options = Options(weights_only=True)
    convert(open_source(save, None, options), tmp_path / "weights", "torch", options)
    state = torch.load(next((tmp_path / "weights").rglob("*.pt")), weights_only=False)
    assert "optimizer" not in state
    assert not list((tmp_path / "weights").rglob("distrib_optim.pt"))
    reopened = open_source(tmp_path / "weights", None, Options()).contents
    assert (reopened.optimizer, reopened.rng) == (None, {})
    assert reopened.args.no_save_optim
    assert reopened.args.no_save_rng


def test_a_save_without_optimizer_state_can_be_converted(tmp_path: Path) -> None:
    """With --no-save-optim Megatron saves no scheduler, which our format demands."""
    made = dataclasses.replace(contents(arguments()), optimizer=None)
    del made.common["opt_param_scheduler"], made.common["num_floating_point_operations_so_far"]
    write_legacy(made, tmp_path / "save", Options())
    convert(
        open_source(tmp_path / "save", None, Options()), tmp_path / "ours", "flashckpt", Options()
    )
    common = open_source(tmp_path / "ours", None, Options()).contents.common
    assert common["opt_param_scheduler"] is None
    assert common["num_floating_point_operations_so_far"] == 0


@pytest.mark.parametrize("to", ["torch_dist", "torch"])
def test_args_may_have_any_names(tmp_path: Path, to: str) -> None:
    """Frameworks fill them with what they like."""
    args = arguments()
    vars(args).update({5: "five", "self": 1})
    save_as_ranks(contents(args), tmp_path / "ours", replicas=1)
    opened = open_source(tmp_path / "ours", ITERATION, Options())
    convert(opened, tmp_path / "result", to, Options())
    back = open_source(tmp_path / "result", ITERATION, Options()).contents
    assert (vars(back.args)[5], back.args.self) == ("five", 1)
