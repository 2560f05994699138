"""Measurement of the training loop's wait for a save."""

from __future__ import annotations

import threading

import pytest

from megatron_flashckpt.save.loop_timer import LoopTimer
from megatron_flashckpt.tracing import SAVE, Recorder
from tests.support.trainer import PATIENCE_S


def test_a_save_in_a_measured_call_gets_the_time_of_the_call() -> None:
    timer, recorder = LoopTimer(), Recorder(in_loop=True)
    with timer.measure():
        assert timer.is_running
        with recorder.phase(SAVE):
            pass
        timer.saved(recorder)
        threading.Event().wait(0.02)
    assert recorder.blocked_s >= 0.02 > recorder.seconds[SAVE]
    assert not timer.is_running


def test_a_save_outside_a_measured_call_keeps_its_own_time() -> None:
    timer, recorder = LoopTimer(), Recorder()
    with recorder.phase(SAVE):
        pass
    timer.saved(recorder)
    with timer.measure():
        threading.Event().wait(0.02)
    assert recorder.blocked_s == recorder.seconds[SAVE]


def test_a_failing_measured_call_measures_its_save_and_ends() -> None:
    timer, recorder = LoopTimer(), Recorder(in_loop=True)

    def save_and_fail() -> None:
        with timer.measure():
            timer.saved(recorder)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        save_and_fail()
    assert recorder.blocked_s > 0
    assert not timer.is_running


def test_a_thread_that_awaits_the_loop_continues_when_the_call_returns() -> None:
    timer, recorder = LoopTimer(), Recorder(in_loop=True)
    waiting = threading.Thread(target=recorder.await_loop, args=(2 * PATIENCE_S,))
    with timer.measure():
        timer.saved(recorder)
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
