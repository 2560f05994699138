"""Page-locking: its time, the kernels that it delays, and its errors."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch

from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.save.stager import Stager
from tools.gpu_check import machine
from tools.gpu_check.report import Report

#: Slabs: size in GiB, huge pages; the most important ones first.
_CASES = ((8, True), (8, False), (2, True))
#: Largest time of all steps of a case per GiB; cases without enough time left are skipped.
_S_PER_GIB = 1.0


def run(report: Report) -> None:
    """Check errors first, because the measurements of times may use all remaining time."""
    _report_latched_errors(report)
    with _kernels() as waits:
        for gib, huge in machine.pick(_CASES, ((0.01, True),)):
            name = f"{gib:g} GiB, {'huge' if huge else 'small'} pages"
            if machine.seconds_left() < gib * _S_PER_GIB:
                report.skip(name, "no time left")
                continue
            _measure(report, name, int(gib * 2**30), huge, waits)


def _report_latched_errors(report: Report) -> None:
    """Lock memory twice: the error of the second call must not reach a kernel of training."""
    slab = Slab.create(1, 0, machine.pick(64 << 20, 1 << 20), "latched")
    slab.populate()
    memory = torch.frombuffer(slab.memory, dtype=torch.uint8)
    runtime, number = torch.cuda.cudart(), torch.zeros(1, device="cuda")
    runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    stager = Stager()
    stager.use(slab, device=torch.cuda.current_device())
    stager.pin(None)
    stager.wait_pinned()
    result = _kernel(number)
    report.must("a page-lock of ours that fails disturbs no kernel", result == "works", result)
    stager.close()
    runtime.cudaHostUnregister(memory.data_ptr())
    slab.close()


def _kernel(number: torch.Tensor) -> str:
    """Run a kernel; return "works", or the error."""
    try:
        number.add_(1)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"fails: {error}"
    return "works"


def _measure(report: Report, name: str, nbytes: int, huge: bool, waits: list[float]) -> None:
    """Report the seconds of every step for one slab, as the package takes it."""
    stager = Stager()
    device = torch.cuda.current_device()
    with _timed(report, f"{name}: create", waits):
        slab = Slab.create(1, 0, nbytes, "pinning", huge_pages=huge)
    with _timed(report, f"{name}: map all pages", waits):
        slab.populate()
    with _timed(report, f"{name}: lock", waits, is_headline=nbytes >= 8 << 30 and huge):
        stager.use(slab, device=device)
        stager.pin(None)
        stager.wait_pinned()
    with _timed(report, f"{name}: unlock", waits):
        stager.drop_slab()
    stager.close()
    slab.close()


@contextlib.contextmanager
def _timed(
    report: Report, what: str, waits: list[float], *, is_headline: bool = False
) -> Iterator[None]:
    before, started = len(waits), time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    time.sleep(0.01)  # for a kernel that began meanwhile
    longest = max(waits[before:], default=0.0)
    detail = f"longest of {len(waits) - before} small kernels {1000 * longest:.2f} ms"
    report.figure(what, seconds, "s", detail, headline=is_headline)


@contextlib.contextmanager
def _kernels() -> Iterator[list[float]]:
    """Run kernels of 10 us in another thread; yield a growing list of their seconds."""
    waits: list[float] = []
    over = threading.Event()
    device = torch.cuda.current_device()

    def launch() -> None:
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream()
        number = torch.zeros(1 << 20, device="cuda")
        with torch.cuda.stream(stream):
            while not over.wait(0.001):
                started = time.perf_counter()
                number.add_(1)
                stream.synchronize()
                waits.append(time.perf_counter() - started)

    thread = threading.Thread(target=launch)
    thread.start()
    try:
        yield waits
    finally:
        over.set()
        thread.join()
