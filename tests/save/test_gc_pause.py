"""Pause of the garbage collector inside the context, and its restored state afterwards."""

from __future__ import annotations

import gc

import pytest

from megatron_flashckpt.save.gc_pause import gc_paused


class OddError(Exception):
    """Error that a test raises inside the context."""


def test_the_collector_is_off_inside_and_on_again_after_it() -> None:
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(OddError), gc_paused():
        raise OddError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
