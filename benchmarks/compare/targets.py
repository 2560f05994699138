"""Targets of this project, compared with the figures of a run of `scripts/bench save`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.compare.report import median, summary
from benchmarks.study import Table

OURS, BLOCKING, RIVAL = "flashckpt", "flashckpt-blocking", "dlrover"
_MIB = 2**20
Row = dict[str, float | None]


@dataclasses.dataclass(frozen=True)
class Target:
    """One row: met if the figure is at most `limit`, or at least `limit` with `least`."""

    what: str
    limit: float
    reached: Callable[[dict[str, Any], Row], float | None]
    unit: str = ""
    least: bool = False
    beside: Callable[[dict[str, Any], Row], str] = lambda results, row: ""
    """Returns a second comparison, as text."""

    def met(self, reached: float) -> bool:
        return reached >= self.limit if self.least else reached <= self.limit


def _beyond_memcpy_ms(results: dict[str, Any], row: Row) -> float | None:
    """Return the blocked milliseconds beyond 5 % of a memcpy."""
    entry = results["systems"][OURS]
    pairs = zip(entry["blocked_s"], entry["memcpy_s"], strict=True)
    return median([1000 * (blocked - 0.05 * memcpy) for blocked, memcpy in pairs])


def _synchronous(results: dict[str, Any], row: Row) -> float | None:
    if BLOCKING not in results["systems"]:
        return None
    return summary(results, BLOCKING)["blocked_over_memcpy"]


def _by_tensor(seconds: Callable[[dict[str, Any], Row], float | None]) -> Callable[..., str]:
    """Return a function that compares `seconds` with a copy tensor by tensor, as text."""

    def comparison(results: dict[str, Any], row: Row) -> str:
        limit, took = median(results["limits"].get("memcpy_by_tensor_s")), seconds(results, row)
        return f"{took / limit:.2f} x a copy tensor by tensor" if limit and took else ""

    return comparison


def _blocking_s(results: dict[str, Any], row: Row) -> float | None:
    entry = results["systems"].get(BLOCKING)
    return median(entry.get("blocked_s")) if entry else None


def _against_rival(results: dict[str, Any], row: Row) -> float | None:
    if RIVAL not in results["systems"]:
        return None
    rival = summary(results, RIVAL)["training_lost_s"]
    ours = row["training_lost_s"]
    return ours / rival if rival and ours is not None else None


def _beside_slots_mib(results: dict[str, Any], row: Row) -> float | None:
    """Return the memory of a rank and its part of the agent, MiB, in addition to two slots."""
    if row["host_memory"] is None:
        return None
    return (row["host_memory"] - 2) * float(results["rank_nbytes"]) / _MIB


def _of(name: str) -> Callable[[dict[str, Any], Row], float | None]:
    return lambda _, row: row[name]


TARGETS = (
    Target("blocked, staging: deferred, beyond 5 % of a memcpy", 10, _beyond_memcpy_ms, "ms"),
    Target(
        "blocked, staging: blocking",
        1.15,
        _synchronous,
        "x memcpy",
        beside=_by_tensor(_blocking_s),
    ),
    Target("training lost per save, divided by DLRover's", 0.5, _against_rival, "x"),
    Target("CPU per GB made durable", 0.4, _of("cpu_s_per_gb"), "s"),
    Target("first save against later ones", 1.2, _of("first_over_later"), "x"),
    Target("durable, against a memcpy + a raw write", 1.15, _of("durable_over_copy_and_raw"), "x"),
    Target(
        "load from memory",
        0.7,
        _of("memory_share"),
        "of a memcpy",
        least=True,
        beside=_by_tensor(_of("memory_s")),
    ),
    Target("load, page cache warm", 0.6, _of("warm_share"), "of a raw read", least=True),
    Target("load, page cache cold", 0.9, _of("cold_share"), "of a raw read", least=True),
    Target("host memory of a rank in addition to two slots", 64, _beside_slots_mib, "MiB"),
    Target("the agent's own memory", 60, _of("agent_mib"), "MiB"),
    Target("start of the agent", 0.5, _of("agent_start_s"), "s"),
    Target("bytes on disk, divided by the state", 1.001, _of("disk"), "x"),
)


def targets(results: dict[str, Any]) -> Iterator[Table]:
    """Yield a table of the targets with this run's figures, if it has figures of ours."""
    if OURS not in results["systems"]:
        return
    row = summary(results, OURS)
    rows = []
    for target in TARGETS:
        reached = target.reached(results, row)
        bound = f"{'>=' if target.least else '<='} {target.limit:g} {target.unit}"
        if reached is None:
            rows.append((target.what, bound, None, "not measured", ""))
        else:
            verdict = "" if target.met(reached) else "missed"
            beside = target.beside(results, row)
            rows.append((target.what, bound, f"{reached:.4g} {target.unit}", verdict, beside))
    columns = ("what", "target", "reached", "", " ")
    yield Table("targets", dict.fromkeys(columns, ""), rows)
