"""Spaces between the parts of a save, on a clock that the tests own."""

from __future__ import annotations

import threading

import pytest

from megatron_flashckpt.save import copy_pace
from megatron_flashckpt.save.copy_pace import BUSY_SHARE, CopyPace

PART = 64 << 20


class Gpu:
    """Clock, and an engine that copies each part when the part before has ended."""

    def __init__(self, bytes_per_s: float) -> None:
        self.now = 1000.0
        self.bytes_per_s = bytes_per_s
        self.idle_at = 0.0
        """When the engine ends the last enqueued part."""
        self.hurry = threading.Event()
        self.hurry.wait = self.sleep  # type: ignore[method-assign, assignment]

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> bool:
        self.now += seconds
        return self.hurry.is_set()

    def record(self) -> Event:
        return Event(self, max(self.idle_at, self.now))


class Event:
    def __init__(self, gpu: Gpu, at: float) -> None:
        self._gpu, self.at = gpu, at

    def query(self) -> bool:
        return self._gpu.now >= self.at

    def synchronize(self) -> None:
        self._gpu.now = max(self._gpu.now, self.at)

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu(50e9)
    monkeypatch.setattr(copy_pace, "timed_event", made.record)
    monkeypatch.setattr(copy_pace, "time", made)
    return made


def enqueue(gpu: Gpu, pace: CopyPace, count: int = 1, nbytes: int = PART) -> float:
    """Enqueue parts in their turn; return for how many seconds the engine idled before the last."""
    for _ in range(count):
        pace.await_turn(gpu.hurry)
        with pace.part(nbytes):
            begin = max(gpu.idle_at, gpu.now)
            idle_s = begin - gpu.idle_at
            gpu.idle_at = begin + nbytes / gpu.bytes_per_s
    return idle_s


def test_the_second_part_waits_for_the_first_whose_rate_is_unknown(gpu: Gpu) -> None:
    pace = CopyPace(PART)
    enqueue(gpu, pace)
    assert pace.bytes_per_s is None
    first_ends = gpu.idle_at
    enqueue(gpu, pace)
    assert gpu.now >= first_ends
    assert pace.bytes_per_s == pytest.approx(50e9)


@pytest.mark.parametrize("bytes_per_s", [3e9, 50e9])
def test_the_engine_is_idle_between_parts_for_a_small_share_of_time(
    gpu: Gpu, bytes_per_s: float
) -> None:
    gpu.bytes_per_s = bytes_per_s
    pace = CopyPace(PART)
    for _ in range(3):
        enqueue(gpu, pace)
        gpu.now = gpu.idle_at
    part_s = PART / bytes_per_s
    for _ in range(20):
        assert enqueue(gpu, pace) == pytest.approx(part_s * (1 / BUSY_SHARE - 1))


def test_parts_slow_down_within_a_save_when_the_bus_does(gpu: Gpu) -> None:
    pace = CopyPace(PART)
    enqueue(gpu, pace, 8)
    gpu.bytes_per_s /= 2
    enqueue(gpu, pace, 40)
    assert pace.bytes_per_s == pytest.approx(25e9)
    assert gpu.idle_at - gpu.now < 8 * PART / 25e9, "40 parts at the former rate would leave 20"


def test_lateness_adds_up_only_beyond_a_gap(gpu: Gpu) -> None:
    pace = CopyPace(PART)
    enqueue(gpu, pace, 5)
    interval_s = PART / (BUSY_SHARE * 50e9)
    gap_s = interval_s * (1 - BUSY_SHARE)
    for late_s, added_s in ((0.9 * gap_s, 0.0), (0.0, 0.0), (1.0, 1.0 - gap_s)):
        pace.await_turn(gpu.hurry)
        on_time = gpu.now
        gpu.now += late_s
        enqueue(gpu, pace)
        pace.await_turn(gpu.hurry)
        assert gpu.now == pytest.approx(on_time + interval_s + added_s)


def test_parts_that_are_small_or_delayed_by_kernels_do_not_count(gpu: Gpu) -> None:
    """With one connection, kernels launched between the events of a part run between them."""
    pace = CopyPace(PART)
    gpu.bytes_per_s = 1e6  # the time of a call, not of its bytes
    enqueue(gpu, pace, 10, nbytes=1000)
    assert pace.bytes_per_s is None
    for number in range(20):
        gpu.bytes_per_s = 5e9 if number % 8 in (4, 6) else 50e9
        enqueue(gpu, pace)
        gpu.now = max(gpu.now, gpu.idle_at)
    assert pace.bytes_per_s == pytest.approx(50e9)


def test_nothing_waits_when_the_optimizer_s_step_does(gpu: Gpu) -> None:
    pace = CopyPace(PART)
    enqueue(gpu, pace, 5)
    gpu.hurry.set()
    gpu.hurry.wait = lambda timeout: True  # type: ignore[method-assign, assignment]
    before = gpu.now
    enqueue(gpu, pace, 50)
    assert gpu.now == before
