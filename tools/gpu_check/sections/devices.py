"""Rules: the package's threads set their device before any CUDA call; stored bytes are right."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from tools.gpu_check import machine
from tools.gpu_check.report import Report

#: Functions of `torch.cuda` that our threads call, in addition to `set_device`.
_CALLS = (
    *("stream", "current_stream", "current_device", "synchronize", "cudart", "mem_get_info"),
    *("empty_cache", "is_current_stream_capturing", "default_stream", "set_stream"),
    "get_device_properties",
)


@dataclasses.dataclass(frozen=True)
class Call:
    """CUDA call of a thread other than the training thread."""

    name: str
    thread: str
    device: int
    is_set: bool
    """True if the thread had set its device before the call."""


def run(report: Report) -> None:
    """Save, restart and save again, with wrappers around `torch.cuda`."""
    from tools.gpu_check.rank import Node, node

    device = torch.cuda.current_device()
    made: Node
    with noted() as calls, node() as made:
        tensors = _tensors()
        first = made.rank(tensors)
        first.checkpointer.link.prepare(first.nbytes + (1 << 20))
        for iteration in (1, 2):
            made.check_save(report, first, iteration, lambda: None)
        first.close()
        again = made.rank(tensors)
        slab, offers = again.checkpointer.link.take_slab()
        report.must("a restart finds its slots", slab is not None and offers[0].iteration == 2)
        again.checkpointer.link.prepare(None)
        again.checkpointer.link.wait_for_device_work()
        made.check_save(report, again, 3, lambda: None)
    unset = [call for call in calls if not call.is_set]
    elsewhere = [call for call in calls if call.is_set and call.device != device]
    report.figure("CUDA calls of our threads", len(calls), "calls", _names(calls))
    report.must("our threads set their device first", not unset, _described(unset))
    report.must(f"our threads work on device {device}", not elsewhere, _described(elsewhere))
    threads = {call.thread for call in calls}
    expected = {"flashckpt-stage", "flashckpt-prepare", "flashckpt-pin"}
    report.must("copy, prepare and pin thread were seen", expected <= threads, _names(calls))


def _tensors() -> list[torch.Tensor]:
    numel = machine.pick(16 << 20, 100_000)
    return [torch.arange(float(numel), device="cuda").add_(n) for n in range(4)]


@contextlib.contextmanager
def noted() -> Iterator[list[Call]]:
    """Record the CUDA calls of all other threads inside the context."""
    calls: list[Call] = []
    training, here = threading.get_ident(), threading.local()
    real_device = torch.cuda.current_device

    def note(name: str) -> None:
        if threading.get_ident() != training:
            is_set = getattr(here, "is_set", False)
            calls.append(Call(name, threading.current_thread().name, real_device(), is_set))

    def noting(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            note(name)
            return real(*args, **kwargs)

        return call

    def setting(real: Callable[..., Any]) -> Callable[..., Any]:
        def set_device(device: Any) -> None:
            real(device)
            here.is_set = True

        return set_device

    with contextlib.ExitStack() as stack:
        for name in _CALLS:
            wrapper = noting(name, getattr(torch.cuda, name))
            stack.enter_context(mock.patch.object(torch.cuda, name, wrapper))
        wrapper = setting(torch.cuda.set_device)
        stack.enter_context(mock.patch.object(torch.cuda, "set_device", wrapper))
        yield calls


def _names(calls: list[Call]) -> str:
    return ", ".join(sorted({call.thread for call in calls}))


def _described(calls: list[Call]) -> str:
    return ", ".join(sorted({f"{made.name} in {made.thread} on {made.device}" for made in calls}))
