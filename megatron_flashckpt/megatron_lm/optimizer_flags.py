"""Megatron's flags that decide which optimizer states a job keeps, and in which types."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from megatron_flashckpt.layout.piece import MASTER
from megatron_flashckpt.megatron_lm.old_releases import config_of
from megatron_flashckpt.megatron_lm.optimizer_state import (
    MASTER_STATE,
    DistributedOptimizer,
    sub_optimizers,
)

_AWARE = "--use-precision-aware-optimizer"
#: Values of Megatron's flags by type.
_VALUES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def flags_as_stored(optimizer: Any, stored: Mapping[str, Collection[torch.dtype]]) -> list[str]:
    """Return the flags with which a job would keep the states that a checkpoint has.

    Args:
        optimizer: this job's optimizer, whose flags differ; None if it loads weights only.
        stored: types of the stored states and masters by kind.
    """
    subs = [] if optimizer is None else sub_optimizers(optimizer)
    configs = [config_of(sub) for sub in subs if isinstance(sub, DistributedOptimizer)]
    if not configs:
        return []
    aware = bool(getattr(configs[0], "use_precision_aware_optimizer", False))
    flags = []
    for kind in ("exp_avg", "exp_avg_sq"):
        here = getattr(configs[0], f"{kind}_dtype", torch.float32) if aware else torch.float32
        if (dtypes := {*stored.get(kind, ())}) and dtypes != {here} and dtypes <= _VALUES.keys():
            values = " or ".join(sorted(_VALUES[dtype] for dtype in dtypes))
            flags.append(f"--{kind.replace('_', '-')}-dtype {values}")
    if not aware and (MASTER_STATE in stored or flags):
        return [_AWARE, *flags]
    if aware and MASTER in stored and MASTER_STATE not in stored and not flags:
        return [f"no {_AWARE}"]
    return flags
