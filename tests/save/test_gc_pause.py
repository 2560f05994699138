"""The collector rests inside the context, and is left as it was found."""

from __future__ import annotations

import gc

import pytest

from megatron_flashckpt.save.gc_pause import gc_paused


class OddError(Exception):
    """What goes wrong in the context."""


def test_nothing_is_collected_inside_and_everything_after_it() -> None:
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
