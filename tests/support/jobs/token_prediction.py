"""Gives the model of `scripts/pretrain_gpt_tiny.py` multi-token prediction, if flags ask for it."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

from scripts import pretrain_gpt_tiny as tiny


def gpt_model(config: Any, spec: Any, *args: Any, **kwargs: Any) -> GPTModel:
    """Return the model, with multi-token prediction if `--mtp-num-layers` asks for it."""
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, False, vp_stage=kwargs["vp_stage"])
    return GPTModel(config, spec, *args, mtp_block_spec=mtp, **kwargs)


def install() -> None:
    """Make `tiny.model_provider` build such models."""
    tiny.GPTModel = gpt_model
