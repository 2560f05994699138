"""Loads use a rank's GPU as its training thread does; CUDA's calls are recorded, none is made."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from megatron_flashckpt.restore import gpu


def test_a_buffer_that_cannot_be_page_locked_is_an_ordinary_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_empty = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return real_empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    with caplog.at_level(logging.WARNING):
        buffer = gpu.host_buffer(24, pinned=True)
    assert (buffer.shape, buffer.dtype, buffer.device.type) == ((24,), torch.uint8, "cpu")
    assert [record.getMessage() for record in caplog.records] == [
        "a buffer of 24 bytes could not be page-locked (CUDA error: out of memory), so this load "
        "copies to the GPU more slowly; look for a limit on locked memory of this process or "
        "container"
    ]


@pytest.mark.parametrize("pinned", [True, False])
def test_only_a_rank_with_a_gpu_asks_for_page_locked_memory(
    monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    asked: list[bool] = []
    real_empty = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return real_empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    gpu.host_buffer(8, pinned=pinned)
    assert asked == [pinned]
