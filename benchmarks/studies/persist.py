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

import psutil

from benchmarks.resources import write_raw
from benchmarks.study import Result, Study, Table, turned
from megatron_flashckpt.agent.connecting import connect
from megatron_flashckpt.config import AgentConfig, Config
from megatron_flashckpt.file_format.file_names import save_name
from megatron_flashckpt.layout.piece import MASTER, WEIGHT, Piece
from megatron_flashckpt.layout.template import order
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotState
from tests.support.processes import MIB, memory_nbytes
from tests.support.trainer import FakeTrainer

RANKS = 2
#: Elements of each tensor of a rank, stored as a master (4 bytes) and a weight (2 bytes).
NUMEL = 2**20
_RUN = "000001-3fa9"
_MODES = ("buffered", "O_DIRECT")
#: Room for the meta of a slot.
_META_NBYTES = 2**20
_PATIENCE_S = 60.0
#: Seconds of each measurement of the busy processes' rate without a save.
_ALONE_S = 0.3


class Rank(FakeTrainer):
    """Rank whose slots hold random bytes; a save only sends the "staged" message."""

    def __init__(self, root: Path | str, config: Config, rank: int, mib: int) -> None:
        super().__init__(root, config, rank, RANKS)
        pieces = [
            Piece(f"layer{i}", kind, dtype, (RANKS, NUMEL), (rank, 0), (1, NUMEL), 0, NUMEL)
            for i in range(round(mib / 6))
            for kind, dtype in ((MASTER, "F32"), (WEIGHT, "BF16"))
        ]
        self.pieces = [pieces[i] for i in order(pieces)]
        self.nbytes = self.layout.nbytes
        self.slab = Slab.create(self.slots, _META_NBYTES, self.nbytes, f"{rank}")
        with memoryview(self.slab.memory) as memory:
            for slot in self.slab.slots:
                fill_randomly(memory[slot.data_offset : slot.data_offset + self.nbytes])
        self.attach()

    def send(self, iteration: int) -> None:
        """Send the "staged" message for a slot."""
        slot = self.begin(iteration, save_name(_RUN, iteration), _PATIENCE_S)
        assert slot is not None, "no slot became free"
        slot.set_state(SlotState.STAGED)
        self.client.staged(slot.index)


def save(ranks: list[Rank], iteration: int) -> None:
    """Save on all ranks; return when the checkpoint is committed."""
    for rank in ranks:
        rank.send(iteration)
    for rank in ranks:
        if (error := rank.outcome(_PATIENCE_S).error) is not None:
            raise SystemExit(error)


def fill_randomly(memory: memoryview) -> None:
    """Fill memory with random bytes, which repeat after 1 MiB."""
    random = os.urandom(2**20)
    for at in range(0, len(memory), len(random)):
        part = memory[at : at + len(random)]
        part[:] = random[: len(part)]


def cpu_s(pid: int) -> float:
    """Return the processor seconds that a process has used."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def own_mib(pid: int) -> float:
    """Return the private memory of a process, MiB."""
    return memory_nbytes(pid, "RssAnon") / MIB


def write_on_order(root: Path, nbytes: int, number: int, orders: Any, done: Any) -> None:
    """Write one file of `nbytes` for each mode that `orders` receives, until it receives None."""
    memory = memoryview(mmap.mmap(-1, nbytes))
    fill_randomly(memory)
    while (mode := orders.get()) is not None:
        write_raw(root / f"raw{number}", memory, direct=mode == "O_DIRECT")
        done.put(number)


@contextlib.contextmanager
def raw_writers(root: Path, nbytes: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that makes every process write its file once."""
    context = mp.get_context("spawn")
    orders, done = [context.Queue() for _ in range(RANKS)], context.Queue()
    arguments = [(root, nbytes, number, orders[number], done) for number in range(RANKS)]
    processes = [
        context.Process(target=write_on_order, args=of_process) for of_process in arguments
    ]
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
        used, done = cpu_s(self.agent), self._others.work()
        since = time.perf_counter()
        save(self.ranks, iteration)
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
            rank.hang_up(leave=True)


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
            for step in turned(steps, round_number):
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
    """Yield a table for each size, with a row per setting."""
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
        yield _table(options, settings, figures, raw_s)


def _table(
    options: argparse.Namespace,
    settings: list[AgentConfig],
    figures: list[Figures],
    raw_s: dict[str, list[float]],
) -> Table:
    """Return a table with a row per setting; times are relative to raw writes of the same round."""
    medians = {mode: statistics.median(taken) for mode, taken in raw_s.items()}
    best = min(medians, key=lambda mode: medians[mode])
    gb = figures[0].state_nbytes / 1e9
    rows = []
    for setting, of_setting in zip(settings, figures, strict=True):
        ratios = [ours / raw for ours, raw in zip(of_setting.durable_s, raw_s[best], strict=True)]
        rows.append(
            (
                *(f"{setting.write_threads}", f"{setting.writer_nice}", setting.direct_io),
                statistics.median(of_setting.durable_s),
                *(statistics.median(ratios), min(ratios), max(ratios)),
                statistics.median(of_setting.cpu_s) / gb,
                *(of_setting.own_mib, of_setting.start_s),
                100 * (of_setting.file_nbytes / of_setting.state_nbytes - 1),
                statistics.median(of_setting.lost_s),
            )
        )
    raw = "; ".join(f"{mode} {gb / taken:.2f} GB/s" for mode, taken in medians.items())
    busy = "; all cores busy" if options.busy else ""
    title = (
        f"{RANKS} ranks, {gb:.2f} GB in all; medians of {options.rounds} interleaved "
        f"rounds{busy}; raw writes: {raw}; targets: 1.15 x raw, 0.4 CPU s per GB, 60 MiB, 0.5 s, "
        "0.1 %"
    )
    columns = {
        **dict.fromkeys(("threads", "nice", "direct"), ""),
        "committed, s": ".3f",
        **dict.fromkeys((f"x raw ({best})", "least", "most", "CPU s per GB"), ".2f"),
        "agent's peak memory, MiB": ".0f",
        "agent's start, s": ".2f",
        "files beyond the state, %": ".2f",
        "lost by other processes, s": ".3f",
    }
    return Table(title, columns, rows)


STUDY = Study("persist", "writes of shards until the commit, against raw writes", add_options, run)
