"""Saves and loads of several checkpoint systems: one state, one clock, one job, in turn.

Every system saves the same tensors of the same ranks (`workload.py`), each as its own documentation
wants it (`systems/`). Saves of all systems take turns, so that whatever else this machine does
meets them alike; what is compared is compared within one run. A job makes one first save of each:
more jobs follow that only save, with directories, agents and ranks of their own. On a machine
without a GPU the ranks see the stand-in of `tests/cpu_megatron`: a copy to the host stays a copy.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

from benchmarks.compare.report import print_report
from benchmarks.compare.targets import print_targets
from benchmarks.systems import CATALOGUE, QUICK

REPO = Path(__file__).resolve().parents[2]
_VERSIONS = ("torch", "megatron-core", "dlrover")
#: Of the job's output, where it failed.
_TAIL_LINES = 30
#: Saves after the first one in a job that is there for the first one.
_LATER_SAVES = 3
#: Systems whose first save blocks for longer make no others: two of eight would take about as long
#: as all the others together.
_SLOW_FIRST_S = 2.0


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is measured."""

    mib: float = 256
    """State of one rank."""
    pieces: int = 296
    """Tensors of one rank."""
    ranks: int = 2
    saves: int = 6
    """After the first."""
    first_saves: int = 5
    """Each in a job of its own: the one that all else is measured in, and others."""
    train_saves: int = 5
    loads: int = 5
    step_ms: float = 100
    timeout_s: float = 900


#: What `--quick` measures unless told otherwise.
QUICK_SIZE = Size(mib=64, saves=2, first_saves=1, train_saves=1, loads=1)


def add_command(commands: Any) -> None:
    """Add the parser of `python -m benchmarks save` to those of the subcommands."""
    parser = commands.add_parser("save", help="saves and loads, beside other checkpoint systems")
    parser.add_argument(
        "--quick", action="store_true", help=f"only {', '.join(QUICK)}, small: under a minute"
    )
    parser.add_argument(
        "--systems",
        help=f"separated by commas; default: all but dcp-process, of {', '.join(CATALOGUE)}",
    )
    for field in dataclasses.fields(Size):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default))
    parser.add_argument("--dir", type=Path, help="where to write (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--png", type=Path, help="where to draw a chart (needs matplotlib)")
    parser.set_defaults(command=run)


def bench_save(out: Console, args: argparse.Namespace, root: Path) -> None:
    """Measure and report what `add_command`'s options ask for, with files under `root`."""
    usual = QUICK_SIZE if args.quick else Size()
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Size)}
    size = dataclasses.replace(usual, **{k: v for k, v in given.items() if v is not None})
    usual_names = [name for name, entry in CATALOGUE.items() if entry.usual]
    names = args.systems.split(",") if args.systems else list(QUICK if args.quick else usual_names)
    if unknown := [name for name in names if name not in CATALOGUE]:
        raise SystemExit(f"no such system: {', '.join(unknown)}; known: {', '.join(CATALOGUE)}")
    results = measure(out, names, size, root)
    print_report(out, results)
    print_targets(out, results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.png:
        draw(out, results, args.png)


def draw(out: Console, results: dict[str, Any], path: Path) -> None:
    try:
        from benchmarks.compare.chart import chart
    except ImportError as error:
        out.print(f"no chart: {error}; pip install matplotlib")
        return
    chart(results, path)
    out.print(f"chart: {path}")


def measure(out: Console, names: list[str], size: Size, root: Path) -> dict[str, Any]:
    """Return all figures of one run; systems that are not installed are left out with a note."""
    left_out = {name: lacking for name in names if (lacking := CATALOGUE[name].lacking())}
    for name, lacking in left_out.items():
        out.print(f"{CATALOGUE[name].label}: not installed, left out ({lacking})")
    present = [name for name in names if name not in left_out]
    started = time.time()
    saved = run_job("save", present, size, root)
    loaded = run_job("load", [name for name in present if name in saved["systems"]], size, root)
    for name, found in loaded["systems"].items():
        saved["systems"][name]["errors"] += found.pop("errors")
        saved["systems"][name] |= found
    for limit, seconds in loaded["limits"].items():
        saved["limits"].setdefault(limit, []).extend(seconds)
    more_first_saves(out, saved["systems"], size, root)
    return {
        "machine": machine(root),
        "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(started)),
        "seconds": round(time.time() - started, 1),
        "size": dataclasses.asdict(size),
        "labels": {name: CATALOGUE[name].label for name in present},
        "left_out": left_out,
        **saved,
    }


def more_first_saves(
    out: Console, systems: dict[str, dict[str, Any]], size: Size, root: Path
) -> None:
    """Add to what was found of `systems` what the same systems take in more jobs that only save.

    Left out are systems that failed, and those whose first save is slow.
    """
    well = [name for name, found in systems.items() if not found["errors"]]
    names = [name for name in well if systems[name]["first"]["blocked_s"] <= _SLOW_FIRST_S]
    if not names or size.first_saves < 2:
        return
    if slow := [name for name in well if name not in names]:
        out.print(
            f"{', '.join(slow)}: one first save only, which blocks for more than "
            f"{_SLOW_FIRST_S:g} s; the others make {size.first_saves}"
        )
    few = dataclasses.replace(size, saves=_LATER_SAVES)
    for number in range(1, size.first_saves):
        # Nor is it the same system each time that a job begins with.
        turned = number % len(names)
        own = root / f"{number}"  # a short name: the path of a socket is of 107 bytes at most
        own.mkdir()
        job = run_job("first", names[turned:] + names[:turned], few, own)
        shutil.rmtree(own)
        for name, found in job["systems"].items():
            systems[name]["errors"] += found.pop("errors")
            systems[name].setdefault("more_jobs", []).append(found)


def run_job(mode: str, names: list[str], size: Size, root: Path) -> dict[str, Any]:
    """Run the ranks of one job; return what they measured."""
    result = root / f"{mode}.json"
    with ranks(mode, names, size, root, result) as job:
        job.wait(size.timeout_s)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@contextlib.contextmanager
def ranks(
    mode: str, names: list[str], size: Size, root: Path, result: Path, *more: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a job that measures into `result`; at the end of the context it must have done so."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(size.ranks), "-m", "benchmarks.compare.rank", mode),
        *("--systems", ",".join(names), "--root", str(root), "--out", str(result)),
        *("--nbytes", str(int(size.mib * 2**20)), "--pieces", str(size.pieces)),
        *("--saves", str(size.saves), "--train-saves", str(size.train_saves)),
        *("--loads", str(size.loads), "--step-ms", str(size.step_ms), *more),
    ]
    log = root / f"{mode}.log"
    with log.open("wb") as output:
        job = subprocess.Popen(command, env=_environment(), stdout=output, stderr=subprocess.STDOUT)
        try:
            yield job
        finally:
            if job.poll() is None:
                job.terminate()  # torchrun takes its ranks along
                job.wait()
    if job.returncode or not result.exists():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        raise SystemExit(f"the job that was to {mode} ended with {job.returncode}:\n{tail}")


def _environment() -> dict[str, str]:
    path = [str(REPO)]
    if not torch.cuda.is_available():
        path.insert(0, str(REPO / "tests/cpu_megatron"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASHCKPT")}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "CPU_CUDA_STUBS": "triton apex",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def machine(root: Path) -> dict[str, Any]:
    """Return what the figures depend on."""
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
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": versions,
    }


def _holds(mountpoint: str, path: Path) -> bool:
    return path.resolve().is_relative_to(mountpoint)


def run(out: Console, args: argparse.Namespace) -> None:
    """Carry out `python -m benchmarks save`."""
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="fc") as root:
        bench_save(out, args, Path(root))
