"""Flags of a job that decide when its state may be copied."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_flashckpt.megatron_lm.job_flags import captures_graphs, changes_outside_steps


@pytest.mark.parametrize(
    ("args", "flag"),
    [
        (Namespace(perform_rl_step=True), "--perform-rl-step"),
        (Namespace(offload_optimizer_states=True), "--offload-optimizer-states"),
        (
            Namespace(vision_pretraining=True, vision_pretraining_type="dino"),
            "--vision-pretraining-type dino",
        ),
        (Namespace(vision_pretraining=True, vision_pretraining_type="classify"), None),
        (Namespace(vision_pretraining=False, vision_pretraining_type="dino"), None),
        (Namespace(perform_rl_step=False, offload_optimizer_states=False), None),
        (Namespace(), None),
    ],
)
def test_a_flag_that_changes_state_outside_steps_is_named(
    args: Namespace, flag: str | None
) -> None:
    assert changes_outside_steps(args) == flag


@pytest.mark.parametrize(
    ("args", "captures"),
    [
        (Namespace(cuda_graph_impl="none"), False),
        (Namespace(cuda_graph_impl=None), False),
        (Namespace(cuda_graph_impl="local"), True),
        (Namespace(cuda_graph_impl="transformer_engine"), True),
        (Namespace(cuda_graph_impl="none", optimizer_cuda_graph=True), True),
        (Namespace(enable_cuda_graph=True), True),  # until core 0.15
        (Namespace(external_cuda_graph=True), True),
        (Namespace(), False),
    ],
)
def test_jobs_that_capture_graphs_are_recognized(args: Namespace, captures: bool) -> None:
    assert captures_graphs(args) is captures
