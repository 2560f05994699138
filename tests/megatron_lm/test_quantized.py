"""Refusals of FP8 and FP4 weights that no load could derive from masters.

`tests/integration/test_quantized_weights.py` saves and loads accepted weights.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from megatron.core import fp8_utils

from megatron_flashckpt.config import Replicated
from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.load.load_policy import LoadPolicy
from megatron_flashckpt.load.load_request import LoadRequest, refuse_missing_masters
from megatron_flashckpt.megatron_lm import parallel, self_check
from megatron_flashckpt.megatron_lm.accounting import unquantizable
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.optimizer_state import DistributedOptimizer
from megatron_flashckpt.megatron_lm.quantized import fill_from_masters, is_quantized
from megatron_flashckpt.save.startup import Startup
from tests.megatron_lm.quantized_double import BlockDouble, QuantizedDouble
from tests.megatron_lm.test_model_state import Job

WITHOUT_MASTER = (
    "FP8 or FP4 weights without fp32 masters in a DistributedOptimizer of this rank: layer.matrix"
)
NOT_FILLED = "FP8 or FP4 weights that this Megatron does not make from their masters: layer.matrix"
UNKNOWN = (
    "weights of a tensor class into which this Megatron cannot quantize masters: "
    "layer.matrix (QuantizedDouble)"
)


@pytest.fixture(autouse=True)
def single_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "data_parallel", lambda: (1, 0))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Megatron treat the stand-ins as TransformerEngine's classes."""
    monkeypatch.setattr(fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True)
    monkeypatch.setattr(fp8_utils, "FP8_TENSOR_CLASS", QuantizedDouble)


def quantized_job(*, trained: bool = True) -> Job:
    """Return a job with one FP8 weight, whose optimizer holds all masters on every replica."""
    job = Job()
    weight = torch.nn.Parameter(QuantizedDouble.of(job.layer.matrix), requires_grad=trained)
    job.layer.matrix = job.optimizer.float16_groups[0][0] = weight
    job.optimizer.grad_scaler = None
    return job


def sharding(job: Job, **config: Any) -> DistributedOptimizer:
    """Return a DistributedOptimizer of the job's weights, with the parts that concern masters."""
    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    optimizer.is_stub_optimizer = False
    optimizer.optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    optimizer.buffers = [SimpleNamespace(param_index_map=dict.fromkeys(job.parameters()))]
    settings = {"fp8_param_gather": True, "fp4_param_gather": False, **config}
    optimizer.config = optimizer.ddp_config = SimpleNamespace(**settings)
    chunk = SimpleNamespace(ddp_config=optimizer.ddp_config, start_param_sync=print)
    chunk.bucket_groups = chunk.expert_parallel_bucket_groups = []
    optimizer.model_chunks = [chunk]
    return optimizer


def test_only_classes_with_their_own_operators_count_as_quantized() -> None:
    class LabelledTensor(torch.Tensor):
        pass

    plain = [torch.zeros(2), torch.nn.Parameter(torch.zeros(2)), torch.nn.Buffer(torch.zeros(2))]
    plain.append(torch.zeros(2).as_subclass(LabelledTensor))
    assert [is_quantized(tensor) for tensor in plain] == [False] * len(plain)
    values = torch.zeros(2, 32)
    doubles = [kind.of(values) for kind in (QuantizedDouble, BlockDouble)]
    assert all(is_quantized(tensor) for tensor in doubles)
    assert all(is_quantized(torch.nn.Parameter(tensor)) for tensor in doubles)


@pytest.mark.usefixtures("known")
def test_a_load_without_the_optimizer_is_refused() -> None:
    def load(job: Job, optimizer: Any) -> None:
        request = LoadRequest(ModelState(Replicated()), [job], optimizer, LoadPolicy())
        refuse_missing_masters(request, "/save/iter_0000003")

    job = quantized_job()
    text = re.escape(f"/save/iter_0000003: {WITHOUT_MASTER}. A load derives such weights from ")
    with pytest.raises(UnsupportedError, match=text):
        load(job, None)
    load(job, sharding(job))
    load(Job(), None)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({}, None),
        ({"fp8_param_gather": False, "fp4_param_gather": True}, None),
        ({"fp8_param_gather": False}, NOT_FILLED),
        ({"use_precision_aware_optimizer_no_fp8_or_ds_fp8": True}, WITHOUT_MASTER),
        ({"reuse_grad_buf_for_mxfp8_param_ag": True}, None),
    ],
)
def test_fp8_weights_need_masters_that_megatron_copies(
    config: dict[str, bool], line: str | None
) -> None:
    job = quantized_job()
    assert unquantizable([job], sharding(job, **config)) == ([] if line is None else [line])


@pytest.mark.usefixtures("known")
def test_fp8_weights_need_sharded_masters_on_a_gpu_in_a_known_release() -> None:
    job, frozen = quantized_job(), quantized_job(trained=False)
    on_host = sharding(job)
    on_host.optimizer = SimpleNamespace(param_to_inner_param={}, sub_optimizers=[])
    unsharded = [None, job.optimizer, on_host]
    for chunk, optimizer in [(frozen, frozen.optimizer), *((job, o) for o in unsharded)]:
        assert unquantizable([chunk], optimizer) == [WITHOUT_MASTER]
    for name in ("start_param_sync", "bucket_groups"):
        optimizer = sharding(job)
        delattr(optimizer.model_chunks[0], name)
        assert unquantizable([job], optimizer) == [NOT_FILLED]


def test_weights_of_experts_are_gathered_too_if_gathers_overlap_with_training() -> None:
    chunk = mock.Mock(bucket_groups=[mock.Mock()], expert_parallel_bucket_groups=[mock.Mock()])
    fill_from_masters([chunk], Job().optimizer)
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        names = [name for name, *_ in group.method_calls]
        assert names == ["start_param_sync", "finish_param_sync"]


def test_a_refusal_with_several_reasons_has_one_remedy_at_its_end() -> None:
    """Here Megatron does not know the class of the weights, too."""
    job = quantized_job()
    lines = (UNKNOWN, WITHOUT_MASTER, self_check.QUANTIZED_REMEDY)
    with pytest.raises(UnsupportedError) as refused:
        self_check.check(JobState(chunks=[job], optimizer=job.optimizer), ModelState(Replicated()))
    assert ":\n  " + "\n  ".join(lines) + "\nNothing was saved" in str(refused.value)
    assert unquantizable([job], sharding(job)) == [UNKNOWN]


def test_a_quantized_weight_without_a_master_is_never_sliced() -> None:
    job, state = quantized_job(), ModelState(Replicated())
    before = QuantizedDouble.dequantizations
    with pytest.raises(UnsupportedError, match=r"layer\.matrix: an FP8 or FP4 weight without a"):
        state.owned(state.geometry([job]), [job], job.optimizer)
    assert QuantizedDouble.dequantizations == before


def test_plain_weights_that_share_a_key_with_fp8_ones_need_masters_too() -> None:
    job, state = Job(), ModelState(Replicated())
    assert self_check.of_derived(state, [job], job.optimizer) == []
    state.note_keys({"layer.matrix"})
    assert self_check.of_derived(state, [job], job.optimizer) == [
        "FP8 or FP4 weights of the same name in other layers, but no optimizer that shards its "
        "state steps: layer.matrix",
        self_check.QUANTIZED_REMEDY,
    ]


@pytest.mark.parametrize(
    ("keys", "stages", "agreed"),
    [({"w"}, 1, ()), (set(), 2, ()), ({"w"}, 2, ()), ({"w"}, 2, ("v", "w"))],
)
def test_stages_that_have_not_agreed_do_not_save_fp8_weights(
    keys: set[str], stages: int, agreed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = ModelState(Replicated())
    state.note_keys(agreed)
    startup = Startup(cast("Any", SimpleNamespace(model_state=state)), lambda nodes: None)
    monkeypatch.setattr(startup, "_check_own", lambda job: (frozenset(keys), frozenset()))
    monkeypatch.setattr(parallel, "model_sizes", lambda: (1, stages, 1))
    if not keys or stages == 1 or agreed:
        startup.check_alone(JobState(chunks=[]))
        return
    with pytest.raises(UnsupportedError, match="call load_checkpoint or Megatron's train_step"):
        startup.check_alone(JobState(chunks=[]))
