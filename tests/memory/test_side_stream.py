"""What the GPU is asked for when tensors are staged from it, in which order, and who waits.

No machine of these tests has a GPU: streams and events are doubles that note what they were asked
for. Copies are made at once, and yet the double of the device is not done before it is told so.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch

from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.stager import Copy, Stager
from tests.memory.test_stager import PATIENCE_S, Finish, bytes_at, raw


class OnGpu(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.Tensor._make_subclass(OnGpu, tensor)


class Device:
    """The doubles of one GPU: two streams, and what they and their events were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.done = threading.Event()
        self.capturing = False
        self.main = Stream(self, "main")
        self.side = Stream(self, "side")
        self._events = 0
        foreach_copy = torch._foreach_copy_

        def copied(targets, sources, non_blocking=False):
            self.log.append(f"copy {len(sources)}")
            foreach_copy(targets, sources, non_blocking=non_blocking)

        monkeypatch.setattr(torch, "_foreach_copy_", copied)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.side)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        # Of the training thread: the copy thread has one of its own, which nothing may go by.
        self._training = threading.current_thread()
        monkeypatch.setattr(torch.cuda, "current_stream", self._current_stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def _current_stream(self) -> Stream:
        assert threading.current_thread() is self._training
        return self.main

    def event(self) -> Event:
        self._events += 1
        return Event(self, self._events)


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self._device, self._name = device, name

    def record_event(self) -> Event:
        event = self._device.event()
        self._device.log.append(f"{self._name} records {event.number}")
        return event

    def wait_event(self, event: Event) -> None:
        self._device.log.append(f"{self._name} waits for {event.number}")

    def wait_stream(self, other: Stream) -> None:
        self._device.log.append(f"{self._name} waits for {other._name}")

    def synchronize(self) -> None:
        assert self._device.done.wait(PATIENCE_S)


class Event:
    def __init__(self, device: Device, number: int) -> None:
        self._device, self.number = device, number

    def synchronize(self) -> None:
        assert self._device.done.wait(PATIENCE_S)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


@pytest.fixture
def slab() -> Iterator[Slab]:
    made = Slab.create(1, 0, 64 << 20, "0")
    yield made
    made.close()


@pytest.fixture
def stager(device: Device, slab: Slab) -> Iterator[Stager]:
    made = Stager()
    made.use(slab, cuda_device=0, pin=False)
    yield made
    device.done.set()
    made.close()


def copies(slab: Slab, tensors: list[torch.Tensor], early: int = 0) -> list[Copy]:
    offset, found = slab.slots[0].data_offset, []
    for number, tensor in enumerate(tensors):
        found.append(Copy(tensor, offset, number < early))
        offset += tensor.nbytes
    return found


def test_the_step_is_ordered_behind_the_copies_and_the_thread_goes_on(
    device: Device, slab: Slab, stager: Stager
) -> None:
    finish = Finish()
    weight = torch.arange(1000.0)
    stager.stage(copies(slab, [on_gpu(weight)]), finish)
    stager.before_change()
    assert not device.done.is_set(), "the copies are still being made"
    assert device.log == [
        "main records 1",
        "main waits for side",
        "side waits for 1",
        "copy 1",
        "side records 2",
        "main waits for 2",
    ]
    assert finish.calls == [], "nothing is handed over before all is copied"
    device.done.set()
    stager.wait()
    assert [error for _, error in finish.calls] == [None]
    assert bytes_at(slab, slab.slots[0].data_offset, weight.nbytes) == raw(weight)
    before = list(device.log)
    stager.before_change()
    assert device.log == before, "a step without copies under way waits for nothing"


def test_what_the_next_forward_may_change_is_copied_before_anything_else_of_its_stream(
    device: Device, slab: Slab, stager: Stager
) -> None:
    tensors = [on_gpu(torch.full((10,), float(number))) for number in range(2)]
    stager.stage(copies(slab, tensors, early=1), Finish())
    stager.before_change()
    assert device.log[:4] == ["main records 1", "side waits for 1", "copy 1", "main waits for side"]
    assert device.log[4:] == ["side waits for 1", "copy 1", "side records 2", "main waits for 2"]


@pytest.mark.parametrize("why", ["a source in host memory", "the stream is being captured"])
def test_what_the_device_cannot_be_made_to_wait_for_the_thread_waits_for(
    device: Device, slab: Slab, stager: Stager, why: str
) -> None:
    device.capturing = why == "the stream is being captured"
    weight = torch.ones(10)
    other = on_gpu(torch.ones(10)) if device.capturing else torch.ones(10)
    stager.stage(copies(slab, [on_gpu(weight), other]), Finish())
    threading.Timer(0.2, device.done.set).start()
    stager.before_change()
    assert device.done.is_set()
    assert "main waits for 2" not in device.log


def test_a_copy_that_cannot_be_asked_for_holds_no_step_up_but_all_that_the_others_use(
    device: Device, slab: Slab, stager: Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch, "_foreach_copy_", refuse)
    finish = Finish()
    stager.stage(copies(slab, [on_gpu(torch.ones(10))]), finish)
    stager.before_change()
    waiting = threading.Thread(target=stager.wait)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive(), "what was asked for before may still be copied"
    assert finish.calls == []
    device.done.set()
    waiting.join(PATIENCE_S)
    ((_, error),) = finish.calls
    assert str(error) == "no such device"
