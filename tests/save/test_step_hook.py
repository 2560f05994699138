"""Hook of the optimizer step: the step waits for the copies of the tensors that it changes."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.save.step_hook import StepHook
from tests.save.test_stager import PATIENCE_S, HeldStager, bytes_at, raw
from tests.support.staging import TensorCopy, stage


def parameter() -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(8))
    made.grad = torch.full((8,), 0.5)
    return made


class Top:
    """Top-level optimizer: its `step` changes masters, then steps the inner optimizer."""

    def __init__(self, inner: torch.optim.Optimizer, master: torch.Tensor) -> None:
        self.inner = inner
        self.master = master

    def step(self, scale: float = 1.0, *, flag: bool = True) -> tuple[float, bool]:
        """Docstring of the real step."""
        self.master.mul_(2.0)
        self.inner.step()
        return scale, flag


class Waits:
    """A wait function that records its calls and the watched tensor at each call."""

    def __init__(self, watched: torch.Tensor) -> None:
        self.watched = watched
        self.seen: list[torch.Tensor] = []

    def __call__(self) -> None:
        self.seen.append(self.watched.detach().clone())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD([p], lr=0.1),
        lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam([p], lr=0.1),
        lambda p: torch.optim.AdamW([p], lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW([p], lr=0.1, fused=True),
    ],
)
def test_a_real_optimizer_waits_before_its_first_change(make: Any) -> None:
    weight = parameter()
    optimizer = make(weight)
    waits = Waits(weight)
    StepHook(waits).install(None, [optimizer])
    for number in range(1, 4):
        before = weight.detach().clone()
        optimizer.step()
        assert len(waits.seen) == number
        assert torch.equal(waits.seen[-1], before)
        assert not torch.equal(weight, before)


def test_the_top_level_step_waits_before_it_changes_masters_and_alone_counts() -> None:
    master = torch.ones(4)
    inner = torch.optim.SGD([parameter()], lr=0.1)
    top = Top(inner, master)
    waits = Waits(master)
    hook = StepHook(waits)
    for _ in range(5):  # every save installs the hook
        hook.install(top, [inner])
    assert hook.steps == 0
    assert top.step(3.0, flag=False) == (3.0, False), "arguments and result pass through"
    assert torch.equal(waits.seen[0], torch.ones(4))
    assert top.step.__doc__ == "Docstring of the real step."
    top.step()
    assert (hook.steps, len(waits.seen)) == (2, 4), "the inner optimizer waits, too"

    def closure() -> float:
        assert len(waits.seen) == 5
        return 7.0

    assert inner.step(closure) == 7.0
    assert hook.steps == 2


def test_a_later_optimizer_is_hooked_too_and_none_is_kept_alive() -> None:
    first, second = (torch.optim.SGD([parameter()], lr=0.1) for _ in range(2))
    top = Top(second, torch.ones(1))
    waits = Waits(torch.ones(1))
    hook = StepHook(waits)
    hook.install(None, [first])
    second.step()
    assert len(waits.seen) == 0
    hook.install(top, [first, second])
    second.step()
    first.step()
    assert len(waits.seen) == 2
    references = [weakref.ref(optimizer) for optimizer in (first, second, top)]
    del first, second, top
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_the_slot_holds_the_weights_from_before_the_step() -> None:
    """The stager and the hook work together: a copy still runs at the step."""
    slab = Slab.create(1, 0, 4096, "0")
    stager = HeldStager()
    stager.use(slab, device=None)
    weight = parameter()
    optimizer = torch.optim.Adam([weight], lr=0.1)
    StepHook(stager.before_change).install(None, [optimizer])
    before = weight.detach().clone()
    offset = slab.slots[0].data_offset
    stage(stager, [TensorCopy(weight.detach(), offset, False)], lambda *_: None)
    stepping = threading.Thread(target=optimizer.step)
    stepping.start()
    stepping.join(0.2)
    assert stepping.is_alive(), "the step waits"
    assert torch.equal(weight, before)
    stager.gate.set()
    stepping.join(PATIENCE_S)
    assert not torch.equal(weight, before)
    assert bytes_at(slab, offset, 32) == raw(before)
    stager.close()
    slab.close()
