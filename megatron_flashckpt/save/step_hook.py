"""Make `optimizer.step()` wait for copies that are still being made of what it will change."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatron_flashckpt import forks


class StepHook:
    """Installs itself once per optimizer; also counts the steps.

    Both the inner torch optimizers (through their own pre-hook) and the instance that training
    calls are covered: the latter changes masters before the inner step where gradients are
    scaled. A sub-optimizer's `step` is never wrapped: chained optimizers do not call it.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait_in_parent = wait
        self._fork_depth = forks.depth()
        self._hooked: weakref.WeakSet[Any] = weakref.WeakSet()
        self.steps = 0

    def _wait(self) -> None:
        # The copy thread does not exist in a forked child, which has copies of the tensors anyway.
        if forks.depth() == self._fork_depth:
            self._wait_in_parent()

    def install(self, top: Any, inner: Iterable[torch.optim.Optimizer]) -> None:
        """Hook `top.step` and the pre-hooks of `inner`; does nothing for those already hooked."""
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
