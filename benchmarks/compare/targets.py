"""Targets of this project, compared with the figures of a run of `scripts/bench save`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.compare.report import median, summary
from benchmarks.study import Table

OURS, BLOCKING, RIVAL = "flashckpt", "flashckpt-blocking", "dlrover"
_MIB = 2**20


def targets(results: dict[str, Any]) -> Iterator[Table]:
    """Yield a table of the targets with this run's figures, if it has figures of ours."""
    if OURS not in results["systems"]:
        return
    rows = []
    by_tensor_s = median(results["limits"].get("memcpy_by_tensor_s"))
    for what, sign, bound, unit, reached, seconds in _targets(results):
        limit = f"{sign} {bound:g} {unit}"
        if reached is None:
            rows.append((what, limit, None, "not measured", ""))
            continue
        is_met = reached >= bound if sign == ">=" else reached <= bound
        beside = ""
        if seconds and by_tensor_s:
            beside = f"{seconds / by_tensor_s:.2f} x a copy tensor by tensor"
        rows.append((what, limit, f"{reached:.4g} {unit}", "" if is_met else "missed", beside))
    columns = ("what", "target", "reached", "", " ")
    yield Table("targets", dict.fromkeys(columns, ""), rows)


def _targets(results: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the targets: name, sign, bound, unit, figure, and seconds of a second comparison.

    The second comparison is with a copy tensor by tensor; None: there is none.
    """
    ours, blocking, rival = (
        summary(results, name) if name in results["systems"] else {}
        for name in (OURS, BLOCKING, RIVAL)
    )
    entry = results["systems"][OURS]
    pairs = zip(entry.get("blocked_s", []), entry.get("memcpy_s", []), strict=False)
    beyond_ms = median([1000 * (blocked - 0.05 * memcpy) for blocked, memcpy in pairs])
    lost, rivals = ours["training_lost_s"], rival.get("training_lost_s")
    slots_mib = ours["host_memory"] and (ours["host_memory"] - 2) * results["rank_nbytes"] / _MIB
    raw = "of a raw read"
    return [
        ("blocked, staging: deferred, beyond 5 % of a memcpy", "<=", 10, "ms", beyond_ms, None),
        (
            *("blocked, staging: blocking", "<=", 1.15, "x memcpy"),
            *(blocking.get("blocked_over_memcpy"), blocking.get("blocked_s")),
        ),
        (
            *("training lost per save, divided by DLRover's", "<=", 0.5, "x"),
            *(lost / rivals if rivals and lost is not None else None, None),
        ),
        ("CPU per GB made durable", "<=", 0.4, "s", ours["cpu_s_per_gb"], None),
        ("first save against later ones", "<=", 1.2, "x", ours["first_over_later"], None),
        (
            *("durable, against a memcpy + a raw write", "<=", 1.15, "x"),
            *(ours["durable_over_copy_and_raw"], None),
        ),
        (
            *("load from memory", ">=", 0.7, "of a memcpy"),
            *(ours["memory_share"], ours["memory_s"]),
        ),
        ("load, page cache warm", ">=", 0.6, raw, ours["warm_share"], None),
        ("load, page cache cold", ">=", 0.9, raw, ours["cold_share"], None),
        ("host memory of a rank in addition to two slots", "<=", 64, "MiB", slots_mib, None),
        ("the agent's own memory", "<=", 60, "MiB", ours["agent_mib"], None),
        ("start of the agent", "<=", 0.5, "s", ours["agent_start_s"], None),
        ("bytes on disk, divided by the state", "<=", 1.001, "x", ours["disk"], None),
    ]
