"""Flags of a job that decide when its state may be copied."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_flashckpt.megatron_lm.job_flags import (
    captures_graphs,
    changes_outside_steps,
    left_to_megatron,
    why_left,
)


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


@pytest.mark.parametrize(
    ("args", "flag", "reason"),
    [
        (Namespace(use_megatron_fsdp=True), "--use-megatron-fsdp", "shards its parameters itself"),
        (Namespace(inprocess_restart=True), "--inprocess-restart", "train again as another rank"),
        (Namespace(freeze_all_layers=True), "--freeze-all-layers", "only the position in the data"),
        (
            Namespace(gtp_weight_remat_size=2),
            "--tensor-parallel-num-weight-shards",
            "a slice of its tensor rank's weights",
        ),
        (
            Namespace(gtp_weight_remat_size=1, expert_gtp_weight_remat_size=4),
            "--expert-tensor-parallel-num-weight-shards",
            "a slice of its tensor rank's weights",
        ),
        (Namespace(logits_save_dir="logits"), "--logits-save-dir", "writes the logits in its own"),
    ],
)
def test_a_job_that_is_left_to_megatron_gets_a_reason(
    args: Namespace, flag: str, reason: str
) -> None:
    assert left_to_megatron(args) == flag
    assert reason in why_left(flag)


def test_other_jobs_are_not_left_to_megatron() -> None:
    assert left_to_megatron(Namespace(freeze_all_layers=False, logits_save_dir=None)) is None
    assert left_to_megatron(Namespace(gtp_weight_remat_size=1)) is None
    assert left_to_megatron(Namespace()) is None
