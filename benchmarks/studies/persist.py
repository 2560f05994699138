"""Time from a "staged" message to the commit, compared with raw writes of the same bytes.

Ours: two ranks hand full slots to a real agent, which digests, writes, syncs and commits. Raw: two
processes write the same number of bytes to files of their own and sync them. The faster of two ways
counts: through the page cache, or with O_DIRECT, 16 MiB at a time. Ours and raw take turns. The
measured code does not use torch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import mmap
import multiprocessing as mp
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.study import Result, Study, Table
from megatron_flashckpt.agent.client import AgentClient
from megatron_flashckpt.agent.connecting import connect
from megatron_flashckpt.config import AgentConfig, Config
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.file_format.file_names import save_name
from megatron_flashckpt.layout.piece import MASTER, WEIGHT, Piece
from megatron_flashckpt.layout.template import Layout, PlanCache, order
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotHeader, SlotMeta, SlotState

RANKS = 2
#: Elements of each tensor of a rank, stored as a master (4 bytes) and a weight (2 bytes).
NUMEL = 2**20
RAW_NBYTES = 16 * 2**20
_RUN = "000001-3fa9"
_MODES = {"buffered": 0, "O_DIRECT": os.O_DIRECT}
#: Seconds of each measurement of the busy processes' rate without a save.
_ALONE_S = 0.3
_TICK = os.sysconf("SC_CLK_TCK")


def layout_of(rank: int, mib: int) -> Layout:
    pieces = [
        Piece(f"layer{i}", kind, dtype, (RANKS, NUMEL), (rank, 0), (1, NUMEL), 0, NUMEL)
        for i in range(round(mib / 6))
        for kind, dtype in ((MASTER, "F32"), (WEIGHT, "BF16"))
    ]
    return PlanCache().layout([pieces[i] for i in order(pieces)])


class Rank:
    """Rank whose slots hold random bytes; a save only sends the "staged" message."""

    def __init__(self, root: Path | str, config: Config, rank: int, mib: int) -> None:
        self._root, self._rank = root, rank
        self._layout = layout_of(rank, mib)
        self.nbytes = self._layout.nbytes
        self.client: AgentClient = connect(str(root), rank, 0, config)
        self._slab = Slab.create(2, len(self._meta(0)) + 4096, self.nbytes, f"{rank}")
        for slot in self._slab.slots:
            random = os.urandom(2**20)
            start, stop = slot.data_offset, slot.data_offset + self.nbytes
            for at in range(start, stop, len(random)):
                end = min(at + len(random), stop)
                self._slab.memory[at:end] = random[: end - at]
        self.client.attach(self._slab)

    def _meta(self, iteration: int) -> bytes:
        return msgspec.msgpack.encode(
            SlotMeta(
                root=str(self._root),
                rank=self._rank,
                world_size=RANKS,
                coordinates=Coordinates(dp=self._rank),
                template_fingerprint=self._layout.template_fingerprint,
                template=self._layout.template,
                placement=self._layout.placement,
                common=b"",
                description={},
                retain_interval=None,
            )
        )

    def save(self, iteration: int, save_id: str) -> None:
        """Send the "staged" message for a slot."""
        index = self.client.acquire(60.0)
        slot, meta = self._slab.slots[index], self._meta(iteration)
        header = SlotHeader(SlotState.STAGING, iteration, save_id, len(meta), self.nbytes)
        slot.set_header(header)
        slot.set_meta(meta)
        slot.set_state(SlotState.STAGED)
        self.client.staged(index)

    def wait(self) -> None:
        while not (finished := self.client.poll(5.0).finished):
            pass
        if finished[0].error is not None:
            raise SystemExit(finished[0].error)

    def close(self) -> None:
        self.client.leave()
        self.client.close()
        self._slab.close()


def cpu_s(pid: int) -> float:
    """Return the processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def own_mib(pid: int) -> float:
    """Return the private memory of a process, MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} has no memory")


def write_raw(root: Path, nbytes: int, number: int, orders: Any, done: Any) -> None:
    """Write one file of `nbytes` for each mode that `orders` receives, until it receives None."""
    memory = memoryview(mmap.mmap(-1, nbytes + RAW_NBYTES))
    random = os.urandom(2**20)
    for at in range(0, nbytes, len(random)):
        memory[at : at + len(random)] = random
    while (mode := orders.get()) is not None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _MODES[mode]
        fd = os.open(root / f"raw{number}", flags)
        os.posix_fallocate(fd, 0, nbytes)
        for at in range(0, nbytes, RAW_NBYTES):
            part = memory[at : at + min(RAW_NBYTES, nbytes - at)]
            while part:
                written = os.pwrite(fd, part, at)
                part, at = part[written:], at + written
        os.fdatasync(fd)
        os.close(fd)
        done.put(number)


@contextlib.contextmanager
def raw_writers(root: Path, nbytes: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that makes every process write its file once."""
    context = mp.get_context("spawn")
    orders, done = [context.Queue() for _ in range(RANKS)], context.Queue()
    arguments = [(root, nbytes, number, orders[number], done) for number in range(RANKS)]
    processes = [context.Process(target=write_raw, args=of_process) for of_process in arguments]
    for process in processes:
        process.start()

    def write(mode: str | None) -> None:
        for orders_of_rank in orders:
            orders_of_rank.put(mode)
        for _ in orders if mode is not None else ():
            done.get()

    try:
        yield write
    finally:
        write(None)
        for process in processes:
            process.join()


def spin(counter: Any) -> None:
    """Compute and count without end."""
    while True:
        sum(range(10_000))
        counter.value += 1


class Others:
    """Processes that keep every core busy, as training does.

    Args:
        busy: start these processes; if false, there are none.
    """

    def __init__(self, busy: bool) -> None:
        context = mp.get_context("spawn")
        self._counters = [context.RawValue("Q") for _ in range((os.cpu_count() or 1) * busy)]
        arguments = [(counter,) for counter in self._counters]
        self._processes = [context.Process(target=spin, args=counter) for counter in arguments]
        self._alone_per_s: list[float] = []

    def __enter__(self) -> Others:
        for process in self._processes:
            process.start()
        while not all(counter.value for counter in self._counters):
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
            process.join()

    def work(self) -> int:
        """Return the work of all processes so far."""
        return sum(counter.value for counter in self._counters)

    def alone(self) -> None:
        """Measure the work per second without a save."""
        if self._processes:
            before, since = self.work(), time.perf_counter()
            time.sleep(_ALONE_S)
            self._alone_per_s.append((self.work() - before) / (time.perf_counter() - since))

    def lost_s(self, work: int, seconds: float) -> float:
        """Return the seconds that the processes lost if they did `work` in `seconds`."""
        return seconds - work / statistics.median(self._alone_per_s) if self._processes else 0.0


@dataclasses.dataclass
class Figures:
    """Figures of one setting over all rounds."""

    start_s: float
    state_nbytes: int
    durable_s: list[float] = dataclasses.field(default_factory=list)
    cpu_s: list[float] = dataclasses.field(default_factory=list)
    lost_s: list[float] = dataclasses.field(default_factory=list)
    own_mib: float = 0.0
    file_nbytes: int = 0

    def clear(self) -> None:
        for taken in (self.durable_s, self.cpu_s, self.lost_s):
            taken.clear()

    def rows(self, raw_s: dict[str, list[float]]) -> Iterator[tuple[str, float, str]]:
        """Yield the name, the figure and the target of each measurement."""
        medians = {mode: statistics.median(taken) for mode, taken in raw_s.items()}
        best = min(medians, key=lambda mode: medians[mode])
        durable, gb = statistics.median(self.durable_s), self.state_nbytes / 1e9
        for mode, taken in medians.items():
            yield f"raw write, {mode}, GB/s", gb / taken, ""
        yield "call to committed, s", durable, ""
        yield f"divided by raw writes ({best})", durable / medians[best], "<= 1.15"
        ratios = [ours / raw for ours, raw in zip(self.durable_s, raw_s[best], strict=True)]
        yield "... in the fastest round", min(ratios), ""
        yield "... in the slowest round", max(ratios), ""
        yield "agent: CPU s per GB", statistics.median(self.cpu_s) / gb, "<= 0.4"
        yield "agent: peak private memory, MiB", self.own_mib, "< 60"
        yield "agent: from start to first answer, s", self.start_s, "< 0.5"
        more = 100 * (self.file_nbytes / self.state_nbytes - 1)
        yield "files beyond the size of the state, %", more, "< 0.1"


class Ours:
    """Two ranks and their agent, under one setting."""

    def __init__(self, root: Path, mib: int, agent: AgentConfig, others: Others) -> None:
        root.mkdir()
        config = Config(runtime_dir=str(root / "run"), agent=agent)
        self._save, self._others = root / "save", others
        started = time.perf_counter()
        connect(str(self._save), 0, 0, config).close()
        start_s = time.perf_counter() - started
        self.ranks = [Rank(self._save, config, rank, mib) for rank in range(RANKS)]
        self.agent = self.ranks[0].client.agent_pid
        self.figures = Figures(start_s, sum(rank.nbytes for rank in self.ranks))

    def save(self, iteration: int) -> None:
        """Save once, measure, and remove the files."""
        self._others.alone()
        save_id = save_name(_RUN, iteration)
        used, done = cpu_s(self.agent), self._others.work()
        since = time.perf_counter()
        for rank in self.ranks:
            rank.save(iteration, save_id)
        for rank in self.ranks:
            rank.wait()
        took, figures = time.perf_counter() - since, self.figures
        figures.lost_s.append(self._others.lost_s(self._others.work() - done, took))
        figures.durable_s.append(took)
        figures.cpu_s.append(cpu_s(self.agent) - used)
        figures.own_mib = max(figures.own_mib, own_mib(self.agent))
        files = self._save / f"iter_{iteration:07d}"
        figures.file_nbytes = sum(path.stat().st_size for path in files.iterdir())
        shutil.rmtree(files)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def measure(
    root: Path, mib: int, rounds: int, settings: list[AgentConfig], others: Others
) -> tuple[dict[str, list[float]], list[Figures]]:
    """Return the seconds of raw writes, and the figures of each setting, measured in turn."""
    raw_s: dict[str, list[float]] = {mode: [] for mode in _MODES}
    ours = [Ours(root / f"{n}", mib, setting, others) for n, setting in enumerate(settings)]

    def raw(mode: str) -> None:
        since = time.perf_counter()
        write(mode)
        raw_s[mode].append(time.perf_counter() - since)
        for path in root.glob("raw*"):
            path.unlink()

    with raw_writers(root, ours[0].ranks[0].nbytes) as write:
        for round_number in range(-2, rounds):
            if not round_number:  # both slots and the memory of raw writes have been used before
                for taken in raw_s.values():
                    taken.clear()
                for system in ours:
                    system.figures.clear()
            steps = [
                lambda system=system, round_number=round_number: system.save(round_number + 3)
                for system in ours
            ]
            steps += [lambda mode=mode: raw(mode) for mode in _MODES]
            first = round_number % len(steps)
            for step in steps[first:] + steps[:first]:
                step()
    for system in ours:
        system.close()
    return raw_s, [system.figures for system in ours]


def add_options(parser: argparse.ArgumentParser) -> None:
    usual = AgentConfig()
    several: dict[str, Any] = {"nargs": "+", "help": "settings to compare in turn"}
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--mib", type=int, nargs="+", default=[253, 1024], help="approximate state of a rank, MiB"
    )
    parser.add_argument("--write-threads", type=int, default=[usual.write_threads], **several)
    parser.add_argument("--writer-nice", type=int, default=[usual.writer_nice], **several)
    ways = ("auto", "always", "never")
    parser.add_argument("--direct-io", choices=ways, default=[usual.direct_io], **several)
    parser.add_argument("--busy", action="store_true", help="keep all cores busy meanwhile")


def run(options: argparse.Namespace, root: Path) -> Iterator[Result]:
    """Yield a table for each size; it has one row per setting, if there are several."""
    settings = [
        AgentConfig(write_threads=threads, writer_nice=nice, direct_io=direct)
        for threads in options.write_threads
        for nice in options.writer_nice
        for direct in options.direct_io
    ]
    for mib in options.mib:
        with contextlib.ExitStack() as stack:
            place = root / f"{mib}"
            place.mkdir()
            stack.callback(shutil.rmtree, place, ignore_errors=True)
            others = stack.enter_context(Others(options.busy))
            raw_s, figures = measure(place, mib, options.rounds, settings, others)
        title = (
            f"{RANKS} ranks, {figures[0].state_nbytes / 1e9:.2f} GB in all; medians of "
            f"{options.rounds} interleaved rounds{'; all cores busy' if options.busy else ''}"
        )
        if len(figures) == 1:
            columns = {"what": "", "figure": ".3g", "target": ""}
            yield Table(title, columns, list(figures[0].rows(raw_s)))
        else:
            yield compared(title, settings, figures, raw_s)


def compared(
    title: str,
    settings: list[AgentConfig],
    figures: list[Figures],
    raw_s: dict[str, list[float]],
) -> Table:
    """Return a table with a row per setting; times are relative to raw writes of the same round."""
    best = min(raw_s, key=lambda mode: statistics.median(raw_s[mode]))
    rows = []
    for setting, of_setting in zip(settings, figures, strict=True):
        ratios = [ours / raw for ours, raw in zip(of_setting.durable_s, raw_s[best], strict=True)]
        rows.append(
            (
                *(f"{setting.write_threads}", f"{setting.writer_nice}", setting.direct_io),
                statistics.median(of_setting.durable_s),
                *(statistics.median(ratios), min(ratios), max(ratios)),
                statistics.median(of_setting.cpu_s) / of_setting.state_nbytes * 1e9,
                statistics.median(of_setting.lost_s),
            )
        )
    columns = {
        **dict.fromkeys(("threads", "nice", "direct"), ""),
        "committed, s": ".3f",
        **dict.fromkeys((f"x raw ({best})", "least", "most", "CPU s per GB"), ".2f"),
        "lost by other processes, s": ".3f",
    }
    return Table(title, columns, rows)


STUDY = Study("persist", "writes of shards until the commit, against raw writes", add_options, run)
