"""Saves and loads of several checkpoint systems: one state, one clock, one job, in turn.

Every system saves the same tensors of the same ranks (`workload.py`), used as its documentation
says (`systems/`). The saves of all systems take turns, so that other load on the machine affects
all systems equally. Figures are compared within one run only. A job makes one first save of each
system. Further jobs measure more first saves, with directories, agents and ranks of their own. On a
machine without a GPU the ranks use the stand-in of `tests/cpu_megatron`, where a copy to the host
is still a copy.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.compare.job import Size
from benchmarks.compare.report import median, raw_write_s, report, summary
from benchmarks.compare.targets import targets
from benchmarks.study import Result, Study, turned
from benchmarks.systems import CATALOGUE, QUICK
from tests.support.forked.nursery import COMMON, CPU_MEGATRON, REPO

_VERSIONS = ("torch", "megatron-core", "dlrover", "nvidia-resiliency-ext")
#: Lines of a failed job's output that are shown. The last 35 are torchrun's own.
_TAIL_LINES = 80
#: Saves after the first one in a further job.
_LATER_SAVES = 3
#: Systems whose first save blocks for longer make only one first save, because more would take
#: about as long as all other measurements.
_SLOW_FIRST_S = 2.0


#: Defaults with `--quick`.
QUICK_SIZE = Size(mib=64, saves=2, first_saves=1, train_saves=1, loads=1)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"a small state with {', '.join(QUICK)} only; takes less than a minute",
    )
    parser.add_argument(
        "--systems",
        help=f"names, separated by commas, of {', '.join(CATALOGUE)}; default: all",
    )
    for field in dataclasses.fields(Size):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default))


def run(options: argparse.Namespace, root: Path) -> Iterator[Result]:
    """Yield a note for each system that is not installed, the tables, and all figures."""
    usual = QUICK_SIZE if options.quick else Size()
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Size)}
    size = dataclasses.replace(usual, **{k: v for k, v in given.items() if v is not None})
    names = QUICK if options.quick else tuple(CATALOGUE)
    if options.systems:
        names = options.systems.split(",")
    if unknown := [name for name in names if name not in CATALOGUE]:
        raise SystemExit(f"no such system: {', '.join(unknown)}; known: {', '.join(CATALOGUE)}")
    left_out = {name: missing for name in names if (missing := CATALOGUE[name].missing())}
    for name, missing in left_out.items():
        yield f"{CATALOGUE[name].label}: is not installed and was left out ({missing})"
    present = [name for name in names if name not in left_out]
    started = time.time()
    saved = run_job("save", present, size, root)
    loaded = run_job("load", [name for name in present if name in saved["systems"]], size, root)
    for name, figures in loaded["systems"].items():
        saved["systems"][name]["errors"] += figures.pop("errors")
        saved["systems"][name] |= figures
    for limit, seconds in loaded["limits"].items():
        saved["limits"].setdefault(limit, []).extend(seconds)
    yield from _more_first_saves(saved["systems"], size, root)
    results = {
        "machine": machine(root),
        "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(started)),
        "seconds": round(time.time() - started, 1),
        "size": dataclasses.asdict(size),
        "labels": {name: CATALOGUE[name].label for name in present},
        "left_out": left_out,
        **saved,
    }
    yield from report(results)
    yield from targets(results)
    yield results


def _more_first_saves(
    systems: dict[str, dict[str, Any]], size: Size, root: Path
) -> Iterator[Result]:
    """Run further jobs that only save; add their figures to `systems`.

    Systems that failed, or whose first save is slow, are left out.
    """
    succeeded = [name for name, figures in systems.items() if not figures["errors"]]
    names = [name for name in succeeded if systems[name]["first"]["blocked_s"] <= _SLOW_FIRST_S]
    if not names or size.first_saves < 2:
        return
    if slow := [name for name in succeeded if name not in names]:
        yield (
            f"{', '.join(slow)}: one first save only, because it blocks for more than "
            f"{_SLOW_FIRST_S:g} s; the other systems make {size.first_saves}"
        )
    few = dataclasses.replace(size, saves=_LATER_SAVES)
    for number in range(1, size.first_saves):
        own = root / f"{number}"  # short: the path of an agent's socket has at most 107 bytes
        own.mkdir()
        # Every job begins with another system.
        job = run_job("first", turned(names, number), few, own)
        shutil.rmtree(own)
        for name, figures in job["systems"].items():
            systems[name]["errors"] += figures.pop("errors")
            systems[name].setdefault("more_jobs", []).append(figures)


def run_job(mode: str, names: list[str], size: Size, root: Path) -> dict[str, Any]:
    return run_sizes(mode, names, [size], root)[0]


def run_sizes(mode: str, names: list[str], sizes: list[Size], root: Path) -> list[dict[str, Any]]:
    """Run the ranks of one job, which measure one size after another; return their figures.

    Raises:
        SystemExit: the job has failed.
    """
    result, log = root / f"{mode}.json", root / f"{mode}.log"
    order = {"mode": mode, "names": names, "root": str(root), "out": str(result)}
    order["sizes"] = [dataclasses.asdict(size) for size in sizes]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(sizes[0].ranks)),
        *("-m", "benchmarks.compare.rank", json.dumps(order)),
    ]
    env = environment(on_cpu=not torch.cuda.is_available()) | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    with log.open("wb") as output:
        job = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            job.wait(sum(size.timeout_s for size in sizes))
        finally:
            if job.poll() is None:
                job.terminate()  # torchrun ends its ranks
                job.wait()
    if job.returncode or not result.exists():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        raise SystemExit(f"the job '{mode}' ended with status {job.returncode}:\n{tail}")
    return [json.loads(line) for line in result.read_text().splitlines()]


def environment(*, on_cpu: bool) -> dict[str, str]:
    """Return the environment of ranks, without settings of the package from outside."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASHCKPT")}
    path = [str(REPO), os.environ.get("PYTHONPATH", "")]
    if on_cpu:
        path.insert(0, str(CPU_MEGATRON))
    return {**kept, **COMMON, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def machine(root: Path) -> dict[str, Any]:
    """Return properties of the machine on which the figures depend."""
    model = platform.processor()
    with open("/proc/cpuinfo") as info:
        model = next((line.split(":")[1].strip() for line in info if "model name" in line), model)
    mounted = [part for part in psutil.disk_partitions(all=True) if _holds(part.mountpoint, root)]
    versions = {}
    for package in _VERSIONS:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "file_system": max(mounted, key=lambda part: len(part.mountpoint)).fstype,
        "gpu": _gpu(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _gpu() -> str | None:
    """Return name and driver of the GPU, without a CUDA context in this process."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    name, _, driver = printed.stdout.strip().partition(", ")
    return f"{name}, driver {driver}"


def _holds(mountpoint: str, path: Path) -> bool:
    return path.resolve().is_relative_to(mountpoint)


#: Panels of the chart: a key of a `summary`, the title, and the machine's limit.
_PANELS = (
    (
        ("blocked_s", "a save blocks training, s", None),
        ("training_lost_s", "training lost per save, s", None),
        ("durable_s", "durable after, s", "raw"),
    ),
    (
        ("cpu_s_per_gb", "CPU s per GB", None),
        ("warm_s", "load, page cache warm, s", "read_warm_s"),
        ("memory_s", "load from memory, s", None),
    ),
)


def draw(results: list[Result], path: Path) -> None:
    """Draw one bar per system and figure; a line is the limit of the machine."""
    from benchmarks.chart import Panel, draw

    (figures,) = [result for result in results if isinstance(result, dict)]
    rows = {figures["labels"][name]: summary(figures, name) for name in figures["systems"]}
    limits = {name: median(seconds) for name, seconds in figures["limits"].items()}
    limits["raw"] = raw_write_s(figures)

    def panel(key: str, title: str, limit: str | None) -> Panel:
        shown = {name: row[key] for name, row in rows.items() if row[key] is not None}
        return Panel(title, list(shown), list(shown.values()), limits.get(limit or ""))

    size, host = figures["size"], figures["machine"]
    title = (
        f"{size['ranks']} ranks x {figures['rank_nbytes'] / 1e6:.0f} MB in {figures['pieces']} "
        f"tensors; {host['cores']} cores, {host['file_system']}; {figures['started']}; "
        "dashed: a plain write or read of the same bytes"
    )
    draw([[panel(*given) for given in row] for row in _PANELS], path, title)


STUDY = Study("save", "saves and loads, compared with other systems", add_options, run, draw)
