"""Real Megatron: the cost of a save in iteration time, and restarts after a SIGKILL during copies.

There are three runs of one rank. The first run trains blocks of iterations without saves, with a
save every 5 iterations, and with a save after every iteration. Then it saves to storage, continues,
starts another save and is killed during its copies. The second run resumes from memory. The third
run resumes from storage, after the agent has ended. Both must repeat the losses and all tensors of
the first run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_flashckpt.memory.host_memory import available_nbytes
from tools.gpu_check.agents import end_agents
from tools.gpu_check.report import Report

LETTER = "M"
TITLE = "Megatron: price of a save, restart from memory and from storage"
SECONDS = 130
GPUS = 1
SIMULATED = False
MEGATRON = True
ALONE = True

_REPOSITORY = Path(__file__).parents[3]
_SCRIPT = _REPOSITORY / "tools/gpu_check/megatron_job.py"

_MODEL = (
    "--lr 1e-4 --min-lr 1e-5 --lr-decay-iters 1000 --lr-warmup-iters 2 --weight-decay 0.01 "
    "--clip-grad 1.0 --train-iters 1000 --bf16 --use-distributed-optimizer --swiglu "
    "--tokenizer-type NullTokenizer --mock-data --num-workers 0 --transformer-impl local "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion "
    "--attention-backend unfused --deterministic-mode --log-interval 1 --eval-interval 1000 "
    "--eval-iters 0"
).split()
#: Model of 1.3 billion parameters; a checkpoint has 18 GB.
_ON_GPU = (
    "--num-layers 20 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 "
    "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 8 "
    "--vocab-size 128000"
).split()
_ON_CPU = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --vocab-size 500"
).split()


@dataclasses.dataclass(frozen=True)
class Block:
    """Consecutive iterations with one frequency of saves; `end` is excluded."""

    kind: str
    begin: int
    end: int
    saved: tuple[int, ...]


def blocks(begin: int, rounds: int, length: int) -> list[Block]:
    """Return `rounds` turns of all frequencies, from iteration `begin` on.

    The last iteration of a block has no save, so the copies of a block's saves end inside the
    block.
    """
    made = []
    for _ in range(rounds):
        for kind, every in (("no save", 0), ("save every 5", 5), ("save every 1", 1)):
            end = begin + length
            saved = tuple(range(begin, end - 1, every)) if every else ()
            made.append(Block(kind, begin, end, saved))
            begin = end
    return made


def run(report: Report) -> None:
    """Run the three jobs on the GPU, or without a GPU on a CPU rank with a tiny model."""
    if (lack := _too_small()) is not None:
        report.skip("all", lack)
        return
    where = Path(tempfile.mkdtemp(prefix="flashckpt-check-"))
    try:
        _run(report, where)
    finally:
        end_agents(where)
        shutil.rmtree(where, ignore_errors=True)


def _too_small() -> str | None:
    """Return which memory or disk is too small for the model on the GPU; None if all suffice."""
    if not torch.cuda.is_available():
        return None
    for what, has, needs in (
        ("GPU memory", torch.cuda.get_device_properties(0).total_memory, 70),
        ("host memory", available_nbytes(), 50),
        ("disk", shutil.disk_usage(tempfile.gettempdir()).free, 25),
    ):
        if has < needs * 2**30:
            return f"needs {needs} GiB of {what}, there are {has / 2**30:.0f}"
    return None


def _run(report: Report, where: Path) -> None:
    turns = blocks(begin=6, rounds=2, length=6)
    kept = turns[-1].end
    last = kept + 3
    saves = {number: "memory" for block in turns for number in block.saved}
    saves[2] = "memory"
    saves[kept] = "storage"
    saves[last + 1] = "memory"
    schedule = {"saves": saves, "digests": [kept, last], "wait_until": 4, "kill": last + 2}
    # Copies of the tiny model on a CPU end at once, so a fault kills that process.
    fault = (
        {} if torch.cuda.is_available() else {"FLASHCKPT_FAULT": f"rank0:stage.copied:{len(saves)}"}
    )
    first = Run(where, "first", schedule, fault)
    schedule = {"saves": {}, "digests": [kept, last], "wait_until": 0, "kill": last + 1}
    memory = Run(where, "memory", schedule)
    storage = Run(where, "storage", schedule)
    with first.started():
        first.wait_killed(report)
    if len(first.events("begin")) < last:
        return
    _report_prices(report, first, turns)
    if torch.cuda.is_available():
        killed = first.events("killed")
        is_copying = bool(killed) and killed[0]["copying"]
        report.note("SIGKILL came while a save was being copied", "yes" if is_copying else "no")
    _resume(report, first, memory, "memory", kept, last)
    report.must("the save before the kill becomes durable", _await_tracker(where, kept))
    end_agents(where)
    _resume(report, first, storage, "storage", kept, last)


def _resume(report: Report, first: Run, again: Run, source: str, kept: int, last: int) -> None:
    """Run `again`; compare its losses and tensors with those of `first`."""
    with again.started():
        again.wait_killed(report)
    match = re.search(r"flashckpt: iteration (\d+) was restored from (\w+): (.*)", again.log())
    text = match[0] if match else again.log_end()
    expected = (str(kept), source)
    report.must(
        f"a restart resumes from {source}, from the newest whole save",
        match is not None and (match[1], match[2]) == expected,
        text,
    )
    report.note(f"load from {source}", text)
    for iteration in (kept, last):
        ours, restarted = first.digests(iteration), again.digests(iteration)
        unequal = [name for name in ours if restarted.get(name) != ours[name]]
        report.must(
            f"restart from {source}: all tensors after iteration {iteration} are equal",
            bool(ours) and ours.keys() == restarted.keys() and not unequal,
            f"{len(ours)} tensors; unequal: {', '.join(unequal[:5]) or 'none'}",
        )
    ours, restarted = first.losses(kept + 1, last), again.losses(kept + 1, last)
    report.must(
        f"restart from {source}: all losses are equal",
        bool(ours) and ours == restarted,
        f"{len(ours)} micro-batches",
    )
    used = [run.gpu_nbytes(last) for run in (first, again)]
    report.figure(
        f"GPU memory in use after a restart from {source}, beyond the first run's",
        (used[1] - used[0]) / 2**20,
        "MiB",
        f"{used[0] / 2**30:.2f} GiB in the first run",
    )


def _report_prices(report: Report, run: Run, turns: list[Block]) -> None:
    """Report the time of an iteration for each frequency of saves, and the cost of one save."""
    begins = {event["iteration"]: event["time"] for event in run.events("begin")}
    times: dict[str, list[float]] = {}
    saves: dict[str, int] = {}
    for block in turns:
        spans = [begins[n + 1] - begins[n] for n in range(block.begin, block.end)]
        times.setdefault(block.kind, []).extend(spans)
        saves[block.kind] = saves.get(block.kind, 0) + len(block.saved)
    plain = statistics.fmean(times["no save"])
    for kind, spans in times.items():
        detail = ", ".join(f"{1000 * span:.0f}" for span in spans)
        report.figure(f"iteration, {kind}", 1000 * statistics.fmean(spans), "ms", detail)
    for kind, count in saves.items():
        if count:
            price = (sum(times[kind]) - plain * len(times[kind])) / count
            report.figure(f"true price of a save, {kind}", 1000 * price, "ms", f"{count} saves")
    for event in run.events("page-locked"):
        report.figure("wait for page-locking before iteration 4", event["seconds"], "s")
    blocked = re.findall(r"host memory only, ([\d.]+) MiB .* blocked ([\d.]+) ms", run.log())
    if blocked:
        waits = [float(ms) for _, ms in blocked]
        report.figure(
            "time that save_checkpoint reports as blocked",
            statistics.median(waits),
            "ms",
            f"{float(blocked[0][0]) / 1024:.2f} GiB per save",
        )


class Run:
    """Process of the job, with the files that it writes."""

    def __init__(
        self,
        where: Path,
        name: str,
        schedule: dict[str, Any],
        environment: dict[str, str] | None = None,
    ) -> None:
        self._more = environment or {}
        self._where = where
        self._schedule = schedule
        self._trace = where / f"{name}.trace"
        self._losses = where / f"{name}.losses"
        self._log = where / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Run the process inside the context; kill it at the end of the context."""
        save = self._where / "checkpoints"
        command = [
            *(sys.executable, "-m", "megatron_flashckpt.launch", str(_SCRIPT), *_MODEL),
            *(_ON_GPU if torch.cuda.is_available() else _ON_CPU),
            # The schedule sets another interval before every iteration.
            *("--save", str(save), "--load", str(save), "--save-interval", "1000"),
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=self._environment(), cwd=self._where, stdout=log, stderr=log
            )
        try:
            yield
        finally:
            self._process.kill()
            self._process.wait()

    def _environment(self) -> dict[str, str]:
        path = [str(_REPOSITORY), os.environ.get("PYTHONPATH", "")]
        if (
            not torch.cuda.is_available()
        ):  # never where there is a GPU: it turns "cuda" into the CPU
            path.insert(0, str(_REPOSITORY / "tests/cpu_megatron"))
        return {
            **{key: value for key, value in os.environ.items() if not key.startswith("FLASHCKPT")},
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            # One rank needs no torchrun, whose start takes seconds.
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            # A machine without a network may not resolve its own name.
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            # --deterministic-mode requires these settings.
            "NCCL_ALGO": "Ring",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            # The compilation of Megatron's small fused functions would take longer than the runs.
            "TORCHDYNAMO_DISABLE": "1",
            "CPU_CUDA_STUBS": "triton",
            "SCHEDULE": json.dumps(self._schedule),
            "TRACE": str(self._trace),
            "LOSS_LOG": str(self._losses),
            "FLASHCKPT_RUNTIME_DIR": str(self._where / "run"),
            "FLASHCKPT_AGENT__GRACE_S": "120",
            "PYTHONWARNINGS": "ignore",
            **self._more,
        }

    def wait_killed(self, report: Report) -> None:
        """Wait until the process has ended; report whether its own SIGKILL has ended it."""
        assert self._process is not None
        status = self._process.wait()
        is_killed = status == -signal.SIGKILL
        report.must(
            f"the run '{self._trace.stem}' trains as far as its schedule says",
            is_killed,
            "" if is_killed else f"status {status}: {self.log_end()}",
        )

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def log_end(self) -> str:
        return self.log()[-1500:]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the traced events with one name, in order."""
        lines = self._trace.read_text().splitlines() if self._trace.exists() else []
        events = [json.loads(line) for line in lines]
        return [event for event in events if event["event"] == name]

    def digests(self, iteration: int) -> dict[str, str]:
        """Return the digests of all tensors after `iteration`; empty if it was not reached."""
        for event in self.events("digests"):
            if event["iteration"] == iteration:
                return dict(event["digests"])
        return {}

    def losses(self, first: int, last: int) -> list[str]:
        """Return iteration and exact loss of every micro-batch of these iterations."""
        path = Path(f"{self._losses}.0")
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if first <= int(line.split()[0]) <= last]

    def gpu_nbytes(self, iteration: int) -> int:
        """Return the bytes of GPU memory in use when `iteration` began."""
        match = [e["gpu_nbytes"] for e in self.events("begin") if e["iteration"] == iteration]
        return int(match[0]) if match else 0


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _await_tracker(where: Path, iteration: int, within_s: float = 60.0) -> bool:
    """Return whether storage names `iteration` as its newest checkpoint within `within_s`."""
    tracker = where / "checkpoints/latest_checkpointed_iteration.txt"
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if tracker.exists() and tracker.read_text() == str(iteration):
            return True
        time.sleep(0.05)
    return False
