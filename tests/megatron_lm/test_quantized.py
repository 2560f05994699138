"""Weights that are tensors of their own kind (FP8, FP4): what is refused, and why."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from megatron_flashckpt.config import Replicated
from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.megatron_lm import parallel, self_check
from megatron_flashckpt.megatron_lm.model_state import ModelState
from tests.megatron_lm.quantized_double import QuantizedDouble
from tests.megatron_lm.test_model_state import Job

FLAGS = ("fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "data_parallel", lambda: (1, 0))


def check(job: Job, **args: bool) -> None:
    state, job.optimizer.grad_scaler = ModelState(Replicated()), None
    self_check.check(SimpleNamespace(**args), state, [job], job.optimizer)


def test_plain_weights_are_accepted() -> None:
    check(Job(), **dict.fromkeys(FLAGS, False))


@pytest.mark.parametrize("trained", [True, False])
def test_quantized_weights_are_refused_by_name(trained: bool) -> None:
    job = Job()
    weight = torch.nn.Parameter(QuantizedDouble.of(job.layer.matrix), requires_grad=trained)
    job.layer.matrix = job.optimizer.float16_groups[0][0] = weight
    text = (
        "parameters of type QuantizedDouble, whose bytes this release cannot save: layer.matrix; "
        "start without --fp8-param-gather, --fp4-param-gather and whatever else quantizes weights"
    )
    with pytest.raises(UnsupportedError, match=re.escape(text)):
        check(job)


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_that_quantize_weights_are_refused(flag: str) -> None:
    text = f"--{flag.replace('_', '-')}: weights that are kept in FP8 or FP4"
    with pytest.raises(UnsupportedError, match=text):
        check(Job(), **{flag: True})
