"""A trainer without torch: stages numpy bytes and talks to the real agent, as a rank does.

`FakeTrainer` runs in the test's process. `TrainerProcess` runs a trainer in its own process, which
a test can kill at a chosen point; run as a program, this file is that process.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from megatron_flashckpt.agent import runs
from megatron_flashckpt.agent.alive import Admission, Policy
from megatron_flashckpt.agent.client import AgentClient
from megatron_flashckpt.agent.connecting import connect
from megatron_flashckpt.agent.protocol import Offer, Outcome
from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.config import AgentConfig, Config, Retention
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.file_format.file_names import (
    iteration_dir,
    run_name,
    run_of,
    save_name,
    shard_name,
)
from megatron_flashckpt.file_format.run_object import Ancestors, RunObject
from megatron_flashckpt.layout.piece import MASTER, RANK_STATE, WEIGHT, Piece
from megatron_flashckpt.layout.save_cost import RankCost
from megatron_flashckpt.layout.template import Layout, PlanCache, order
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import Slot, SlotHeader, SlotMeta, SlotState
from megatron_flashckpt.save.failed_ends import FailedEnds
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.retrying_store import RetryingStore
from megatron_flashckpt.tracing import Span

T = TypeVar("T")

#: Longest wait for anything that should happen at once; a test that waits so long has failed.
PATIENCE_S = 20.0
_REPOSITORY = Path(__file__).parents[2]


_numbers, _saves = itertools.count(100), itertools.count(1)
#: Each process of a test has its own one.
_UNOPENED = run_name(1, secrets.token_hex(2))


def eventually(what: str, probe: Callable[[], T | None], within_s: float = PATIENCE_S) -> T:
    """Call `probe` until it returns a true value or the deadline passes; return the value.

    A probe may list directories that an agent removes at the same time.
    """
    deadline = time.monotonic() + within_s
    while True:
        with contextlib.suppress(FileNotFoundError):
            value = probe()
            if value:
                return value
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.005)


def remove_tree(path: Path) -> None:
    """Remove a directory while an agent may still tidy up in it after a commit."""

    def is_gone() -> bool:
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()

    eventually(f"{path} is removed", is_gone)


def copy_tree(source: Path, copy: Path) -> None:
    """Copy a save directory as `cp` does: what its agent removes meanwhile is left out."""
    try:
        shutil.copytree(source, copy)
    except shutil.Error as error:
        if any(os.path.lexists(name) for name, _, _ in error.args[0]):
            raise


def new_save_id() -> str:
    """Return a new name of a save, of one run that no trainer has opened."""
    return save_name(_UNOPENED, next(_saves))


def run_after(save_id: str | None, iteration: int = 0) -> RunObject:
    """Return a run that resumes from a save (None: from scratch), with a higher number each time.

    It has no object in storage, as if it was removed.
    """
    save = None if save_id is None else Save(iteration, save_id)
    run = runs.new_run(save, (), "scratch" if save is None else "memory", 1)
    return msgspec.structs.replace(run, name=run_name(next(_numbers), secrets.token_hex(2)))


def content(rank: int, iteration: int, nbytes: int) -> bytes:
    """Return the data of `rank` at `iteration`, which differs from that of all other pairs."""
    return np.random.default_rng([rank, iteration]).bytes(nbytes)


def pieces_of(rank: int, world_size: int, key: str, numel: int) -> list[Piece]:
    """Return pieces in layout order: a master, its weight and some side state, one row per rank."""

    def row(key: str, kind: str, dtype: str, width: int) -> Piece:
        return Piece(key, kind, dtype, (world_size, width), (rank, 0), (1, width), 0, width)

    pieces = [
        row(key, WEIGHT, "BF16", numel),
        row(key, MASTER, "F32", numel),
        row(RANK_STATE, RANK_STATE, "U8", 77),
    ]
    return [pieces[i] for i in order(pieces)]


def slot_meta(layout: Layout, rank: int = 0, world_size: int = 1, **more: Any) -> SlotMeta:
    """Return the description of a slot with `layout`."""
    return SlotMeta(
        rank=rank,
        world_size=world_size,
        coordinates=Coordinates(dp=rank),
        template_fingerprint=layout.template_fingerprint,
        template=layout.template,
        placement=layout.placement,
        description={"made_by": "a fake trainer"},
        **{"root": "/save", "common": b"", **more},
    )


def write_slot(
    slot: Slot, layout: Layout, iteration: int, save_id: str, state: SlotState = SlotState.STAGED
) -> Slot:
    """Write a save of a job with one rank into a slot, and return the slot."""
    encoded = msgspec.msgpack.encode(slot_meta(layout))
    slot.set_header(SlotHeader(state, iteration, save_id, len(encoded), layout.nbytes))
    slot.set_meta(encoded)
    with slot.data() as data:
        data[:] = content(0, iteration, len(data))
    return slot


@contextlib.contextmanager
def staged_slot(numel: int) -> Iterator[Slot]:
    """Yield a slot with iteration 1 that no agent knows."""
    layout = PlanCache().layout(pieces_of(0, 1, "decoder.weight", numel))
    with contextlib.closing(Slab.create(1, 16384, layout.nbytes, "0")) as slab:
        yield write_slot(slab.slots[0], layout, 1, new_save_id())


def config_of(runtime_dir: Path, **agent: Any) -> Config:
    """Return settings for an agent under `runtime_dir`."""
    return Config(runtime_dir=str(runtime_dir), agent=AgentConfig(**{"grace_s": 60.0, **agent}))


class FakeTrainer:
    """One rank of a job of `world_size`, connected to its node's agent."""

    def __init__(
        self,
        root: Path | str,
        config: Config,
        rank: int = 0,
        world_size: int = 1,
        *,
        key: str = "decoder.weight",
        numel: int = 1000,
        slots: int = 2,
        retain_interval: int | None = None,
        retention: Retention = Retention(),  # noqa: B008, a frozen one
    ) -> None:
        self.root = root
        self.rank = rank
        self.world_size = world_size
        self.pieces = pieces_of(rank, world_size, key, numel) if numel else []
        self.slots = slots
        self.retain_interval = retain_interval
        self.retention = retention
        self.metrics: dict[str, float] = {}
        self.run: RunObject | None = None
        self._names = itertools.count(1)
        self.slab: Slab | None = None
        self._untold: list[Outcome] = []
        self._config = config
        self.client: AgentClient = connect(str(root), rank, 0, config, threading.Event())
        self.plans = PlanCache(self.client.fetch_template, self.client.publish_template)

    @property
    def layout(self) -> Layout:
        return self.plans.layout(self.pieces)

    def open_run(
        self,
        save: Save | None = None,
        ancestors: Ancestors = (),
        policy: Policy = "refuse",
        wait_s: float = 0.0,
    ) -> RunObject:
        """Open a run, as rank 0 does, and tell the agent; other ranks pass it to `client`."""
        store = RetryingStore(open_store(self.root))
        admission = Admission(store, policy, wait_s, lambda: self.client)
        run = runs.new_run(save, ancestors, "scratch" if save is None else "storage", 1)
        opened = runs.open_run(admission, run, agent_pid=self.client.agent_pid)
        runs.grant_wish(store, opened, None)
        self.join(opened)
        return opened

    def join(self, run: RunObject) -> None:
        """Tell the agent that this rank saves under a run from now on."""
        self.run, self._names = run, itertools.count(1)
        self.client.open_run(run)

    def new_save_id(self) -> str:
        """Return the name of the next save of this rank's run, if it has joined one."""
        return new_save_id() if self.run is None else save_name(self.run.name, next(self._names))

    def reconnect(self) -> tuple[str, ...]:
        """Connect to a new agent and send it the slab, as a rank does whose agent has ended.

        Returns the saves that the agent adopts.
        """
        self.find_agent()
        return self.attach()

    def find_agent(self) -> None:
        self.client.close()
        self.client = connect(str(self.root), self.rank, 0, self._config, threading.Event())
        if self.run is not None:
            self.client.open_run(self.run)

    def attach(self) -> tuple[str, ...]:
        return self.client.attach(self.slab)

    def take(self) -> tuple[Offer, ...]:
        """Switch to the slab that the agent holds for this rank; return the offers in it."""
        former = self.slab
        self.slab, offers = self.client.take()
        if former is not None:
            former.close()
        return offers

    def bytes_in(self, index: int) -> bytes:
        """Return the data of a slot."""
        with self.slab.slots[index].data() as data:
            return bytes(data)

    def begin(self, iteration: int, save_id: str, wait_s: float = 0.0) -> Slot | None:
        """Acquire a slot and write its header and metadata; None if all slots are busy."""
        # The janitor ends a save of another run as dead as soon as it sees the save's first file.
        assert self.run is None or run_of(save_id) == self.run.name, "a save of another run"
        layout = self.layout
        meta = msgspec.msgpack.encode(
            slot_meta(
                layout,
                self.rank,
                self.world_size,
                root=str(self.root),
                common=b"common of %d by %s" % (iteration, save_id.encode())
                if self.rank == 0
                else b"",
                retain_interval=self.retain_interval,
                retention=self.retention,
                metrics=self.metrics,
                ancestors=() if self.run is None else self.run.ancestors,
            )
        )
        if self.slab is None:
            self.make_slab(len(meta))
        index = self.client.acquire(wait_s)
        if index < 0:
            return None
        slot = self.slab.slots[index]
        slot.set_header(SlotHeader(SlotState.STAGING, iteration, save_id, len(meta), layout.nbytes))
        slot.set_meta(meta)
        return slot

    def make_slab(self, meta_nbytes: int = 4096) -> None:
        """Make a slab with room for descriptions, and hand it to the agent, before a first save."""
        nbytes = meta_nbytes + 4096
        self.slab = Slab.create(self.slots, nbytes, self.layout.nbytes, str(self.rank))
        self.attach()

    def fill(self, slot: Slot, data: bytes) -> None:
        """Copy all of `data` into a slot that `begin` returned."""
        with slot.data() as target:
            target[:] = data

    def stage(
        self,
        iteration: int,
        save_id: str,
        wait_s: float = PATIENCE_S,
        *,
        state: SlotState = SlotState.STAGED,
        cost: RankCost | None = None,
        spans: tuple[Span, ...] = (),
    ) -> bytes:
        """Stage a whole checkpoint (KEPT: for memory only); return its bytes."""
        slot = self.begin(iteration, save_id, wait_s)
        assert slot is not None, "no slot became free"
        data = content(self.rank, iteration, self.layout.nbytes)
        self.fill(slot, data)
        slot.set_state(state)
        self.client.staged(slot.index, cost, spans)
        return data

    def call_off(self, iteration: int, save_id: str, reason: str) -> None:
        """Fail a save in which this rank has no part, as a training process does."""
        ends = FailedEnds(str(self.root), self.rank)
        ends.create(iteration, save_id, reason)
        ends.wait()

    def outcome(self, within_s: float = PATIENCE_S) -> Outcome:
        """Return the next result of a save."""
        if not self._untold:
            self._untold += eventually(
                f"an outcome for rank {self.rank}",
                lambda: self.client.poll(0.5).finished,
                within_s,
            )
        return self._untold.pop(0)

    def save(self, iteration: int, save_id: str | None = None) -> Outcome:
        """Stage a save and wait for its result."""
        self.stage(iteration, save_id or self.new_save_id())
        return self.outcome()

    def keep(self, iteration: int, save_id: str | None = None) -> Outcome:
        """Stage a save for memory only and wait for its result."""
        self.stage(iteration, save_id or self.new_save_id(), state=SlotState.KEPT)
        return self.outcome()

    def hang_up(self, *, leave: bool = False) -> None:
        """End this incarnation: like a crash, or (`leave`) in order."""
        if leave:
            self.client.leave()
        self.client.close()
        if self.slab is not None:
            self.slab.close()
            self.slab = None


def save_all(trainers: list[FakeTrainer], iteration: int) -> list[str | None]:
    """Save on all ranks; return the error of each rank."""
    save_id = trainers[0].new_save_id()
    for trainer in trainers:
        trainer.stage(iteration, save_id)
    outcomes = [trainer.outcome() for trainer in trainers]
    assert {(o.iteration, o.save_id) for o in outcomes} == {(iteration, save_id)}
    return [outcome.error for outcome in outcomes]


class TrainerProcess:
    """A rank in a process of its own, which stops at `stop` and waits to be killed."""

    def __init__(
        self,
        root: Path | str,
        runtime_dir: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        iterations: list[int],
        save_id: str,
        stop: Literal["staging", "staged", "committed"],
        inside: tuple[str, ...] = (),
    ) -> None:
        """Start the process.

        Args:
            iterations: saved one after the other; `stop` concerns the last one.
            save_id: id of the last save; earlier saves get ids of their own.
            inside: a command prefix, for example one that enters a namespace.
            stop: `staging` (header written, half of the bytes copied), `staged` ("staged" message
                sent) or `committed`.
        """
        job: dict[str, Any] = {"root": str(root), "runtime_dir": str(runtime_dir)}
        job |= {"rank": rank, "world_size": world_size, "iterations": iterations}
        job |= {"save_id": save_id, "stop": stop}
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-m", "tests.support.trainer", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(_REPOSITORY)},
            start_new_session=True,
        )

    def stopped(self) -> int:
        """Wait until the process has reached `stop`; return the agent's process id."""
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        assert ready, "the trainer did not come to its stop"
        line = self.process.stdout.readline()
        assert line, "the trainer ended before its stop"
        return int(json.loads(line)["agent_pid"])

    def kill(self) -> None:
        """Kill the process group, as a scheduler or the OOM killer would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        for stream in (self.process.stdin, self.process.stdout):
            stream.close()


@contextlib.contextmanager
def blocked_open(path: Path) -> Iterator[Callable[[], None]]:
    """Block every writer of `path` until the yielded function is called or the end.

    A writer looks first whether there is such a file, and opens it. A write lease (fcntl(2)) lets
    the kernel block that until the lease is released. A test thus decides how long a persist lasts.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    former = signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel asks for the lease by SIGIO
    fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def unblock() -> None:
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                path.unlink()  # before the lease ends: then the name is free
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield unblock
    finally:
        with contextlib.suppress(OSError):
            unblock()
        os.close(fd)
        signal.signal(signal.SIGIO, former)


def blocked_shard(
    root: Path, iteration: int, rank: int, save_id: str
) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Block the write of a shard as `blocked_open` does."""
    return blocked_open(root / iteration_dir(iteration) / shard_name(rank, save_id))


def kill_agent(pid: int) -> None:
    """Kill an agent that may have ended, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    eventually("the end of the agent", lambda: not is_alive(pid))


def is_alive(pid: int) -> bool:
    """Return whether `pid` runs: its main thread can be a zombie while others hold its files."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return any(map(_runs, Path(f"/proc/{pid}/task").iterdir()))
    return False


def _runs(task: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return _state(task) not in "ZX"
    return False


def suspend(pid: int) -> None:
    """Stop a process; return when all its threads have stopped, which takes a moment."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    eventually(
        "all threads stand still", lambda: {_state(task) for task in tasks.iterdir()} == {"T"}
    )


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def agents_under(runtime_dir: Path) -> list[int]:
    """Return the process ids of all agents with the setting `runtime_dir`, or a path below it."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"megatron_flashckpt.agent" in words and any(
            (word + b"/").startswith(os.fsencode(runtime_dir) + b"/") for word in words
        ):
            pids.append(int(process.name))
    return [pid for pid in pids if is_alive(pid)]


def end_agents(runtime_dir: Path) -> None:
    """Kill all agents with the setting `runtime_dir`, or a path below it; wait for their ends."""
    for pid in agents_under(runtime_dir):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            kill_agent(pid)


def _main() -> None:
    """Run the process of a `TrainerProcess`, whose arguments come as JSON."""
    job = json.loads(sys.argv[1])
    config = config_of(Path(job["runtime_dir"]))
    trainer = FakeTrainer(job["root"], config, job["rank"], job["world_size"])
    save_id, stop = job["save_id"], job["stop"]
    *earlier, last = job["iterations"]
    for iteration in earlier:
        # The name is equal on all ranks without communication.
        trainer.save(iteration, save_name(run_of(save_id), 10_000 + iteration))
    if stop == "staging":
        slot = trainer.begin(last, save_id, PATIENCE_S)
        with slot.data() as data:
            half = len(data) // 2
            data[:half] = content(trainer.rank, last, len(data))[:half]
    elif stop == "staged":
        trainer.stage(last, save_id)
    else:
        assert trainer.save(last, save_id).error is None
    print(json.dumps({"agent_pid": trainer.client.agent_pid}), flush=True)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    _main()
