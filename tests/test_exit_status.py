"""Calls of `sys.exit` that determine the exit status of a process.

`tests/integration/test_ends.py` tests whole jobs.
"""

from __future__ import annotations

import sys
import threading

import pytest

from megatron_flashckpt import exit_status


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    # Another test of this process may have begun to watch.
    monkeypatch.setattr(sys, "exit", exit_status._exit or sys.exit)
    monkeypatch.delattr(sys, "last_value", raising=False)
    monkeypatch.setattr(exit_status, "_exit", None)
    monkeypatch.setattr(exit_status, "_chosen", None)
    exit_status.watch()


@pytest.mark.parametrize(("status", "success"), [(None, True), (0, True), (3, False), ("", False)])
def test_the_main_thread_chooses_the_status(status: object, success: bool) -> None:
    with pytest.raises(SystemExit) as raised:
        sys.exit(status)  # type: ignore[arg-type]
    assert raised.value.code == status
    assert exit_status.is_success() is success


def test_a_thread_that_exits_does_not_choose_the_status() -> None:
    """If the thread's call counted, a job whose last save failed would exit with status 0."""
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()
    assert exit_status.is_success()
