"""Tables of the figures of `scripts/bench save`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.study import Result, Table

_GB = 1e9
#: Sources of loads.
LOADS = ("cold", "warm", "memory")


def median(values: list[float] | None) -> float | None:
    return statistics.median(values) if values else None


def ratio(
    above: list[float] | None, below: list[float] | None, *, plus: list[float] | None = None
) -> float | None:
    """Return the median of the ratios of values that were measured together."""
    if not above or not below:
        return None
    extra = plus or [0.0] * len(above)
    return statistics.median(
        (a + p) / b for a, p, b in zip(above, extra, below, strict=True) if b > 0
    )


def load_share(entry: dict[str, Any], how: str) -> float | None:
    """Return the limit of a load (a plain copy or a plain read) as a fraction of its time."""
    return ratio(entry.get(f"{how}_limit_s"), entry.get(f"{how}_s"))


def first_saves(entry: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return the blocked seconds of each job's first save, and their ratios to its later saves."""
    blocked, against_later = [], []
    for job in (entry, *entry.get("more_jobs", [])):
        if "first" in job:
            blocked.append(job["first"]["blocked_s"])
            if later := median(job.get("blocked_s")):
                against_later.append(blocked[-1] / later)
    return blocked, against_later


def summary(results: dict[str, Any], name: str) -> dict[str, float | None]:
    """Return the figures of one system: medians, and ratios within the run."""
    entry = results["systems"][name]
    nbytes = results["rank_nbytes"]
    whole = nbytes * results["size"]["ranks"]
    raw_s = raw_write_s(results)
    durable = median(entry.get("durable_s"))
    memcpy_s = median(entry.get("memcpy_s"))
    first, first_over_later = first_saves(entry)
    cpu = median(entry.get("cpu_s"))

    return {
        "first_blocked_s": median(first),
        "blocked_s": median(entry.get("blocked_s")),
        "first_over_later": median(first_over_later),
        "blocked_over_memcpy": ratio(entry.get("blocked_s"), entry.get("memcpy_s")),
        "settled_s": median(entry.get("settled_s")),
        "settled_over_memcpy": ratio(entry.get("settled_s"), entry.get("memcpy_s")),
        "owed_s": median(entry.get("owed_s")),
        "durable_s": durable,
        "durable_over_raw": durable / raw_s if durable and raw_s else None,
        "durable_over_copy_and_raw": (
            durable / (memcpy_s + raw_s) if durable and memcpy_s and raw_s else None
        ),
        "training_lost_s": median(entry.get("training_lost_s")),
        "training_blocked_s": median(entry.get("training_blocked_s")),
        "training_slowed_s": median(entry.get("training_slowed_s")),
        "cpu_s_per_gb": cpu / (whole / _GB) if cpu else None,
        **{f"{how}_s": median(entry.get(f"{how}_s")) for how in LOADS},
        **{f"{how}_share": load_share(entry, how) for how in LOADS},
        "host_memory": entry["memory_nbytes"] / whole if "memory_nbytes" in entry else None,
        "agent_mib": entry["agent_nbytes"] / 2**20 if "agent_nbytes" in entry else None,
        "agent_start_s": entry.get("agent_start_s"),
        "disk": entry["disk_nbytes"] / whole if "disk_nbytes" in entry else None,
        "files": entry.get("files"),
    }


def raw_write_s(results: dict[str, Any]) -> float | None:
    """Return the seconds of the fastest raw write of the state; None if none was measured."""
    limits = results["limits"]
    tried = [median(limits.get(name)) for name in ("raw_direct_s", "raw_buffered_s")]
    return min((took for took in tried if took), default=None)


def _split(phases: list[dict[str, float]]) -> str:
    """Return the median time of each phase over several saves, as text."""
    shown = {key: median([taken.get(key, 0.0) for taken in phases]) for key in phases[-1]}
    return ", ".join(f"{key} {1000 * s:.1f}" for key, s in shown.items())


def report(results: dict[str, Any]) -> Iterator[Result]:
    size, limits = results["size"], results["limits"]
    yield (
        f"{size['ranks']} ranks, each {results['rank_nbytes'] / 1e6:.0f} MB in "
        f"{results['pieces']} tensors; medians of {size['saves']} later saves, "
        f"{size['train_saves']} saves in training, {size['loads']} loads; "
        f"whole run: {results['seconds']:.0f} s"
    )
    memcpy = [s for figures in results["systems"].values() for s in figures.get("memcpy_s", [])]
    limit_s = {
        "memcpy": median(memcpy),
        "tensor by tensor": median(limits.get("memcpy_by_tensor_s")),
        "raw write, O_DIRECT": median(limits.get("raw_direct_s")),
        "raw write, buffered + fdatasync": median(limits.get("raw_buffered_s")),
        "read cold": median(limits.get("read_cold_s")),
        "read warm": median(limits.get("read_warm_s")),
    }
    nbytes = results["rank_nbytes"]
    yield (
        "limits with all ranks at once (GB/s per rank): "
        + "; ".join(f"{name} {nbytes / _GB / s:.2f}" for name, s in limit_s.items() if s)
    )
    for name, label in results["labels"].items():
        yield f"{name}: {label}"
    yield (
        "first: median over the first saves of all jobs; first / later: median over all jobs of "
        "the first save divided by the median of the job's later saves"
    )
    rows = {name: summary(results, name) for name in results["systems"]}
    for title, columns in _TABLES.items():
        specs = {"system": "", **{column: spec for column, (_, spec) in columns.items()}}
        keys = [key for key, _ in columns.values()]
        yield Table(title, specs, [(name, *map(row.get, keys)) for name, row in rows.items()])
    for name, entry in results["systems"].items():
        jobs = [entry, *entry.get("more_jobs", [])]
        firsts = [job["first"]["phases"] for job in jobs if "first" in job]
        for what, several in (("first", firsts), ("later", entry.get("phases", []))):
            if phases := [taken for taken in several if taken]:
                yield f"phases of a {what} save on rank 0, {name} (ms): {_split(phases)}"
    for name, entry in results["systems"].items():
        if "busy" in entry:
            busy = entry["busy"]
            tries = ", ".join(
                f"{word} after {s:.2f} s"
                for word, s in zip(busy["said"], busy["blocked_s"], strict=True)
            )
            yield f"busy, {name}: three saves in a row: {tries}; newest complete: {busy['latest']}"
    for name, entry in results["systems"].items():
        for error in entry["errors"]:
            yield f"{name}: {error}"


#: Columns by the title of their table: the key of a `summary`, and the format.
_TABLES = {
    "blocked time of a save (s; x memcpy: divided by a memcpy of the same bytes right before)": {
        "first": ("first_blocked_s", ".3f"),
        "later": ("blocked_s", ".3f"),
        "x memcpy": ("blocked_over_memcpy", ".2f"),
        "first / later": ("first_over_later", ".1f"),
        "until tensors may change": ("settled_s", ".3f"),
        "x memcpy ": ("settled_over_memcpy", ".2f"),
    },
    "time until a save is durable (s, including an fsync that the system omits), and its cost": {
        "durable": ("durable_s", ".2f"),
        "added fsync": ("owed_s", ".2f"),
        "x raw write": ("durable_over_raw", ".2f"),
        "CPU s per GB": ("cpu_s_per_gb", ".2f"),
        "training lost, s": ("training_lost_s", ".2f"),
        "by blocking": ("training_blocked_s", ".2f"),
        "by slower steps": ("training_slowed_s", ".2f"),
    },
    "loads (s; share: a raw read, or a memcpy, divided by the load)": {
        "cold": ("cold_s", ".2f"),
        "share": ("cold_share", ".2f"),
        "warm": ("warm_s", ".2f"),
        "share ": ("warm_share", ".2f"),
        "from memory": ("memory_s", ".3f"),
        "share  ": ("memory_share", ".2f"),
    },
    "memory and disk (divided by the size of the state)": {
        "host memory": ("host_memory", ".2f"),
        "agent's own, MiB": ("agent_mib", ".0f"),
        "disk": ("disk", ".4f"),
        "files": ("files", ".0f"),
    },
}
