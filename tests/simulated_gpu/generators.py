"""Random generator of a GPU for Megatron's tracker, on a machine without a GPU.

Numbers are drawn from the CPU's default generator. All other code is Megatron's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel import random as tracker_module


class DeviceGenerator:
    """Default generator of a GPU, whose state CUDA graphs can replay.

    On a GPU two generators share one state after `graphsafe_set_state`. Here the second generator
    is updated when its state is read or replaced.
    """

    def __init__(self) -> None:
        self._shares_state = torch.Generator()

    def get_state(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)

    def graphsafe_get_state(self) -> torch.Generator:
        self._shares_state.set_state(self.get_state())
        return self._shares_state

    def graphsafe_set_state(self, generator: torch.Generator) -> None:
        self.graphsafe_get_state()
        self._shares_state = generator
        self.set_state(generator.get_state())

    def clone_state(self) -> torch.Generator:
        clone = torch.Generator()
        clone.set_state(self.get_state())
        return clone


def _call(function: Callable[[], Any], **_: Any) -> None:
    function()


@contextlib.contextmanager
def gpu_random() -> Iterator[None]:
    """Let Megatron make its own tracker, of either kind, inside the context."""
    device = DeviceGenerator()
    namespace = {
        "get_rng_state": lambda device=None: torch.default_generator.get_state(),
        "set_rng_state": lambda state, device=None: torch.default_generator.set_state(state),
    }
    with (
        mock.patch.multiple(torch.cuda.random, **namespace),
        mock.patch.multiple(
            torch.cuda,
            **namespace,
            current_device=lambda: 0,
            default_generators=(device,),
            manual_seed=torch.default_generator.manual_seed,
        ),
        mock.patch.object(torch.cuda.CUDAGraph, "register_generator_state", None, create=True),
        mock.patch.multiple(
            tracker_module,
            _lazy_init=lambda: None,
            _lazy_call=_call,
            _CUDA_RNG_STATE_TRACKER=None,
            _CUDA_RNG_STATE_TRACKER_INITIALIZED=False,
        ),
    ):
        yield
