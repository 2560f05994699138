"""Histories of jobs, as the agent and rank 0 write them."""

from __future__ import annotations

from pathlib import Path

from megatron_flashckpt.agent.janitor import CommittedSave
from megatron_flashckpt.catalog.history import PastSave, PastStart, events
from megatron_flashckpt.catalog.lineage import History, Save
from megatron_flashckpt.config import Retention
from megatron_flashckpt.file_format.file_names import run_name, save_name
from megatron_flashckpt.layout.save_cost import SaveCost
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.store import Store

GB = 10**9


def saves_in(root: Path) -> list[PastSave]:
    """Return the saves in the history of a save directory, oldest first."""
    return [event for event in events(open_store(root)) if isinstance(event, PastSave)]


def committed_save(
    store: Store,
    save: Save,
    history: History,
    rules: Retention = Retention(),  # noqa: B008, frozen
) -> CommittedSave:
    """Return a committed save, after which the janitor works for the run of `history`."""
    return CommittedSave(
        store=store,
        iteration=save.iteration,
        save_id=save.save_id,
        history=history,
        rules=rules,
        retain_interval=None,
        previous=None,
    )


def run_of_saves(
    number: int, at: float, iterations: range, source: str
) -> list[PastStart | PastSave]:
    """Return a start at `at` seconds and saves; an iteration takes 2 s, from 10 s after the start.

    A save blocks 0.1 s, is staged after 1 s and durable after 5 s.
    """
    name = run_name(number, "aaaa")
    saves = [
        PastSave(
            iteration=iteration,
            save_id=save_name(name, sequence),
            ended_at=0.0,
            seconds=4.0,
            world_size=16,
            cost=SaveCost(
                nbytes=8 * GB,
                started_at=at + 10 + 2.0 * (iteration - iterations.start),
                blocked_s=0.1,
                staged_s=1.0,
                persisted_s=4.5,
                slowest=3,
                durable_s=5.0,
            ),
        )
        for sequence, iteration in enumerate(iterations, 1)
    ]
    return [PastStart(run=name, started_at=at, source=source, world_size=16), *saves]


def history(interruptions: int) -> list[PastStart | PastSave]:
    past = run_of_saves(1, 0.0, range(50, 201, 50), "scratch")
    for number in range(2, interruptions + 2):
        past += run_of_saves(number, number * 1e4, range(200, 351, 50), "memory")
    return past
