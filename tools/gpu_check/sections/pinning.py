"""Page-locking: its time, the kernels that it delays, and undocumented behaviour of CUDA."""

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
    """Check single calls first, because the measurements of times may use all remaining time."""
    _report_borders(report)
    _report_latched_errors(report)
    with _kernels() as waits:
        for gib, huge in machine.pick(_CASES, ((0.01, True),)):
            name = f"{gib:g} GiB, {'huge' if huge else 'small'} pages"
            if machine.seconds_left() < gib * _S_PER_GIB:
                report.skip(name, "no time left")
                continue
            _measure(report, name, int(gib * 2**30), huge, waits)


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
