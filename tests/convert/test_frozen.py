"""Checkpoints of jobs that had frozen parameters: conversions work, or refuse and write nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flashckpt.convert.common.contents import Contents, GlobalTensor
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import convert, open_source
from megatron_flashckpt.convert.readers.legacy import MODEL_FILE, OPTIMIZER_FILE
from megatron_flashckpt.convert.writers.legacy import write_legacy
from megatron_flashckpt.errors import FlashCkptError, UnsupportedError
from tests.convert import rebuilt
from tests.convert.made import save_as_ranks

KEY = "decoder.layers.mlp.linear_fc1.weight"
MODEL_KINDS = ("weight", "buffer")


def frozen_layer(**arguments: Any) -> Contents:
    """Return a checkpoint of a job that had frozen layer 1 of `KEY`."""
    made = rebuilt.contents(rebuilt.arguments(**arguments))
    tensors = [without_layer_1(tensor) for tensor in made.tensors]
    return dataclasses.replace(made, tensors=tensors)


def without_layer_1(tensor: GlobalTensor) -> GlobalTensor:
    if tensor.key != KEY or tensor.kind in MODEL_KINDS:
        return tensor
    boxes = tuple(box for box in tensor.boxes if box[0][0] != 1)
    assert 0 < len(boxes) < len(tensor.boxes)
    return dataclasses.replace(tensor, boxes=boxes)


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_a_frozen_layer_under_a_shared_key_stays_frozen_or_is_refused_before_a_write(
    tmp_path: Path, distributed: bool
) -> None:
    made = frozen_layer(use_distributed_optimizer=distributed)
    save_as_ranks(made, tmp_path / "ours", replicas=2)
    opened = open_source(tmp_path / "ours", rebuilt.ITERATION, Options())
    convert(opened, tmp_path / "again", "flashckpt", Options())
    again = open_source(tmp_path / "again", rebuilt.ITERATION, Options()).contents
    assert {t.name: t.boxes for t in again.tensors} == {t.name: t.boxes for t in made.tensors}
    weights = Options(weights_only=True)
    for to in ("torch_dist", "torch"):
        with pytest.raises(UnsupportedError, match=rf"under {KEY} were frozen .*--weights-only"):
            convert(opened, tmp_path / to, to, Options())
        assert not (tmp_path / to).exists()
        weights_opened = open_source(tmp_path / "ours", rebuilt.ITERATION, weights)
        convert(weights_opened, tmp_path / to, to, weights)


def without_last_parameter(saved: dict[str, Any]) -> None:
    """Remove a parameter from the state of a plain optimizer, as if it had been frozen."""
    optimizer = saved["optimizer"]
    group = max(optimizer["optimizer"]["param_groups"], key=lambda group: len(group["params"]))
    number = optimizer["optimizer"]["param_groups"].index(group)
    del optimizer["optimizer"]["state"][group["params"].pop()]
    optimizer["fp32_from_fp16_params"][number].pop()


def without_last_elements(saved: dict[Any, Any]) -> None:
    """Shorten the buffer of a distributed optimizer, as if its last parameter had been frozen."""
    (of_dtype,) = saved[0].values()
    of_dtype["numel_unpadded"] -= 64
    for name in ("param", "exp_avg", "exp_avg_sq"):
        of_dtype[name] = of_dtype[name][:-64].clone()


@pytest.mark.parametrize(
    ("distributed", "file", "freeze"),
    [(False, MODEL_FILE, without_last_parameter), (True, OPTIMIZER_FILE, without_last_elements)],
    ids=["plain", "distributed"],
)
def test_megatrons_files_of_a_job_with_frozen_parameters_are_refused_with_the_reason(
    tmp_path: Path, distributed: bool, file: str, freeze: Callable[[Any], None]
) -> None:
    made = rebuilt.contents(rebuilt.arguments(use_distributed_optimizer=distributed))
    path = write_legacy(made, tmp_path / "stock", Options()) / "mp_rank_00" / file
    saved = torch.load(path, weights_only=False)
    freeze(saved)
    torch.save(saved, path)
    with pytest.raises(FlashCkptError, match=r"had frozen .* the format flashckpt; or .*--weights"):
        open_source(tmp_path / "stock", rebuilt.ITERATION, Options())
    open_source(tmp_path / "stock", rebuilt.ITERATION, Options(weights_only=True))
