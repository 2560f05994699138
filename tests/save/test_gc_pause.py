"""Pause of the garbage collector inside the context, and its restored state afterwards."""

from __future__ import annotations

import gc

import pytest

from megatron_flashckpt.save.gc_pause import gc_paused


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_off_inside_and_as_before_after_it(was_on: bool) -> None:
    def fail() -> None:
        with gc_paused():
            assert not gc.isenabled()
            raise ValueError("odd")

    assert gc.isenabled()
    try:
        if not was_on:
            gc.disable()
        with pytest.raises(ValueError, match="odd"):
            fail()
        assert gc.isenabled() is was_on
    finally:
        gc.enable()
