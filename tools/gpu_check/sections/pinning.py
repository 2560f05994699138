"""Page-locking: its time, the calls that it delays, and undocumented behaviour of CUDA."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_flashckpt.memory.pinning import CHUNK_NBYTES
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.save.stager import Stager
from tools.gpu_check import machine
from tools.gpu_check.child import Child, wait
from tools.gpu_check.children import bystander
from tools.gpu_check.report import Report
from tools.gpu_check.timing import report_waits

LETTER = "P"
TITLE = "page-locking"
SECONDS = 40
GPUS = 1
SIMULATED = True
MEGATRON = False
ALONE = True

#: Slabs: size in GiB, huge pages, mapped before; the most important ones first.
_CASES = (
    (2, True, True),
    (8, False, True),
    (8, True, False),
)
_MAIN = "in chunks"
#: Largest time of all steps of a case per GiB; cases without enough time left are skipped.
_S_PER_GIB = 1.0
_RESERVE_S = 8.0


def run(report: Report) -> None:
    """Check single calls first, because the measurements of times may use all remaining time."""
    _report_borders(report)
    _report_latched_errors(report)
    with tempfile.TemporaryDirectory(prefix="p-") as directory:
        if machine.simulated_node is None:
            _report_times(report, Path(directory))
        else:
            _measure(report, machine.pick(2.0, 0.01), huge=True, populated=True)


# ---------------------------------------------------------------------- what CUDA does


def _report_borders(report: Report) -> None:
    """Copy across the border of two registrations; report success and asynchrony."""
    chunk = machine.pick(1 << 30, 1 << 20)
    slab = Slab.create(1, 0, 2 * chunk, "borders")
    slab.populate()
    memory = torch.frombuffer(slab.memory, dtype=torch.uint8)
    address, runtime = memory.data_ptr(), torch.cuda.cudart()
    statuses = [int(runtime.cudaHostRegister(address + n * chunk, chunk, 0)) for n in (0, 1)]
    report.note("two registrations side by side: statuses", f"{statuses}")
    source = torch.ones(chunk // 2, dtype=torch.uint8, device="cuda")
    inside = _copy_time(source, memory[: chunk // 2])
    try:
        across = _copy_time(source, memory[chunk - chunk // 4 : chunk + chunk // 4])
    except RuntimeError as error:
        report.note("a copy across two registrations", f"fails: {error}")
    else:
        whole = bool((memory[chunk - chunk // 4 : chunk + chunk // 4] == 1).all())
        report.note(
            "a copy across two registrations",
            f"works, bytes {'are' if whole else 'are NOT'} equal: enqueued in "
            f"{1000 * across[0]:.2f} of {1000 * across[1]:.2f} ms; inside of one: "
            f"{1000 * inside[0]:.2f} of {1000 * inside[1]:.2f} ms",
        )
    for number in (0, 1):
        runtime.cudaHostUnregister(address + number * chunk)
    slab.close()


def _copy_time(source: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
    """Return the seconds until a copy is enqueued, and until it is complete."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    target.copy_(source, non_blocking=True)
    enqueued = time.perf_counter() - started
    torch.cuda.synchronize()
    return enqueued, time.perf_counter() - started


def _report_latched_errors(report: Report) -> None:
    """Lock memory twice; report the thread in which a kernel raises the error."""
    slab = Slab.create(1, 0, machine.pick(64 << 20, 1 << 20), "latched")
    slab.populate()
    memory = torch.frombuffer(slab.memory, dtype=torch.uint8)
    address, runtime = memory.data_ptr(), torch.cuda.cudart()
    number = torch.zeros(1, device="cuda")
    runtime.cudaHostRegister(address, memory.numel(), 0)
    values: dict[str, str] = {}

    def fail() -> None:
        torch.cuda.set_device(number.device.index)
        status = int(runtime.cudaHostRegister(address, memory.numel(), 0))
        values["status of the second registration"] = str(status)
        values["the next kernel of the same thread"] = _kernel(number)

    failing = threading.Thread(target=fail)
    failing.start()
    failing.join()
    values["a kernel of another thread"] = _kernel(number)
    for what, text in values.items():
        report.note(f"memory is locked twice: {what}", text)
    # Our page-locking fails here, too, because the memory is already locked.
    stager = Stager()
    stager.use(slab, device=torch.cuda.current_device())
    stager.pin(None)
    stager.wait_pinned()
    report.must("a page-lock of ours that fails disturbs no kernel", _kernel(number) == "works")
    stager.close()
    runtime.cudaHostUnregister(address)
    slab.close()


def _kernel(number: torch.Tensor) -> str:
    """Run a kernel; return "works", or the error."""
    try:
        number.add_(1)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"fails: {error}"
    return "works"


# ---------------------------------------------------------------------- times


@dataclasses.dataclass(frozen=True)
class Span:
    """Time span in which memory was being locked, on the monotonic clock."""

    way: str
    """Division into calls."""
    begin: float
    end: float


def _report_times(report: Report, where: Path) -> None:
    child = Child("bystander", where)
    with _kernels() as waits:
        spans: list[Span] = []
        deadline = time.monotonic() + 30.0
        while not child.lines() and not child.look() and time.monotonic() < deadline:
            time.sleep(0.01)
        idle = Span("not at all", time.monotonic(), time.monotonic() + 2.0)
        time.sleep(2.0)
        for gib, huge, populated in _CASES:
            if machine.seconds_left() < _RESERVE_S + gib * _S_PER_GIB:
                report.skip(_name(gib, huge, populated), "no time left")
                continue
            spans += _measure(report, gib, huge=huge, populated=populated)
    (where / "stop").touch()
    wait([child], 10.0)
    calls = {"10 us kernels of this process": waits, **_calls(where / bystander.CALLS)}
    ways: dict[str, list[Span]] = {}
    for span in (idle, *spans):
        ways.setdefault(span.way, []).append(span)
    for name, samples in calls.items():
        for way, times in ways.items():
            during = [
                seconds
                for begin, seconds in samples
                if any(begin < span.end and begin + seconds > span.begin for span in times)
            ]
            report_waits(report, f"{name}, while memory is locked {way}", during)


def _measure(report: Report, gib: float, *, huge: bool, populated: bool) -> list[Span]:
    """Report the seconds of every step for one slab; return the time spans of locking."""
    name = _name(gib, huge, populated)
    nbytes = int(gib * 2**30)
    with _timed(report, f"{name}: create"):
        slab = Slab.create(1, 0, nbytes, "pinning", huge_pages=huge)
    if populated:
        with _timed(report, f"{name}: map all pages"):
            slab.populate()
    address = torch.frombuffer(slab.memory, dtype=torch.uint8).data_ptr()
    runtime: Any = torch.cuda.cudart()
    spans = []
    # Locking maps the pages, so only the first way sees pages that are not mapped.
    for way, chunk in ((_MAIN, CHUNK_NBYTES), ("in one call", nbytes)):
        begins = range(0, nbytes, chunk)
        span = time.monotonic()
        with _timed(report, f"{name}: lock {way}", is_headline=way == _MAIN):
            statuses = {
                int(runtime.cudaHostRegister(address + n, min(chunk, nbytes - n), 0))
                for n in begins
            }
        spans.append(Span(way, span, time.monotonic()))
        if statuses != {0}:
            report.note(f"{name}: lock {way}", f"fails with status {statuses}")
        with _timed(report, f"{name}: unlock {way}"):
            for begin in begins:
                runtime.cudaHostUnregister(address + begin)
    slab.close()
    return spans


def _name(gib: float, huge: bool, populated: bool) -> str:
    pages = "2 MiB" if huge else "4 KiB"
    return f"{gib:g} GiB, {pages} pages, {'mapped' if populated else 'not mapped'}"


@contextlib.contextmanager
def _timed(report: Report, what: str, *, is_headline: bool = False) -> Iterator[None]:
    started = time.perf_counter()
    yield
    write = report.headline if is_headline else report.figure
    write(what, time.perf_counter() - started, "s")


@contextlib.contextmanager
def _kernels() -> Iterator[list[tuple[float, float]]]:
    """Run short kernels in another thread; yield a growing list of their begins and seconds."""
    waits: list[tuple[float, float]] = []
    over = threading.Event()
    device = torch.cuda.current_device()

    def launch() -> None:
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream()
        number = torch.zeros(1 << 20, device="cuda")
        with torch.cuda.stream(stream):
            while not over.is_set():
                started = time.monotonic()
                number.add_(1)
                stream.synchronize()
                waits.append((started, time.monotonic() - started))
                time.sleep(0.001)

    thread = threading.Thread(target=launch)
    thread.start()
    try:
        yield waits
    finally:
        over.set()
        thread.join()


def _calls(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the start and the seconds of the bystander's calls, by name."""
    calls: dict[str, list[tuple[float, float]]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        name, begin, seconds = line.split()
        calls.setdefault(f"{name} of another process", []).append((float(begin), float(seconds)))
    return calls
