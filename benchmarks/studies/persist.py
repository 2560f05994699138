"""Time from a "staged" message to the commit, compared with raw writes of the same bytes.

Ours: two ranks hand full slots to a real agent, which digests, writes, syncs and commits. Raw: two
threads write the same number of bytes to files of their own and sync them. The faster of two ways
counts: through the page cache, or with O_DIRECT, 16 MiB at a time. Ours and raw take turns.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.resources import cpu_s, write_raw
from benchmarks.study import Result, Study, Table, in_turns
from megatron_flashckpt.config import AgentConfig, Config
from megatron_flashckpt.file_format.file_names import save_name
from megatron_flashckpt.layout.piece import MASTER, WEIGHT, Piece
from megatron_flashckpt.layout.template import order
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotState
from tests.support.trainer import FakeTrainer

RANKS = 2
#: Elements of each tensor of a rank, stored as a master (4 bytes) and a weight (2 bytes).
NUMEL = 2**20
_RUN = "000001-3fa9"
_MODES = ("buffered", "O_DIRECT")
#: Room for the meta of a slot.
_META_NBYTES = 2**20
_PATIENCE_S = 60.0


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


class Ours:
    """Two ranks and their agent, under one value of `agent.direct_io`."""

    def __init__(self, root: Path, mib: int, direct_io: Any) -> None:
        root.mkdir(parents=True)
        config = Config(runtime_dir=str(root / "run"), agent=AgentConfig(direct_io=direct_io))
        self._save, self._iteration = root / "save", 0
        self.ranks = [Rank(self._save, config, rank, mib) for rank in range(RANKS)]
        self.nbytes = sum(rank.nbytes for rank in self.ranks)
        self._agent = self.ranks[0].client.agent_pid

    def save(self) -> tuple[float, float]:
        """Save once and remove the files; return the seconds, and the agent's CPU seconds."""
        self._iteration += 1
        used, since = cpu_s(self._agent), time.perf_counter()
        save(self.ranks, self._iteration)
        result = time.perf_counter() - since, cpu_s(self._agent) - used
        shutil.rmtree(self._save / f"iter_{self._iteration:07d}")
        return result

    def close(self) -> None:
        for rank in self.ranks:
            rank.hang_up(leave=True)


def raw_writes(root: Path, memory: memoryview, mode: str) -> Callable[[], tuple[float, float]]:
    """Return a function that writes a file for every rank, and returns the seconds."""

    def write(number: int) -> None:
        write_raw(root / f"raw{number}", memory, direct=mode == "O_DIRECT")

    def write_all() -> tuple[float, float]:
        since = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(RANKS) as pool:
            list(pool.map(write, range(RANKS)))
        seconds = time.perf_counter() - since
        for path in root.glob("raw*"):
            path.unlink()
        return seconds, 0.0

    return write_all


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--mib", type=int, nargs="+", default=[253, 1024], help="approximate state of a rank, MiB"
    )
    parser.add_argument(
        "--direct-io",
        choices=("auto", "always", "never"),
        nargs="+",
        default=[AgentConfig().direct_io],
        help="values of `agent.direct_io` to compare in turn",
    )


def run(options: argparse.Namespace, root: Path) -> Iterator[Result]:
    """Yield a table for each size, with a row per value of `agent.direct_io`."""
    for mib in options.mib:
        place = root / f"{mib}"
        ours = {how: Ours(place / how, mib, how) for how in options.direct_io}
        memory = memoryview(mmap.mmap(-1, next(iter(ours.values())).ranks[0].nbytes))
        fill_randomly(memory)
        works = {how: system.save for how, system in ours.items()}
        works |= {mode: raw_writes(place, memory, mode) for mode in _MODES}
        # Both slots, and the memory of raw writes, have been used before.
        measured = in_turns(works, options.rounds, warm_up=2)
        for system in ours.values():
            system.close()
        shutil.rmtree(place, ignore_errors=True)
        yield _table(options.rounds, ours, measured)


def _table(
    rounds: int, ours: dict[str, Ours], measured: dict[str, list[tuple[float, float]]]
) -> Table:
    """Return a table whose times are relative to raw writes of the same round."""
    seconds = {name: [took for took, _ in of_rounds] for name, of_rounds in measured.items()}
    medians = {mode: statistics.median(seconds[mode]) for mode in _MODES}
    best = min(medians, key=lambda mode: medians[mode])
    gb = next(iter(ours.values())).nbytes / 1e9
    rows = []
    for how in ours:
        ratios = [took / raw for took, raw in zip(seconds[how], seconds[best], strict=True)]
        rows.append(
            (
                how,
                *(statistics.median(seconds[how]), statistics.median(ratios)),
                *(min(ratios), max(ratios)),
                statistics.median(used for _, used in measured[how]) / gb,
            )
        )
    raw = "; ".join(f"{mode} {gb / taken:.2f} GB/s" for mode, taken in medians.items())
    title = (
        f"{RANKS} ranks, {gb:.2f} GB in all; medians of {rounds} interleaved rounds; raw writes: "
        f"{raw}"
    )
    columns = {
        "direct_io": "",
        "committed, s": ".3f",
        **dict.fromkeys((f"x raw ({best})", "least", "most", "CPU s per GB"), ".2f"),
    }
    return Table(title, columns, rows)


STUDY = Study("persist", "writes of shards until the commit, against raw writes", add_options, run)
