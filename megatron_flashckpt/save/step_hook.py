"""A hook that makes `optimizer.step()` wait for running copies of the tensors that it changes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatron_flashckpt import forks


class StepHook:
    """Waits before each step, and counts the steps. Installs itself once per optimizer.

    The hook covers the inner torch optimizers, by their own pre-hooks. It also covers the optimizer
    that training calls, which changes masters before the inner step if gradients are scaled. It
    never wraps a sub-optimizer's `step`, because chained optimizers do not call that method.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait_in_parent = wait
        self._fork_depth = forks.depth()
        self._hooked: weakref.WeakSet[Any] = weakref.WeakSet()
        self.steps = 0

    def _wait(self) -> None:
        # A forked child has no copy thread, and its tensors are copies of the parent's.
        if forks.depth() == self._fork_depth:
            self._wait_in_parent()

    def install(self, top: Any, inner: Iterable[torch.optim.Optimizer]) -> None:
        """Wrap `top.step`, and register pre-hooks with `inner`; skip optimizers already hooked."""
        for optimizer in inner:
            if optimizer not in self._hooked:
                self._hooked.add(optimizer)
                optimizer.register_step_pre_hook(lambda *_: self._wait())
        if top is not None and top not in self._hooked:
            self._hooked.add(top)
            step = top.step

            @functools.wraps(step)
            def waiting_step(*args: Any, **kwargs: Any) -> Any:
                self._wait()
                self.steps += 1
                return step(*args, **kwargs)

            top.step = waiting_step
