"""The record of one save on one rank: what blocks training, and what is sent."""

from __future__ import annotations

import threading

import pytest

from megatron_flashckpt.tracing import LOOP, SAVE, WAIT, Recorder, Span, phase
from tests.support.trainer import PATIENCE_S


def test_the_call_and_later_waits_of_its_thread_block_training() -> None:
    """The thread that searches for another agent also waits for copies."""
    recorder = Recorder()
    recorder.seconds[SAVE] = 4.0
    recorder.spans += [
        Span(WAIT, "MainThread", 1.0, 2.0),
        Span(SAVE, "MainThread", 0.0, 4.0),
        Span(WAIT, "flashckpt-replace", 8.0, 3.0),
        Span(WAIT, "MainThread", 9.0, 0.5),
    ]
    assert (recorder.call_s, recorder.step_s, recorder.blocked_s) == (4.0, 0.5, 4.5)
    recorder.step_on_gpu_s = 0.25
    assert recorder.blocked_s == 4.75


def test_a_save_in_the_loops_call_has_blocked_for_the_whole_call() -> None:
    recorder = Recorder(LOOP)
    with recorder.recording(), recorder.phase(LOOP):
        recorder.restart()
        with phase(SAVE):
            pass
        with phase(WAIT):
            threading.Event().wait(0.02)
    cost, spans = recorder.record(3.0, "computed", 0.0)
    assert [span.name for span in spans] == [SAVE, WAIT, LOOP]
    assert recorder.blocked_s == cost.blocked_s == recorder.seconds[LOOP] >= 0.02
    assert (cost.staged_s, cost.plan) == (3.0, "computed")


def test_a_record_waits_for_the_end_of_the_call_also_by_an_error() -> None:
    recorder, records = Recorder(LOOP), []
    sending = threading.Thread(
        target=lambda: records.append(recorder.record(1.0, "kept", 2 * PATIENCE_S))
    )

    def fail() -> None:
        with recorder.phase(LOOP):
            sending.start()
            sending.join(0.05)
            assert sending.is_alive()
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    sending.join(PATIENCE_S)
    ((cost, _),) = records
    assert cost.blocked_s == recorder.seconds[LOOP]


def test_phases_that_run_when_the_record_is_sent_end_then() -> None:
    """For example the wait for copies: its thread wakes up after the copies have ended."""
    recorder = Recorder()
    with recorder.phase(SAVE), recorder.phase(WAIT):
        threading.Event().wait(0.02)
        cost, spans = recorder.record(1.0, "kept", 0.0)
    assert [span.name for span in spans] == [SAVE, WAIT]
    assert 0.02 <= spans[1].seconds <= spans[0].seconds == cost.blocked_s <= recorder.call_s
    assert len(recorder.spans) == 2


def test_chunks_of_a_large_shard_are_counted_but_not_listed() -> None:
    recorder = Recorder()
    with recorder.recording():
        for _ in range(1000):
            with phase("write"):
                pass
    assert len(recorder.spans) < 300
    assert recorder.seconds["write"] > sum(span.seconds for span in recorder.spans)
