"""Announcement of a save: once, with the time for which the training loop waited."""

from __future__ import annotations

import threading

import pytest

from megatron_flashckpt.save.loop_timer import LoopTimer
from megatron_flashckpt.tracing import Recorder
from tests.support.trainer import PATIENCE_S


class AnnouncedSeconds(list[tuple[float, str]]):
    """Announced seconds, with the place of each measurement."""

    def __call__(self, seconds: float, where: str) -> None:
        self.append((seconds, where))


def test_a_save_outside_a_measured_call_is_announced_at_once() -> None:
    announced = AnnouncedSeconds()
    LoopTimer().staged(Recorder(), 0.25, announced)
    assert announced == [(0.25, "in save_checkpoint")]


def test_a_save_in_a_measured_call_is_announced_when_the_call_returns() -> None:
    timer, announced, recorder = LoopTimer(), AnnouncedSeconds(), Recorder(in_loop=True)
    with timer.measure():
        assert timer.is_running
        timer.staged(recorder, 0.25, announced)
        assert announced == []
    ((seconds, where),) = announced
    assert where == "as the training loop sees it"
    assert recorder.blocked_s == seconds
    assert not timer.is_running


def test_a_measured_call_without_a_save_announces_nothing() -> None:
    timer, announced = LoopTimer(), AnnouncedSeconds()
    with timer.measure():
        timer.staged(Recorder(in_loop=True), 0.25, announced)
    announced.clear()
    with timer.measure():
        pass
    assert announced == []
    timer.staged(Recorder(), 0.5, announced)
    assert announced == [(0.5, "in save_checkpoint")]


def test_a_failing_measured_call_announces_its_save_and_ends() -> None:
    timer, announced = LoopTimer(), AnnouncedSeconds()

    def save_and_fail() -> None:
        with timer.measure():
            timer.staged(Recorder(in_loop=True), 0.25, announced)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        save_and_fail()
    assert len(announced) == 1
    assert not timer.is_running


def test_a_thread_that_awaits_the_loop_continues_when_the_call_returns() -> None:
    timer, recorder = LoopTimer(), Recorder(in_loop=True)
    waiting = threading.Thread(target=recorder.await_loop, args=(2 * PATIENCE_S,))
    with timer.measure():
        timer.staged(recorder, 0.25, AnnouncedSeconds())
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
