"""Variants of saves in section M: each leaves out what its name says, and no later save does."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flashckpt.agent import __main__ as agent
from megatron_flashckpt.agent.rank_slots import SlotInfo
from megatron_flashckpt.memory import cuda
from megatron_flashckpt.memory.runs import Copy
from tests.simulated_gpu import simulated_gpus
from tools.gpu_check import machine, undigested_agent
from tools.gpu_check.variants import VARIANTS

NBYTES = 1 << 20


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.setenv("FLASHCKPT_RUNTIME_DIR", str(tmp_path / "run"))
    with simulated_gpus(8, memory_nbytes=1 << 24) as node:
        monkeypatch.setattr(machine, "simulated_node", node)
        torch.cuda.set_device(5)
        with machine.staging(1, NBYTES, part_nbytes=NBYTES) as (_, stager):
            link = SimpleNamespace(stager=stager, _pin=lambda hurry: stager.pin(None, hurry=hurry))
            link._pin(hurry=True)
            stager.wait_pinned()
            yield link


def saved(link: Any) -> tuple[int, bool, bool]:
    """Return the copied bytes, whether they are page-locked, and whether the cache stays."""
    source = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    figures = link.stager.stage([source], [], [Copy(0, 0)], lambda *_: None, data_offset=4096)
    link.stager.wait()
    empty_cache = torch.cuda.empty_cache
    with cuda.cache_kept():
        keeps_cache = torch.cuda.empty_cache is not empty_cache
    return figures.nbytes, bool(figures.locked_nbytes), keeps_cache


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no digests by the agent", (NBYTES, True, True)),
        ("cache returned as Megatron does", (NBYTES, True, False)),
        ("not page-locked", (NBYTES, False, True)),
        ("no copies", (0, True, True)),
    ],
)
def test_a_variant_changes_saves_until_it_ends(link: Any, name: str, expected: object) -> None:
    with VARIANTS[name](link):
        assert saved(link) == expected
    assert saved(link) == (NBYTES, True, True)


def test_the_agent_never_digests_a_slot_that_settled_while_digests_were_off(
    monkeypatch: pytest.MonkeyPatch, link: Any
) -> None:
    monkeypatch.setattr(agent, "main", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["-m", "megatron_flashckpt.agent", "--key"])
    monkeypatch.setattr(SlotInfo, "has_settled", SlotInfo.has_settled)  # restored afterwards
    undigested_agent.main()
    info, usual = (SimpleNamespace(accepted_at=1.0, persisting=False) for _ in range(2))
    with VARIANTS["no digests by the agent"](link):
        assert not SlotInfo.has_settled(info, 2.0)
    assert info.accepted_at == math.inf
    assert SlotInfo.has_settled(usual, 2.0)
