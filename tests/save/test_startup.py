"""The order of the phases of `Startup`, its questions after each step, and its warning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.save import startup as startup_module
from megatron_flashckpt.save.start_message import rendezvous_warning
from megatron_flashckpt.save.startup import Startup


@pytest.mark.parametrize(
    ("is_preparing", "has_states", "asked", "is_done"),
    [
        pytest.param(True, True, ["has_states"], False, id="preparing"),
        pytest.param(False, False, ["has_states"], False, id="before the optimizer's first step"),
        pytest.param(False, True, ["has_states", "dry_run"], True, id="ready"),
    ],
)
def test_no_step_waits_for_agent_and_slab(
    is_preparing: bool,
    has_states: bool,
    asked: list[str],
    is_done: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until both are ready, only a cheap question is asked."""
    questions: list[str] = []

    def ask(question: str, answer: Any) -> Any:
        questions.append(question)
        return answer

    checkpointer: Any = SimpleNamespace(
        link=SimpleNamespace(is_preparing=is_preparing),
        rank=0,
        dry_run=lambda *_: ask("dry_run", None),
    )
    monkeypatch.setattr(startup_module, "has_states", lambda _: ask("has_states", has_states))
    startup = Startup(checkpointer, lambda _: None)
    assert startup.dry_run(JobState(chunks=[], optimizer=object())) == is_done
    assert questions == asked


def test_the_slab_is_begun_when_no_phase_would_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `redundancy`, introducing the agents waited until the slab was allocated."""
    phases: list[str] = []

    def note(phase: str, result: Any = None) -> Any:
        return lambda *_: phases.append(phase) or result

    expected = SimpleNamespace(nbytes=1, plan_nbytes=2)
    checkpointer: Any = SimpleNamespace(link=SimpleNamespace(prepare=note("slab")))
    startup = Startup(checkpointer, lambda _: None)
    for name in ("check_ranks", "await_end", "reserve", "agree"):
        monkeypatch.setattr(startup, f"_{name}", note(name))
    monkeypatch.setattr(startup, "_check_coverage", note("check_coverage", expected))
    for _ in range(2):  # in the load, or when the model is built; and in the first step
        startup.prepare(JobState(chunks=[]))
    assert phases == ["check_ranks", "await_end", "check_coverage", "reserve", "agree", "slab"]


def test_the_dry_run_encodes_what_rank_0_saves_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    link = SimpleNamespace(is_preparing=False)
    checkpointer: Any = SimpleNamespace(link=link, rank=0, dry_run=lambda *_: None)
    monkeypatch.setattr(startup_module, "has_states", lambda _: True)
    scheduler = SimpleNamespace(state_dict=lambda: {"rate": lambda step: 1.0})
    job = JobState(chunks=[], optimizer=object(), scheduler=scheduler)
    with pytest.raises(UnsupportedError, match="opt_param_scheduler"):
        Startup(checkpointer, lambda _: None).dry_run(job)


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
