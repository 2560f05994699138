"""The lines that rank 0 prints before the first step."""

from __future__ import annotations

import pytest

from megatron_flashckpt.save.start_message import rendezvous_warning


@pytest.mark.parametrize(
    ("agent_store", "restarts", "shares", "is_warned"),
    [
        ("True", "3", True, True),
        ("False", "3", True, False),  # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
        ("True", "0", True, False),
        ("True", "3", False, False),
        (None, "3", True, False),
    ],
)
def test_restarts_that_torchrun_cannot_make_are_named_at_the_start(
    agent_store: str | None, restarts: str, shares: bool, is_warned: bool
) -> None:
    environ = {"TORCHELASTIC_MAX_RESTARTS": restarts}
    if agent_store is not None:
        environ["TORCHELASTIC_USE_AGENT_STORE"] = agent_store
    lines = rendezvous_warning(environ, shares=shares)
    assert any("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in line for line in lines) == is_warned
